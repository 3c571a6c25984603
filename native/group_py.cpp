// The Python face of groups and the programs that they walk.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <map>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>

#include "bound_call_py.hpp"
#include "group.hpp"
#include "group_py.hpp"
#include "inside_py.hpp"
#include "kept_py.hpp"
#include "call_queue.hpp"
#include "registered.hpp"
#include "sites_py.hpp"
#include "view_py.hpp"
#include "waiter_py.hpp"

namespace roundelay {

namespace {

// No more calls: the communicator is closed.
struct Closed : std::exception {
    const char* what() const noexcept override { return "the group is closed"; }
};

// Programs as Python holds them, which keeps them alive.
struct PyWays {
    Ways ways;
    nb::tuple kept;
};

struct PreparedCall {
    Call call;
    const Ways* ways;
    std::vector<std::size_t> counts;
    std::size_t count;
    CallBuffers::Extent in, out;

    void run(Group& group, Waiter& waiter) {
        if (ways->in_arena == nullptr) return group.run(call, *ways, counts, count, waiter);
        const CallBuffers seen(group.world(), call, in, out);
        group.run(call, *ways, counts, count, waiter);
    }
};

// The programs for messages of up to so many bytes, or none while nobody has asked for them, and the number
// of the algorithm; then both once more for what is to be rounded once: halves, and means.
using SizeClass = std::tuple<std::size_t, PyWays*, int, PyWays*, int>;

// How the shapes of input and output go together: alike; or the output, the input, or both have blocks of
// all ranks.
enum class Shapes { alike, gathered, scattered, both };

// What plain calls of one collective look like on this rank.
struct PlainCalls {
    int collective;
    bool reduces;
    Shapes shapes;
    bool along_axis;  // blocks are some rows of one array each, else one
    std::size_t in_blocks, out_blocks, most_blocks;  // here, here, and on any rank
    std::vector<SizeClass> size_classes;
};

// What the groups of one rank share.
struct Shared {
    Sites sites;
    std::vector<std::weak_ptr<CallQueue>> queues;  // of all of them
    std::shared_ptr<Trace> trace;                  // or none
};

// A call in the background. It needs nobody: neither the group's Python object nor the interpreter.
struct PyCallRequest : CallQueue::Task {
    std::shared_ptr<CallQueue> queue;
    std::shared_ptr<World> world;
    std::uint64_t number = 0;  // of the call, as its group counts
    std::weak_ptr<KeptAlive> kept;

    bool is_done() const {
        if (world->foreign()) throw Broken{};
        return done;
    }

    void wait(nb::handle on_slow) {
        if (!is_done()) {
            Inside::refuse_behind(queue.get(), number, {-1, "wait", ""});
            with_waiter(on_slow, [&](PyWaiter& waiter) {
                waiter.blocks();
                while (!queue->wait(*this))
                    if (!waiter.goes_on(*queue, *world)) throw Broken{};
            });
        }
        if (const auto list = kept.lock()) list->sweep();
        if (error != nullptr) std::rethrow_exception(error);
    }
};

std::vector<int> all_of(const World& world) {
    std::vector<int> ranks(std::size_t(world.size()));
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
}

}  // namespace

// One communicator as Python holds it. Calls in the background outlive it.
class PyGroup {
   public:
    PyGroup(std::shared_ptr<World> world, std::shared_ptr<Block> block, int rank,
            std::vector<int> ranks, std::size_t slot_bytes, nb::object on_slow,
            nb::object on_broken, PyGroup* parent, std::uint64_t serial)
        : group_(std::make_shared<Group>(world, std::move(block), rank,
                                       ranks.empty() ? all_of(*world) : std::move(ranks),
                                       slot_bytes)),
          queue_(std::make_shared<CallQueue>()),
          shared_(parent != nullptr
                      ? parent->shared_
                      : std::make_shared<Shared>(Shared{Sites(world, group_->world_rank(rank)), {}, {}})),
          on_slow_(std::move(on_slow)),
          on_broken_(std::move(on_broken)) {
        std::erase_if(shared_->queues, [](const auto& queue) { return queue.expired(); });
        shared_->queues.push_back(queue_);
        if (serial != 0) group_->name(serial, site_here());  // the group of all ranks has no name
        if (shared_->trace != nullptr) group_->set_trace(shared_->trace);
    }

