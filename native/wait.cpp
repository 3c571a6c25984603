#include "wait.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace roundelay {

namespace {

// The container's CPU quota in cores, or a large number when there is none.
double quota() {
    long long limit = 0, period = 0;
    if (FILE* file = std::fopen("/sys/fs/cgroup/cpu.max", "re")) {
        const int read = std::fscanf(file, "%lld %lld", &limit, &period);
        std::fclose(file);
        if (read == 2 && limit > 0 && period > 0) return double(limit) / double(period);
    }
    return 1e9;
}

// The number in a file of the kernel's, or `otherwise`.
std::size_t number_in(const char* path, const char* format, std::size_t otherwise) {
    std::size_t found = otherwise;
    if (FILE* file = std::fopen(path, "re")) {
        char line[256];
        while (std::fgets(line, sizeof line, file) != nullptr)
            if (std::sscanf(line, format, &found) == 1) break;
        std::fclose(file);
    }
    return found;
}

}  // namespace

std::size_t available_memory() {
    constexpr std::size_t plenty = std::size_t{1} << 60;
    const std::size_t kib = number_in("/proc/meminfo", "MemAvailable: %zu kB", plenty / 1024);
    const std::size_t limit = number_in("/sys/fs/cgroup/memory.max", "%zu", plenty);
    const std::size_t used = number_in("/sys/fs/cgroup/memory.current", "%zu", 0);
    std::size_t addresses = plenty;
    rlimit own{};
    if (getrlimit(RLIMIT_AS, &own) == 0 && own.rlim_cur != RLIM_INFINITY) {
        const std::size_t mapped =
            number_in("/proc/self/statm", "%zu", 0) * std::size_t(sysconf(_SC_PAGESIZE));
        addresses = own.rlim_cur > mapped ? std::size_t(own.rlim_cur) - mapped : 0;
    }
    return std::min({kib * 1024, limit > used ? limit - used : 0, addresses});
}

int available_cores() {
    cpu_set_t set;
    CPU_ZERO(&set);
    int cores = 1;
    if (sched_getaffinity(0, sizeof set, &set) == 0) cores = CPU_COUNT(&set);
    return std::max(1, std::min(cores, int(std::min(quota(), 1e6))));
}

std::int64_t now_ns() {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return std::int64_t(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t seen, std::int64_t ns) {
    const timespec limit{time_t(ns / 1'000'000'000), long(ns % 1'000'000'000)};
    // Not FUTEX_PRIVATE: the word lies in memory that processes share.
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT, seen, &limit, nullptr,
            0);
}

void futex_wake(std::atomic<std::uint32_t>& word) {
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAKE, 1 << 30, nullptr,
            nullptr, 0);
}

}  // namespace roundelay
