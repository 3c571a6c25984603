// Where a test can kill or stop a rank: each instruction, each turn of a wait, each part of a message.
#pragma once

#include <signal.h>

#include <atomic>
#include <cstdint>

namespace roundelay {

// Shipped, not compiled for tests only: what is killed there must be the code that runs elsewhere,
// and an unarmed point costs a load of a line nobody writes and a branch that is never taken.
inline std::atomic<std::int64_t> kill_in{0};
inline std::atomic<int> kill_by{SIGKILL};

// Raise the signal at the n-th point from now; 0 means never.
inline void set_kill_point(std::int64_t points, int by) {
    kill_by = by;
    kill_in = points;
}

inline void kill_point() {
    if (kill_in.load(std::memory_order_relaxed) <= 0) [[likely]] return;
    if (kill_in.fetch_sub(1) == 1) ::raise(kill_by);
}

}  // namespace roundelay