    ~PyGroup() {
        if (!world().foreign()) {
            queue_->forget(false);
            return;
        }
        // Locks that threads held stay locked in a forked child: it touches none.
        new std::shared_ptr<CallQueue>(std::move(queue_));
        new std::shared_ptr<Group>(std::move(group_));
    }

    Group& group() { return *group_; }
    std::uint32_t site_here() { return shared_->sites.here(); }
    bool failed() const { return queue_->failed(); }

    // Have this group, and those made from it from now on, write what they do.
    void set_trace(std::shared_ptr<Trace> trace) {
        shared_->trace = trace;
        group_->set_trace(std::move(trace));
    }

    void call(PyWays& ways, View* in, View* out, int collective, int algorithm, int root, int dtype, int op,
              std::size_t item, std::size_t count, const std::vector<std::size_t>& counts) {
        PreparedCall prepared = prepare(ways, in, out, collective, algorithm, root, dtype, op, item, count, counts);
        run(prepared);
    }

    std::shared_ptr<PyCallRequest> start(PyWays& ways, View* in, View* out, int collective, int algorithm, int root,
                                         int dtype, int op, std::size_t item, std::size_t count,
                                         const std::vector<std::size_t>& counts) {
        auto prepared = std::make_shared<PreparedCall>(
            prepare(ways, in, out, collective, algorithm, root, dtype, op, item, count, counts));
        if (Trace* trace = group_->trace(); trace != nullptr) {
            prepared->call.asked_ns = now_ns();
            prepared->call.name = trace->take_name();
        }
        auto task = std::make_shared<PyCallRequest>();
        task->queue = queue_;
        task->world = group_->world().shared_from_this();
        task->number = ++made_;
        task->kept = kept_;
        task->work = [prepared, group = group_, queue = queue_.get()] {
            BackgroundWaiter waiter(*queue);
            prepared->run(*group, waiter);
        };
        queue_->submit(task);
        // The buffers stay while the call is under way, even if nobody keeps its handle.
        kept_->keep(task, nb::make_tuple(nb::find(in), nb::find(out), nb::find(ways)));
        return task;
    }

    // A call whose buffers come later, from a compiled program: its number. See BoundCall.
    std::int64_t bind(PyWays& ways, int collective, int algorithm, int root, int dtype, int op, std::size_t item,
                      std::size_t count, bool shared) {
        const PreparedCall prepared =
            prepare(ways, nullptr, nullptr, collective, algorithm, root, dtype, op, item, count, {});
        const Program& program = *ways.ways.by_slots.front();
        auto bound = std::make_unique<BoundCall>();
        bound->call = prepared.call;
        bound->ways = prepared.ways;
        bound->kept = nb::make_tuple(nb::find(ways));
        bound->count = count;
        bound->untouched = program.out_here == 0 ? program.most * count * item : 0;
        bound->shared = shared;
        bound->world_rank = me();
        bound->group = group_;
        bound->queue = queue_;
        bound->closed = closed_;
        bound->on_slow = on_slow_;
        return BoundCall::add(std::move(bound));
    }

    // From now on nothing can be begun.
    void close() {
        if (Inside::anything()) Inside::refuse_within(world(), {-1, "close", here()});
        *closed_ = true;
    }

    // The last call: when it returns, nothing is under way in this group, or in any of this rank's.
    void drain(bool every) {
        std::vector<std::shared_ptr<CallQueue>> queues{queue_};
        for (const auto& queue : shared_->queues)
            if (auto other = queue.lock(); every && other != nullptr) queues.push_back(other);
        with_waiter(on_slow_, [&](PyWaiter& waiter) {
            for (const auto& queue : queues) {
                if (!queue->enter([&] { return waiter.goes_on(*queue, world()); })) {
                    world().fail(Trouble::interrupted, me(), me(), 0, 0, "");
                    throw Broken{};
                }
                queue->leave();
            }
        });
    }

    // See Group::end and Group::end_together.
    void end(int how, bool together, nb::handle on_slow) {
        const std::uint32_t site = site_here();
        with_waiter(on_slow, [&](PyWaiter& waiter) {
            waiter.blocks();
            if (!queue_->enter([&] { return waiter.goes_on(*queue_, world()); })) throw Broken{};
            const Turn turn{*this};
            if (together)
                group_->end_together(Ending(how), site, waiter);
            else
                group_->end(Ending(how), site);
        });
    }

