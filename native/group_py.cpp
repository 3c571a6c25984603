// The Python face of groups and the programs that they walk.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstring>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "group.hpp"
#include "progress.hpp"
#include "sites_py.hpp"
#include "view_py.hpp"
#include "waiter_py.hpp"

namespace roundelay {

namespace {

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

// The program for messages of up to so many bytes: for private buffers, or none while nobody has
// asked for it; for those in the arena; the number of its algorithm; and whether it rounds halves
// once, else it is not for them.
using Rung = std::tuple<std::size_t, Plan*, Plan*, int, bool>;

// What plain calls of one collective look like on this rank.
struct Taught {
    bool reduces;
    std::size_t in_blocks, out_blocks, most_blocks;  // here, here, and on any rank
    std::vector<Rung> rungs;
};

// One communicator as Python holds it.
class PyGroup {
   public:
    PyGroup(std::shared_ptr<World> world, std::uint64_t at, int rank, std::vector<int> ranks,
            std::size_t slot_bytes, nb::object on_slow, nb::object on_broken, PyGroup* parent)
        : group_(world, at == 0 ? world->header().group_at : at, rank, ranks, slot_bytes),
          sites_(parent == nullptr ? std::make_shared<Sites>(world, ranks[std::size_t(rank)])
                                   : parent->sites_),
          on_slow_(std::move(on_slow)),
          on_broken_(std::move(on_broken)) {}

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
            BackgroundWaiter waiter(on_slow_, progress_->wanted());
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

    // Programs of one collective by size, so that plain calls of it need no Python.
    void teach(int collective, int root, bool reduces, std::size_t in_blocks,
               std::size_t out_blocks, std::size_t most_blocks, std::vector<Rung> rungs) {
        taught_[{collective, root}] = {reduces, in_blocks, out_blocks, most_blocks, std::move(rungs)};
    }

    // True when done; false when the caller must go the long way, which knows more kinds of
    // buffers and names what it refuses.
    bool quick(int collective, nb::handle given, nb::handle result, int op, int root) {
        const auto found = taught_.find({collective, root});
        if (found == taught_.end() || op < 0) return false;
        const Taught& known = found->second;
        const bool one = given.is(result);
        std::optional<View> in, out;
        if (known.in_blocks > 0 && !look(in, given)) return false;
        if (known.out_blocks > 0 && !(one && in) && !look(out, result)) return false;
        if (!in && !out) return false;
        const View* to = known.out_blocks == 0 ? nullptr : one && in ? &*in : &*out;
        const View& some = in ? *in : *out;
        const std::size_t count = some.count / (in ? known.in_blocks : known.out_blocks);
        if (in && in->count != count * known.in_blocks) return false;
        if (to != nullptr &&
            (!to->writable || to->dtype != some.dtype || to->count != count * known.out_blocks))
            return false;
        if (in && to != nullptr && to != &*in && overlap(*in, *to) && !own_block(known, *in, *to))
            return false;
        const auto kind = Op(op);
        if (known.reduces &&
            (kind == Op::maxloc || kind == Op::minloc || !supports(kind, some.dtype)))
            return false;
        const std::size_t item = itemsize(some.dtype);
        const bool half = some.dtype == DType::float16 || some.dtype == DType::bfloat16;
        for (const auto& [most, plan, reaching, algorithm, once] : known.rungs) {
            if (count * item * known.most_blocks > most) continue;
            if (plan == nullptr || (known.reduces && !once && (half || kind == Op::avg)))
                return false;
            try {
                Request request = prepare(*plan, reaching, in ? &*in : nullptr, to, collective,
                                          algorithm, root, int(some.dtype), op, item, count, {});
                run(request);
            } catch (const Broken&) {
                on_broken_();  // raises what the caller is to see
            }
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

    static bool look(std::optional<View>& view, nb::handle object) {
        if (PyObject_CheckBuffer(object.ptr()) == 0) return false;
        view.emplace(object.ptr(), View::Quietly{});
        return view->known && view->contiguous;
    }

    static bool overlap(const View& one, const View& other) {
        return one.data < other.data + other.bytes() && other.data < one.data + one.bytes();
    }

    // Whether one is this rank's own block of the other: nobody else's is written over it.
    bool own_block(const Taught& known, const View& in, const View& out) const {
        const auto rank = std::size_t(group_.rank());
        if (known.in_blocks == 1 && known.out_blocks > 1)
            return in.data == out.data + rank * in.bytes();
        if (known.out_blocks == 1 && known.in_blocks > 1)
            return out.data == in.data + rank * out.bytes();
        return false;
    }

    Request prepare(Plan& plan, Plan* reaching, const View* in, const View* out, int collective,
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
        const std::uint64_t kind =
            std::uint64_t(std::uint32_t(root)) << 16 | std::uint64_t(dtype) << 8 | unsigned(op);
        std::uint32_t hash = mix(mix(2166136261u, plan.name), kind);
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
    nb::object on_slow_, on_broken_;
    std::unique_ptr<Progress> progress_;
    std::map<std::pair<int, int>, Taught> taught_;  // by collective and root
};

Plan* make_plan(nb::bytes data) {
    std::vector<std::uint32_t> words(data.size() / sizeof(std::uint32_t));
    std::memcpy(words.data(), data.c_str(), words.size() * sizeof(std::uint32_t));
    return Plan::decode(words).release();
}

}  // namespace

void register_group(nb::module_& module) {
    module.def("cut", &cut, nb::arg("count"), nb::arg("parts"), nb::arg("part"));
    nb::class_<Plan>(module, "Plan")
        .def(nb::new_(&make_plan), nb::rv_policy::take_ownership)
        .def_ro("in_here", &Plan::in_here)
        .def_ro("out_here", &Plan::out_here)
        .def_ro("most", &Plan::most);
    // When it ran, in seconds of the monotonic clock; to be asked once it is done.
    nb::class_<Progress::Task>(module, "Task").def_prop_ro("times", [](const Progress::Task& task) {
        return nb::make_tuple(double(task.began_ns) / 1e9, double(task.ended_ns) / 1e9);
    });

    nb::class_<PyGroup>(module, "Group")
        .def(nb::init<std::shared_ptr<World>, std::uint64_t, int, std::vector<int>, std::size_t,
                      nb::object, nb::object, PyGroup*>(),
             nb::arg("world"), nb::arg("at"), nb::arg("rank"), nb::arg("world_ranks"),
             nb::arg("slot_bytes") = default_slot_bytes, nb::arg("on_slow"),
             nb::arg("on_broken").none() = nb::none(), nb::arg("parent").none() = nb::none())
        .def_static("bytes_for", &Group::bytes_for, nb::arg("size"),
                    nb::arg("slot_bytes") = default_slot_bytes)
        .def_prop_ro("at", [](PyGroup& self) { return self.group().at(); })
        .def_prop_ro("calls", [](PyGroup& self) { return self.group().calls(); })
        .def("moved",
             [](PyGroup& self, int rank) {
                 return nb::make_tuple(self.group().pulled(rank), self.group().pushed(rank));
             })
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
        .def("teach", &PyGroup::teach)
        .def("quick", &PyGroup::quick, nb::arg("collective"), nb::arg("given").none(),
             nb::arg("result").none(), nb::arg("op"), nb::arg("root"))
        .def("record", [](PyGroup& self, int rank, std::uint64_t call) {
            const Record record = self.group().record(rank, call);
            return nb::make_tuple(record.call, record.collective, record.algorithm, record.dtype,
                                  record.op, record.count, record.root,
                                  self.site(rank, record.site));
        });
}

}  // namespace roundelay
