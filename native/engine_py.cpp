// The Python face of worlds, groups, plans and mail.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <optional>
#include <tuple>

#include "group.hpp"
#include "mail.hpp"
#include "progress.hpp"
#include "sites_py.hpp"
#include "view_py.hpp"

namespace roundelay {

namespace {

constexpr std::size_t default_slot_bytes = 256 * 1024;
constexpr std::int64_t slow_ns = 5'000'000'000;

// Waits without the interpreter lock, lets signals through, and tells once when it takes long.
class PyWaiter : public Waiter {
   public:
    explicit PyWaiter(nb::handle on_slow) : on_slow_(on_slow) {}
    ~PyWaiter() override {
        if (saved_ != nullptr) PyEval_RestoreThread(saved_);
    }
    void blocks() override {
        if (saved_ == nullptr) saved_ = PyEval_SaveThread();
    }
    // False when one raised: the exception waits in the interpreter.
    bool lets_signals_in() {
        if (saved_ != nullptr) PyEval_RestoreThread(saved_);
        saved_ = nullptr;
        if (PyErr_CheckSignals() != 0) return false;
        saved_ = PyEval_SaveThread();
        return true;
    }
    bool goes_on(int rank, std::int64_t waited) override {
        PyEval_RestoreThread(saved_);
        saved_ = nullptr;
        if (PyErr_CheckSignals() != 0) return false;  // the exception waits in the interpreter
        if (waited > slow_ns && !told_) {
            told_ = true;
            try {
                on_slow_(rank, double(waited) / 1e9);
            } catch (nb::python_error& error) {
                error.restore();
                return false;
            }
        }
        saved_ = PyEval_SaveThread();
        return true;
    }

   private:
    nb::handle on_slow_;
    PyThreadState* saved_ = nullptr;
    bool told_ = false;
};

// For threads that hold no interpreter lock.
class BackgroundWaiter : public Waiter {
   public:
    explicit BackgroundWaiter(nb::handle on_slow) : on_slow_(on_slow) {}
    bool goes_on(int rank, std::int64_t waited) override {
        if (waited > slow_ns && !told_ && Py_IsInitialized() != 0) {
            told_ = true;
            const nb::gil_scoped_acquire lock;
            try {
                on_slow_(rank, double(waited) / 1e9);
            } catch (nb::python_error& error) {
                error.discard_as_unraisable("roundelay");
            }
        }
        return true;
    }

   private:
    nb::handle on_slow_;
    bool told_ = false;
};

// Run `work` with a waiter; an exception that a signal left in the interpreter comes first.
template <class Work>
void with_waiter(nb::handle on_slow, Work work) {
    bool broken = false;
    {
        PyWaiter waiter(on_slow);
        try {
            work(waiter);
        } catch (const Broken&) {
            broken = true;
        }
    }
    if (!broken) return;
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    throw Broken{};
}

struct Request {
    Call call;
    Plan* plan;
    Plan* reaching;
    std::vector<std::size_t> counts;
    std::size_t count;
};

std::uint32_t mix(std::uint32_t hash, std::uint64_t value) {
    for (int byte = 0; byte < 8; ++byte, value >>= 8) hash = (hash ^ std::uint8_t(value)) * 16777619u;
    return hash;
}

// One communicator as Python holds it.
class PyGroup {
   public:
    PyGroup(std::shared_ptr<World> world, std::uint64_t at, int rank, std::vector<int> ranks,
            std::size_t slot_bytes, nb::object on_slow, PyGroup* parent)
        : group_(world, at == 0 ? world->header().group_at : at, rank, ranks, slot_bytes),
          sites_(parent == nullptr ? std::make_shared<Sites>(world, ranks[std::size_t(rank)])
                                   : parent->sites_),
          on_slow_(std::move(on_slow)) {}

    ~PyGroup() {
        if (group_.world().foreign()) {
            (void)progress_.release();  // its thread did not come along into the child
            return;
        }
        const nb::gil_scoped_release unlocked;
        progress_.reset();
    }