    // After all that: others are told, and the thread ends.
    void leave() {
        group_->tell(Stage::left);
        if (world().foreign()) return;
        const Unlocked unlocked;
        queue_->forget(true);
    }

    // Programs of one collective by size, so that plain calls of it need no Python.
    void register_plain(int collective, int root, int shapes, bool along_axis, bool reduces, std::size_t in_blocks,
               std::size_t out_blocks, std::size_t most_blocks, std::vector<SizeClass> size_classes) {
        registered_[{collective, root}] = {collective, reduces, Shapes(shapes), along_axis, in_blocks, out_blocks, most_blocks, std::move(size_classes)};
    }

    // True when done; false when the caller must go the long way, which knows more kinds of
    // buffers and names what it refuses. `label` lies where it does in the word of a labelled call.
    bool fast_path(int collective, nb::handle given, nb::handle result, int op, int root,
                   int label) {
        if (*closed_) return false;  // the long way says so
        const PlainCalls* found = plain_calls(collective, root);
        if (found == nullptr || op < 0) return false;
        const PlainCalls& known = *found;
        const bool one = given.is(result);
        if (one && known.shapes == Shapes::both) return false;
        TensorReader reader;
        std::optional<View> in, out;
        if (known.in_blocks > 0 && !look(in, given, reader)) return false;
        if (known.out_blocks > 0 && !(one && in) && !look(out, result, reader)) return false;
        if (!in && !out) return false;
        View* to = known.out_blocks == 0 ? nullptr : one && in ? &*in : &*out;
        const View& some = in ? *in : *out;
        const std::size_t count = some.count / (in ? known.in_blocks : known.out_blocks);
        if (in && in->count != count * known.in_blocks) return false;
        if (to != nullptr &&
            (!to->writable || to->dtype != some.dtype || to->count != count * known.out_blocks))
            return false;
        if (in && to != nullptr && to != &*in &&
            (!fits(known, *in, *to) || (overlap(*in, *to) && !own_block(known, *in, *to))))
            return false;
        const auto kind = Op(op);
        if (known.reduces &&
            (kind == Op::maxloc || kind == Op::minloc || !supports(kind, some.dtype)))
            return false;
        const bool logical = kind == Op::land || kind == Op::lor || kind == Op::lxor;
        if (known.reduces && logical && group_->size() == 1) return false;  // nobody folds it to 0 and 1
        const std::size_t item = itemsize(some.dtype);
        const bool half = some.dtype == DType::float16 || some.dtype == DType::bfloat16;
        const bool once = known.reduces && (half || kind == Op::avg);
        for (const auto& [most, usual, usual_number, rounding, rounding_number] : known.size_classes) {
            if (count * item * known.most_blocks > most) continue;
            PyWays* ways = once ? rounding : usual;
            if (ways == nullptr) return false;
            View* from = in ? &*in : nullptr;
            if (ways->ways.in_arena != nullptr)  // where registered tensors are known by their storage
                for (View* view : {from, to})
                    if (view != nullptr) view->hold();
            try {
                PreparedCall prepared = prepare(*ways, from, to, collective,
                                                once ? rounding_number : usual_number, root | label,
                                                int(some.dtype), op, item, count, {});
                run(prepared, {from, to});
            } catch (const Broken&) {
                const Stay here;
                on_broken_();  // raises what the caller is to see
            }
            // The root of a broadcast has what comes, and writes nothing.
            const bool moved_in_place = one && in && !known.reduces;
            if (to != nullptr && !moved_in_place) to->written();
            return true;
        }
        return false;
    }

    std::string site(int rank, std::uint32_t number) {
        return world().site(group_->world_rank(rank), number).data();
    }

   private:
    struct Turn {
        PyGroup& self;
        ~Turn() {
            if (!self.world().foreign()) self.queue_->leave();
        }
    };

    World& world() const { return group_->world(); }
    int me() const { return group_->world_rank(group_->rank()); }
    std::string here() { return site(group_->rank(), shared_->sites.here()); }

