// Waiting that spins briefly when cores allow and then sleeps in the kernel.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace roundelay {

// Cores this process may really use: its affinity, cut by the container's CPU quota.
int available_cores();

// Nanoseconds of a clock that never goes back.
std::int64_t now_ns();

inline void cpu_pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield" ::: "memory");
#endif
}

// Have a line in this core's cache, and in no other, before it is written.
inline void prefetch_to_write(const void* line) {
#if defined(__x86_64__)
    asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(line)));
#else
    __builtin_prefetch(line, 1);
#endif
}

// Sleep until `word` is no longer `seen`, somebody wakes it, or `ns` have passed.
void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t seen, std::int64_t ns);
void futex_wake(std::atomic<std::uint32_t>& word);

// A word that one rank changes and others wait on. The sleepers' count saves the system call when
// nobody sleeps.
struct Signal {
    std::atomic<std::uint32_t> value;
    std::atomic<std::uint32_t> sleepers;

    void set(std::uint32_t next) {
        // Sequentially consistent: the store must be seen before the sleepers are counted.
        value.store(next, std::memory_order_seq_cst);
        if (sleepers.load(std::memory_order_seq_cst) != 0) futex_wake(value);
    }

    // Have whoever sleeps look again, though the value is what it was.
    void wake() {
        if (sleepers.load(std::memory_order_seq_cst) != 0) futex_wake(value);
    }

    void ring() {
        value.fetch_add(1, std::memory_order_seq_cst);
        if (sleepers.load(std::memory_order_seq_cst) != 0) futex_wake(value);
    }

    // Sleep while the value is `seen`, for at most `ns`.
    void sleep(std::uint32_t seen, std::int64_t ns) {
        sleepers.fetch_add(1, std::memory_order_seq_cst);
        futex_wait(value, seen, ns);
        sleepers.fetch_sub(1, std::memory_order_seq_cst);
    }
};

}  // namespace roundelay