    Group& group() { return group_; }

    void call(Plan& plan, Plan* reaching, View* in, View* out, int collective, int algorithm,
              int root, int dtype, int op, std::size_t item, std::size_t count,
              const std::vector<std::size_t>& counts) {
        Request request = prepare(plan, reaching, in, out, collective, algorithm, root, dtype, op,
                                  item, count, counts);
        run(request);
    }

    std::shared_ptr<Progress::Task> start(Plan& plan, Plan* reaching, View* in, View* out,
                                          int collective, int algorithm, int root, int dtype,
                                          int op, std::size_t item, std::size_t count,
                                          const std::vector<std::size_t>& counts) {
        auto request = std::make_shared<Request>(prepare(plan, reaching, in, out, collective,
                                                         algorithm, root, dtype, op, item, count,
                                                         counts));
        auto task = progress().submit([this, request] {
            BackgroundWaiter waiter(on_slow_);
            group_.run(request->call, *request->plan, request->reaching, request->counts,
                       request->count, waiter);
        });
        // The buffers stay while the call is under way, even if nobody keeps its handle.
        std::erase_if(under_way_, [&](const auto& old) { return progress().done(*old.first); });
        under_way_.emplace_back(task, nb::make_tuple(nb::find(in), nb::find(out), nb::find(plan)));
        return task;
    }

    bool done(Progress::Task& task) { return progress().done(task); }

    void wait(Progress::Task& task) {
        if (group_.world().foreign()) throw Broken{};
        while (true) {
            bool done = false;
            {
                const nb::gil_scoped_release unlocked;
                done = progress().wait(task, std::chrono::milliseconds(50));
            }
            if (done) break;
            if (PyErr_CheckSignals() != 0) throw nb::python_error();
        }
        if (task.error != nullptr) std::rethrow_exception(task.error);
    }

    // Programs for in-place all-reduce by size: the way of small and frequent calls.
    void set_all_reduce(std::vector<std::tuple<std::size_t, Plan*, Plan*, int>> table,
                        int collective) {
        ladder_ = std::move(table);
        all_reduce_ = collective;
    }

    // True when done; false when the caller must go the long way.
    bool all_reduce(nb::handle object, int op) {
        // The long way knows more kinds, and names what it refuses.
        if (op < 0 || !PyObject_CheckBuffer(object.ptr())) return false;
        View view(object.ptr(), View::Quietly{});
        const auto kind = Op(op);
        if (!view.known || !view.contiguous || !view.writable || kind == Op::maxloc || kind == Op::minloc ||
            !supports(kind, view.dtype))
            return false;
        for (const auto& [most, plan, reaching, algorithm] : ladder_) {
            if (view.bytes() > most) continue;
            Request request = prepare(*plan, reaching, &view, &view, all_reduce_, algorithm, 0,
                                      int(view.dtype), op, itemsize(view.dtype), view.count, {});
            run(request);
            return true;
        }
        return false;
    }

    std::string site(int rank, std::uint32_t number) {
        return group_.world().site(group_.world_rank(rank), number).data();
    }

   private:
    Progress& progress() {
        if (progress_ == nullptr) progress_ = std::make_unique<Progress>();
        return *progress_;
    }

    Request prepare(Plan& plan, Plan* reaching, View* in, View* out, int collective,
                    int algorithm, int root, int dtype, int op, std::size_t item,
                    std::size_t count, const std::vector<std::size_t>& counts) {
        if (group_.world().foreign()) throw Broken{};
        Request request{{}, &plan, reaching, counts, count};
        Call& call = request.call;
        call.in = in == nullptr ? nullptr : in->data;
        call.out = out == nullptr ? nullptr : out->data;
        call.dtype = DType(dtype);
        call.op = Op(op);
        call.item = item;
        std::uint32_t hash = mix(mix(2166136261u, plan.name), std::uint64_t(dtype) << 8 | unsigned(op));
        hash = mix(hash, count);
        for (std::size_t length : counts) hash = mix(hash, length);
        call.record.hash = hash;
        call.record.site = sites_->here();
        call.record.count = count;
        call.record.root = root;
        call.record.collective = std::uint8_t(collective);
        call.record.dtype = std::uint8_t(dtype);
        call.record.op = std::uint8_t(op);
        call.record.algorithm = std::uint8_t(algorithm);
        return request;
    }

