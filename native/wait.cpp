#include "wait.hpp"

#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace roundelay {

namespace {

// The container's CPU quota in cores, or a large number when there is none.
double quota() {
    const int fd = open("/sys/fs/cgroup/cpu.max", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 1e9;
    char text[64]{};
    const ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    long long limit = 0, period = 0;
    const bool known = length > 0 && std::sscanf(text, "%lld %lld", &limit, &period) == 2;
    return known && limit > 0 && period > 0 ? double(limit) / double(period) : 1e9;
}

}  // namespace

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