    // What is registered for a collective and a root, most often those of its last call.
    const PlainCalls* plain_calls(int collective, int root) {
        auto& [recent_root, recent] = recent_[std::size_t(collective) % recent_.size()];
        if (recent == nullptr || recent_root != root || recent->collective != collective) {
            const auto found = registered_.find({collective, root});
            if (found == registered_.end()) return nullptr;
            recent_root = root;
            recent = &found->second;
        }
        return recent;
    }

    static bool look(std::optional<View>& view, nb::handle object, TensorReader& reader) {
        view.emplace(object.ptr(), reader);
        return view->known && view->contiguous;
    }

    static bool overlap(const View& one, const View& other) {
        return one.data < other.data + other.bytes() && other.data < one.data + one.bytes();
    }

    bool fits(const PlainCalls& known, const View& in, const View& out) const {
        const auto ranks = Py_ssize_t(group_->size());
        if (known.shapes == Shapes::alike) return std::ranges::equal(in.shape, out.shape);
        if (in.shape.empty() && out.shape.empty()) return false;
        if (known.shapes == Shapes::both) {
            const Py_ssize_t rows = in.shape.empty() ? 0 : in.shape[0];
            return std::ranges::equal(in.shape, out.shape) &&
                   (known.along_axis ? rows % ranks == 0 : rows == ranks);
        }
        const bool gathers = known.shapes == Shapes::gathered;
        const auto one = gathers ? in.shape : out.shape, all = gathers ? out.shape : in.shape;
        if (all.empty() || (known.along_axis && one.empty())) return false;
        if (!known.along_axis)
            return all[0] == ranks && std::ranges::equal(all.subspan(1), one);
        return all[0] == ranks * one[0] && std::ranges::equal(all.subspan(1), one.subspan(1));
    }

    // Whether one is this rank's own block of the other: nobody else's is written over it.
    bool own_block(const PlainCalls& known, const View& in, const View& out) const {
        const auto rank = std::size_t(group_->rank());
        if (known.in_blocks == 1 && known.out_blocks > 1)
            return in.data == out.data + rank * in.bytes();
        if (known.out_blocks == 1 && known.in_blocks > 1)
            return out.data == in.data + rank * out.bytes();
        return false;
    }

    PreparedCall prepare(const PyWays& ways, const View* in, const View* out, int collective,
                    int algorithm, int root, int dtype, int op, std::size_t item,
                    std::size_t count, const std::vector<std::size_t>& counts) {
        if (world().foreign()) throw Broken{};
        if (*closed_) throw Closed{};
        PreparedCall prepared{{}, &ways.ways, counts, count, {}, {}};
        Call& call = prepared.call;
        call.in = in == nullptr ? nullptr : in->data;
        call.out = out == nullptr ? nullptr : out->data;
        if (in != nullptr) prepared.in = {in->bytes(), in->storage()};
        if (out != nullptr) prepared.out = {out->bytes(), out->storage()};
        call.dtype = DType(dtype);
        call.op = Op(op);
        call.item = item;
        const auto wide = [&](const View* view) {
            return call.dtype == DType::bfloat16 && view != nullptr && view->dtype == DType::float32;
        };
        call.wide_in = wide(in);
        call.wide_out = wide(out);
        const std::uint64_t kind =
            std::uint64_t(std::uint32_t(root)) << 16 | std::uint64_t(dtype) << 8 | unsigned(op);
        std::uint32_t hash = mix(mix(2166136261u, ways.ways.by_slots.front()->name), kind);
        hash = mix(hash, count);
        for (std::size_t length : counts) hash = mix(hash, length);
        call.record.hash = hash;
        call.record.site = shared_->sites.here();
        call.record.count = count;
        call.record.root = root;
        call.record.collective = std::uint8_t(collective);
        call.record.dtype = std::uint8_t(dtype);
        call.record.op = std::uint8_t(op);
        call.record.algorithm = std::uint8_t(algorithm);
        return prepared;
    }

    // `views` are those of its buffers that nobody else keeps.
    void run(PreparedCall& prepared, std::array<View*, 2> views = {}) {
        const CallRecord& record = prepared.call.record;
        const std::uint64_t number = ++made_;
        if (Inside::anything())
            Inside::refuse_behind(queue_.get(), number,
                                  {record.collective, nullptr, site(group_->rank(), record.site)});
        const Inside inside(world(), queue_.get(), number, record.collective, record.site, me());
        with_waiter(on_slow_, [&](PyWaiter& waiter) {
            // Work that takes long anyway is done without the lock from the start.
            if (prepared.count * prepared.call.item > 64 * 1024 || !prepared.counts.empty())
                waiter.blocks();
            if (!queue_->enter([&] { return waiter.goes_on(*queue_, world()); })) throw Broken{};
            const Turn turn{*this};
            prepared.run(*group_, waiter);
        }, views);
    }