    void run(Request& request) {
        with_waiter(on_slow_, [&](PyWaiter& waiter) {
            // Work that takes long anyway is done without the lock from the start.
            if (request.count * request.call.item > 64 * 1024 || !request.counts.empty())
                waiter.blocks();
            const auto work = [&] {
                group_.run(request.call, *request.plan, request.reaching, request.counts,
                           request.count, waiter);
            };
            if (progress_ == nullptr)
                work();
            else if (!progress_->run_now(work, [&] { return waiter.lets_signals_in(); }))
                throw Broken{};
        });
    }

    Group group_;
    std::shared_ptr<Sites> sites_;  // one table for all groups of a rank
    std::vector<std::pair<std::shared_ptr<Progress::Task>, nb::object>> under_way_;
    nb::object on_slow_;
    std::unique_ptr<Progress> progress_;
    std::vector<std::tuple<std::size_t, Plan*, Plan*, int>> ladder_;
    int all_reduce_ = 0;
};

// Keeps the buffers of letters under way, even if nobody keeps the letters.
class PyMailbox : public Mailbox {
   public:
    using Mailbox::Mailbox;
    ~PyMailbox() { stop(); }

    std::shared_ptr<Letter> send_or_receive(bool sends, int other, std::uint64_t group,
                                            std::int64_t tag, View& view, int dtype, bool background) {
        if (world().troubled() || world().foreign()) throw Broken{};
        auto letter = std::make_shared<Letter>();
        letter->sends = sends;
        letter->other = other;
        letter->envelope = {group, tag, view.bytes(), std::uint64_t(dtype)};
        letter->data = view.data;
        std::erase_if(under_way_, [](const auto& old) { return old.first->done.load(); });
        under_way_.emplace_back(letter, nb::find(view));
        post(letter);
        pump();
        if (background && !letter->done) run_in_background();
        return letter;
    }

   private:
    std::vector<std::pair<std::shared_ptr<Letter>, nb::object>> under_way_;
};

// Memory in the arena that all ranks of a group share; goes back when the last rank lets go of it.
class Block {
   public:
    static std::uint64_t make(World& world, std::size_t bytes, std::uint32_t ranks) {
        const std::uint64_t at = world.allocate(bytes + 4096);
        world.at<std::atomic<std::uint32_t>>(at)->store(ranks);
        return at;
    }
    Block(std::shared_ptr<World> world, std::uint64_t at, std::size_t bytes)
        : world_(std::move(world)), at_(at), bytes_(bytes) {}
    ~Block() {
        if (world_->foreign()) return;
        if (world_->at<std::atomic<std::uint32_t>>(at_)->fetch_sub(1) == 1)
            world_->release(at_, bytes_ + 4096);
    }
    std::uint64_t at() const { return at_ + 4096; }
    std::byte* data(std::size_t from) { return world_->at<std::byte>(at_ + 4096 + from); }

