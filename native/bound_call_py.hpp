// Collective calls that lack only their buffers: what the runtime of a compiled program makes.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "call_queue.hpp"
#include "group.hpp"

namespace roundelay {

namespace nb = nanobind;

// How such a call ended. `interrupted`: by a signal, whose exception is kept for who asks next.
enum class Outcome { done, broken, closed, nested, interrupted };

// One for each place in a compiled program, run by the runtime's threads, without the interpreter. It
// keeps neither the group nor its memory, and is never freed itself: the program that names it may be
// run long after the group was closed.
struct BoundCall {
    Call call;
    const Ways* ways = nullptr;
    nb::object kept;        // their programs, as Python holds them
    std::size_t count;
    std::size_t untouched;  // bytes of a result that this rank gets nothing for: they become zeros
    bool shared;            // other ranks are threads of this process, and need its runtime's threads
    int world_rank;
    std::weak_ptr<Group> group;
    std::weak_ptr<CallQueue> queue;
    std::shared_ptr<const std::atomic<bool>> closed;
    nb::object on_slow;

    // By its number, which compiled programs hold; null if there is none.
    static BoundCall* find(std::int64_t number);
    static std::int64_t add(std::unique_ptr<BoundCall> made);

    // On this thread.
    Outcome run(const void* in, void* out) const;
    // In the background, after what was begun before; `ended` is called there, unless this says how
    // it ended at once.
    Outcome start(const void* in, void* out, std::function<void(Outcome)> ended) const;

   private:
    void walk(Group& here, const void* in, void* out, Waiter& waiter) const;
};

void register_bound_call(nb::module_& module);

}  // namespace roundelay