    std::shared_ptr<Group> group_;
    std::shared_ptr<CallQueue> queue_;
    std::shared_ptr<Shared> shared_;
    std::shared_ptr<KeptAlive> kept_ = std::make_shared<KeptAlive>();
    nb::object on_slow_, on_broken_;
    std::uint64_t made_ = 0;  // calls, in the background or not
    std::shared_ptr<std::atomic<bool>> closed_ = std::make_shared<std::atomic<bool>>(false);
    std::map<std::pair<int, int>, PlainCalls> registered_;  // by collective and root
    std::array<std::pair<int, const PlainCalls*>, 16> recent_{};
};

namespace {

// For tests: the ways that each rank takes in calls of these kinds, one after the other; `took` says when
// each rank began and ended its part of a call, in nanoseconds, if it is measured.
std::vector<std::vector<std::size_t>> simulate_races(int size, const std::vector<std::uint64_t>& kinds, std::size_t ways,
                                                     std::size_t bytes, const nb::callable& took) {
    std::vector<Races> races{std::size_t(size)};
    std::vector<Spans> spans{std::size_t(size)};
    std::vector<std::vector<std::size_t>> taken{std::size_t(size)};
    for (std::size_t call = 0; call < kinds.size(); ++call)
        for (std::size_t rank = 0; rank < std::size_t(size); ++rank) {
            const Races::Turn turn = races[rank].next(
                kinds[call], ways, bytes, call, window, size,
                [&](int other) -> const Spans& { return spans[std::size_t(other)]; }, spans[rank]);
            taken[rank].push_back(turn.way);
            if (turn.run == nullptr) continue;
            const auto [began, ended] =
                nb::cast<std::pair<std::int64_t, std::int64_t>>(took(call, rank, kinds[call], turn.way));
            turn.run->began = began;
            turn.run->ended = ended;
            races[rank].ended(kinds[call], call + 1);
        }
    return taken;
}

PyWays* make_ways(std::vector<Program*> by_slots, std::vector<Program*> by_reading, Program* in_arena) {
    if (by_slots.empty()) throw std::invalid_argument("a call runs by slots where nothing else is there");
    nb::list kept;
    for (const auto& programs : {by_slots, by_reading, {in_arena}})
        for (Program* program : programs) kept.append(nb::find(program));
    return new PyWays{{std::move(by_slots), std::move(by_reading), in_arena}, nb::tuple(kept)};
}

Program* make_program(nb::bytes data, int algorithm) {
    std::vector<std::uint32_t> words(data.size() / sizeof(std::uint32_t));
    std::memcpy(words.data(), data.c_str(), words.size() * sizeof(std::uint32_t));
    auto program = Program::decode(words);
    program->algorithm = std::uint8_t(algorithm);
    return program.release();
}

}  // namespace

Group& group_of(nb::handle object) { return nb::cast<PyGroup&>(object).group(); }

std::uint32_t site_of(nb::handle object) { return nb::cast<PyGroup&>(object).site_here(); }

PyGroup& py_group(nb::handle object) { return nb::cast<PyGroup&>(object); }

bool fast_path(PyGroup& group, int collective, nb::handle given, nb::handle result, int op, int root,
               int label) {
    return group.fast_path(collective, given, result, op, root, label);
}

void register_group(nb::module_& module) {
    module.def("force_way", &Races::force, nb::arg("way").none());
    module.def("simulate_races", &simulate_races, nb::arg("size"), nb::arg("kinds"), nb::arg("ways"), nb::arg("nbytes"),
               nb::arg("took"));
    module.def("cut", &cut, nb::arg("count"), nb::arg("parts"), nb::arg("part"));
    nb::class_<Program>(module, "Program")
        .def(nb::new_(&make_program), nb::rv_policy::take_ownership, nb::arg("data"), nb::arg("algorithm") = 0xff);
    nb::class_<PyWays>(module, "Ways")
        .def(nb::new_(&make_ways), nb::rv_policy::take_ownership, nb::arg("by_slots"), nb::arg("by_reading"),
             nb::arg("in_arena").none())
        // Of the usual program, as of any other: blocks of this rank's input and output, and of any buffer.
        .def_prop_ro("in_here", [](const PyWays& self) { return self.ways.by_slots.front()->in_here; })
        .def_prop_ro("out_here", [](const PyWays& self) { return self.ways.by_slots.front()->out_here; })
        .def_prop_ro("most", [](const PyWays& self) { return self.ways.by_slots.front()->most; });
    // When it ran, in seconds of the monotonic clock; to be asked once it is done.
    nb::class_<PyCallRequest>(module, "CallRequest")
        .def_prop_ro("done", &PyCallRequest::is_done)
        .def("wait", &PyCallRequest::wait, nb::arg("on_slow"))
        .def_prop_ro("times", [](const PyCallRequest& task) {
            return nb::make_tuple(double(task.began_ns) / 1e9, double(task.ended_ns) / 1e9);
        });
    nb::exception<Closed>(module, "Closed");

    nb::class_<PyGroup>(module, "Group")
        .def(nb::init<std::shared_ptr<World>, std::shared_ptr<Block>, int, std::vector<int>,
                      std::size_t, nb::object, nb::object, PyGroup*, std::uint64_t>(),
             nb::arg("world"), nb::arg("block").none(), nb::arg("rank"), nb::arg("world_ranks"),
             nb::arg("slot_bytes") = default_slot_bytes, nb::kw_only(), nb::arg("on_slow"),
             nb::arg("on_broken").none() = nb::none(), nb::arg("parent").none() = nb::none(),
             nb::arg("serial") = 0)
        .def_static("bytes_for", &Group::bytes_for, nb::arg("size"),
                    nb::arg("slot_bytes") = default_slot_bytes)
        .def_prop_ro("at", [](PyGroup& self) { return self.group().at(); })
        .def_prop_ro("calls", [](PyGroup& self) { return self.group().calls(); })
        // Whether all read one another's private memory; none while nobody has asked.
        .def_prop_ro("reads_peers",
                     [](PyGroup& self) -> nb::object {
                         const Reads reads = self.group().reads();
                         return reads == Reads::unknown ? nb::object(nb::none())
                                                       : nb::object(nb::bool_(reads == Reads::yes));
                     })
        .def("moved",
             [](PyGroup& self, int rank) {
                 return nb::make_tuple(self.group().pulled(rank), self.group().pushed(rank));
             })
        .def("set_timeout",
             [](PyGroup& self, double seconds) {
                 self.group().set_timeout(std::int64_t(std::min(seconds, 1e9) * 1e9));
             })
        .def("set_trace", &PyGroup::set_trace, nb::arg("trace"))
        .def("set_spin",
             [](PyGroup& self, double seconds) {
                 self.group().set_spin(std::int64_t(seconds * 1e9));
             })
        .def("call", &PyGroup::call, nb::arg("ways"), nb::arg("input").none(), nb::arg("output").none(), nb::arg("collective"),
             nb::arg("algorithm"), nb::arg("root"), nb::arg("dtype"), nb::arg("op"),
             nb::arg("item"), nb::arg("count"), nb::arg("counts"))
        .def("start", &PyGroup::start, nb::arg("ways"), nb::arg("input").none(), nb::arg("output").none(), nb::arg("collective"),
             nb::arg("algorithm"), nb::arg("root"), nb::arg("dtype"), nb::arg("op"),
             nb::arg("item"), nb::arg("count"), nb::arg("counts"))
        .def("bind", &PyGroup::bind, nb::arg("ways"), nb::arg("collective"), nb::arg("algorithm"), nb::arg("root"),
             nb::arg("dtype"), nb::arg("op"), nb::arg("item"), nb::arg("count"), nb::arg("shared"))
        .def("close", &PyGroup::close)
        .def("drain", &PyGroup::drain, nb::arg("every"))
        .def_prop_ro("failed", &PyGroup::failed)
        .def("leave", &PyGroup::leave)
        .def("register", &PyGroup::register_plain)
        .def("end", &PyGroup::end, nb::arg("how"), nb::arg("together"), nb::arg("on_slow"));
}

}  // namespace roundelay
