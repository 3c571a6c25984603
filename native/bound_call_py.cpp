#include "bound_call_py.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "inside_py.hpp"
#include "waiter_py.hpp"

namespace roundelay {

namespace {

constexpr std::size_t most_calls = std::size_t{1} << 20;
std::array<std::atomic<BoundCall*>, most_calls> calls;  // of which pages are used as they fill
std::atomic<std::int64_t> made = 0;
nb::object* interrupt = nullptr;  // what a signal's handler raised, under the interpreter lock

// Python handles signals on the main thread alone.
bool on_main_thread() { return syscall(SYS_gettid) == getpid(); }

// Waits as a thread of another runtime: only the main thread may ask the interpreter, which its caller
// has let go of; any other could wait for a lock whose holder waits for this very call.
class RuntimeWaiter : public Waiter {
   public:
    RuntimeWaiter(CallQueue& queue, nb::handle on_slow) : queue_(queue), on_slow_(on_slow) {}
    bool interrupted = false;

    bool goes_on(int rank, std::int64_t waited) override {
        if (!on_main_thread()) {
            if (waited > slow_ns) queue_.note_slow(rank, waited);
            return true;
        }
        const nb::gil_scoped_acquire here;
        bool on = PyErr_CheckSignals() == 0;
        if (on && waited > slow_ns && !told_) {
            told_ = true;
            const auto seconds = double(waited) / 1e9;
            PyObject* result = PyObject_CallFunction(on_slow_.ptr(), "id", rank, seconds);
            on = result != nullptr;
            Py_XDECREF(result);
        }
        if (!on) keep_error();
        return on;
    }

   private:
    void keep_error() {
        interrupted = true;
        const nb::python_error error;  // takes it from the interpreter
        if (interrupt == nullptr) interrupt = new nb::object();
        *interrupt = nb::borrow(error.value());
    }

    CallQueue& queue_;
    nb::handle on_slow_;
    bool told_ = false;
};

}  // namespace

BoundCall* BoundCall::find(std::int64_t number) {
    const bool known = number >= 0 && number < std::int64_t(most_calls);
    return known ? calls[std::size_t(number)].load(std::memory_order_acquire) : nullptr;
}

std::int64_t BoundCall::add(std::unique_ptr<BoundCall> bound) {
    const std::int64_t number = made++;
    if (number >= std::int64_t(most_calls))
        throw std::length_error("more calls in compiled programs than one process can have");
    calls[std::size_t(number)].store(bound.release(), std::memory_order_release);
    return number;
}

void BoundCall::walk(Group& here, const void* in, void* out, Waiter& waiter) const {
    Call one = call;
    one.in = static_cast<const std::byte*>(in);
    one.out = static_cast<std::byte*>(out);
    if (untouched > 0) std::memset(out, 0, untouched);
    here.run(one, *ways, {}, count, waiter);
}

Outcome BoundCall::run(const void* in, void* out) const {
    const auto here = group.lock();
    const auto turns = queue.lock();
    if (here == nullptr || turns == nullptr || *closed) return Outcome::closed;
    if (here->world().foreign()) return Outcome::broken;
    if (Inside::within(turns.get())) return Outcome::nested;
    const Inside inside(here->world(), turns.get(), 0, call.record.collective, call.record.site,
                        world_rank);
    RuntimeWaiter waiter(*turns, on_slow);
    const auto broken = [&] { return waiter.interrupted ? Outcome::interrupted : Outcome::broken; };
    if (!turns->enter([&] { return waiter.goes_on(-1, 0); })) return broken();
    struct Turn {
        Group& group;
        CallQueue& queue;
        ~Turn() {
            if (!group.world().foreign()) queue.leave();
        }
    };
    const Turn turn{*here, *turns};
    try {
        walk(*here, in, out, waiter);
    } catch (const Broken&) {
        return broken();
    }
    return Outcome::done;
}

Outcome BoundCall::start(const void* in, void* out, std::function<void(Outcome)> ended) const {
    const auto here = group.lock();
    const auto turns = queue.lock();
    if (here == nullptr || turns == nullptr || *closed) return Outcome::closed;
    if (here->world().foreign()) return Outcome::broken;
    const auto task = std::make_shared<CallQueue::Task>();
    task->work = [this, here, turns = turns.get(), in, out, ended = std::move(ended)] {
        RuntimeWaiter waiter(*turns, on_slow);
        Outcome outcome = Outcome::done;
        try {
            walk(*here, in, out, waiter);
        } catch (const std::exception&) {
            outcome = Outcome::broken;
        }
        ended(outcome);
    };
    turns->submit(task);
    return Outcome::done;
}

void register_bound_call(nb::module_& module) {
    module.def("take_interrupt", []() -> nb::object {
        return interrupt == nullptr ? nb::none() : std::exchange(*interrupt, nb::none());
    });
}

}  // namespace roundelay