   private:
    std::shared_ptr<World> world_;
    std::uint64_t at_;
    std::size_t bytes_;
};

nb::object trouble_of(World& world) {
    if (!world.troubled()) return nb::none();
    const Header& header = world.header();
    static const char* const kinds[] = {"none", "mismatch", "lost", "timeout", "failed", "interrupted"};
    return nb::make_tuple(kinds[int(header.trouble.load())], header.culprit, header.finder,
                          header.group, header.call, header.text.data());
}

Plan* make_plan(int rank, int size, std::uint32_t posts, std::uint32_t slots, std::uint32_t blocks,
                std::uint32_t parts, bool reaches_in, bool reaches_out, bool in_place,
                std::vector<bool> posts_last, std::uint32_t name,
                const std::vector<std::vector<std::uint32_t>>& lines,
                const std::vector<std::vector<std::uint32_t>>& operands,
                std::vector<std::vector<std::uint32_t>> in_blocks,
                std::vector<std::vector<std::uint32_t>> out_blocks) {
    auto plan = std::make_unique<Plan>();
    plan->rank = rank;
    plan->size = size;
    plan->posts = posts;
    plan->slots = slots;
    plan->blocks = blocks;
    plan->parts = parts;
    plan->reaches_in = reaches_in;
    plan->reaches_out = reaches_out;
    plan->in_place = in_place;
    plan->posts_last = std::move(posts_last);
    plan->name = name;
    for (const auto& raw : lines)
        plan->lines.push_back({Kind(raw.at(0)), raw.at(1) != 0, std::uint16_t(raw.at(2)),
                               std::uint16_t(raw.at(3)), std::uint16_t(raw.at(4)), raw.at(5),
                               raw.at(6), raw.at(7), raw.at(8)});
    for (const auto& raw : operands)
        plan->operands.push_back({Space(raw.at(0)), std::uint16_t(raw.at(1)), raw.at(2), raw.at(3),
                                  raw.at(4), raw.at(5)});
    plan->in_blocks = std::move(in_blocks);
    plan->out_blocks = std::move(out_blocks);
    return plan.release();
}

}  // namespace

void register_engine(nb::module_& module) {
    nb::exception<Broken>(module, "Broken");
    nb::exception<OutOfMemory>(module, "OutOfMemory", PyExc_MemoryError);
    module.def("set_package", &Sites::set_package);
    module.def("available_cores", &available_cores);
    module.def("available_memory", &available_memory);
    module.def("set_kill_point", &set_kill_point);
    module.attr("ANY_TAG") = any_tag;

    nb::class_<World>(module, "World")
        .def_static(
            "create",
            [](int size, std::size_t arena, std::size_t slot_bytes) {
                return World::create(size, Group::bytes_for(size, slot_bytes), arena);
            },
            nb::arg("size"), nb::arg("arena") = std::size_t(1) << 36,
            nb::arg("slot_bytes") = default_slot_bytes)
        .def_static("attach",
                    [](int fd, nb::bytes token) {
                        const auto* start = reinterpret_cast<const std::uint8_t*>(token.c_str());
                        return World::attach(fd, {start, token.size()});
                    })
        .def_prop_ro("size", &World::size)
        .def_prop_ro("fd", &World::fd)
        .def_prop_ro("used", &World::used)
        .def_prop_ro("foreign", &World::foreign)
        .def_prop_ro("token",
                     [](World& world) {
                         const auto token = world.token();
                         return nb::bytes(reinterpret_cast<const char*>(token.data()), token.size());
                     })
        .def("enter", &World::enter)
        .def("leave", &World::leave)
        .def("watch", &World::watch, nb::arg("pipes"), nb::arg("own"))
        .def_prop_ro("trouble", &trouble_of)
        .def("fail",
             [](World& world, const std::string& kind, int culprit, const std::string& text) {
                 const auto what = kind == "interrupted" ? Trouble::interrupted : Trouble::failed;
                 world.fail(what, culprit, culprit, 0, 0, text);
             })
        .def("life", [](World& world, int rank) { return int(world.rank(rank).life.load()); })
        .def("pid", [](World& world, int rank) { return world.rank(rank).pid.load(); })
        .def("heartbeat", [](World& world, int rank) { return world.rank(rank).heartbeat.load(); })
        .def("next_serial", [](World& world) { return ++world.header().serial; })
        .def("allocate", &World::allocate)
        .def("release", &World::release)
        .def("make_block", &Block::make);

    nb::class_<View>(module, "View")
        .def("__init__", [](View* self, nb::object object) { new (self) View(object.ptr()); })
        .def_ro("count", &View::count)
        .def_prop_ro("dtype", [](const View& view) { return int(view.dtype); })
        .def_prop_ro("bytes", &View::bytes)
        .def_ro("writable", &View::writable)
        .def_ro("contiguous", &View::contiguous);

    nb::class_<Plan>(module, "Plan").def(nb::new_(&make_plan), nb::rv_policy::take_ownership);
    nb::class_<Progress::Task>(module, "Task");

    nb::class_<Block>(module, "Block")
        .def(nb::init<std::shared_ptr<World>, std::uint64_t, std::size_t>())
        .def_prop_ro("at", &Block::at)
        .def("bytes", [](nb::handle self, std::size_t from, std::size_t count) {
            std::byte* data = nb::cast<Block&>(self).data(from);
            return nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(
                reinterpret_cast<std::uint8_t*>(data), {count}, self);
        });

    nb::class_<PyGroup>(module, "Group")
        .def(nb::init<std::shared_ptr<World>, std::uint64_t, int, std::vector<int>, std::size_t,
                      nb::object, PyGroup*>(),
             nb::arg("world"), nb::arg("at"), nb::arg("rank"), nb::arg("world_ranks"),
             nb::arg("slot_bytes") = default_slot_bytes, nb::arg("on_slow"),
             nb::arg("parent").none() = nb::none())
        .def_static("bytes_for", &Group::bytes_for, nb::arg("size"),
                    nb::arg("slot_bytes") = default_slot_bytes)
        .def_prop_ro("at", [](PyGroup& self) { return self.group().at(); })
        .def_prop_ro("calls", [](PyGroup& self) { return self.group().calls(); })
        .def("set_timeout",
             [](PyGroup& self, double seconds) {
                 self.group().set_timeout(std::int64_t(std::min(seconds, 1e9) * 1e9));
             })
        .def("set_spin",
             [](PyGroup& self, double seconds) {
                 self.group().set_spin(std::int64_t(seconds * 1e9));
             })
        .def("call", &PyGroup::call, nb::arg("plan"), nb::arg("reaching").none(),
             nb::arg("input").none(), nb::arg("output").none(), nb::arg("collective"),
             nb::arg("algorithm"), nb::arg("root"), nb::arg("dtype"), nb::arg("op"),
             nb::arg("item"), nb::arg("count"), nb::arg("counts"))
        .def("start", &PyGroup::start, nb::arg("plan"), nb::arg("reaching").none(),
             nb::arg("input").none(), nb::arg("output").none(), nb::arg("collective"),
             nb::arg("algorithm"), nb::arg("root"), nb::arg("dtype"), nb::arg("op"),
             nb::arg("item"), nb::arg("count"), nb::arg("counts"))
        .def("done", &PyGroup::done)
        .def("wait", &PyGroup::wait)
        .def("set_all_reduce", &PyGroup::set_all_reduce)
        .def("all_reduce", &PyGroup::all_reduce)
        .def("record", [](PyGroup& self, int rank, std::uint64_t call) {
            const Record record = self.group().record(rank, call);
            return nb::make_tuple(record.call, record.collective, record.algorithm, record.dtype,
                                  record.op, record.count, record.root,
                                  self.site(rank, record.site));
        });

    nb::class_<Letter>(module, "Letter")
        .def_prop_ro("done", [](const Letter& letter) { return letter.done.load(); })
        .def_prop_ro("found", [](const Letter& letter) {
            return nb::make_tuple(letter.other.load(), letter.found.tag, letter.found.bytes,
                                  letter.found.dtype);
        });

    nb::class_<PyMailbox>(module, "Mailbox")
        .def(nb::init<std::shared_ptr<World>, int>())
        .def("post", &PyMailbox::send_or_receive)
        .def("wait", [](PyMailbox& self, Letter& letter, double seconds, nb::object on_slow) {
            if (self.world().foreign()) throw Broken{};
            with_waiter(on_slow, [&](PyWaiter& waiter) {
                self.wait(letter, std::int64_t(std::min(seconds, 1e9) * 1e9), waiter);
            });
        });
}

}  // namespace roundelay
