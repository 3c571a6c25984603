#include "trace.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

namespace roundelay {

namespace {

std::uint32_t this_thread() {
    thread_local const auto number = std::uint32_t(syscall(SYS_gettid));
    return number;
}

std::int64_t wall_ns() {
    timespec time{};
    clock_gettime(CLOCK_REALTIME, &time);
    return std::int64_t(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

// Which kernel's clock this is: two processes with the same boot have the same one.
void read_boot(std::array<char, 40>& boot) {
    const int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    const ssize_t length = read(fd, boot.data(), boot.size() - 1);
    close(fd);
    for (std::size_t at = length < 0 ? 0 : std::size_t(length); at < boot.size(); ++at) boot[at] = 0;
    std::replace(boot.begin(), boot.end(), '\n', '\0');
}

// As much of a text as there is room for, not cut in the middle of a character.
void put(TraceString& place, std::string_view text) {
    std::size_t length = std::min(text.size(), place.size() - 1);
    while (length < text.size() && length > 0 && (text[length] & 0xc0) == 0x80) --length;
    std::memcpy(place.data(), text.data(), length);
    place[length] = 0;
}

}  // namespace

Trace::Trace(const std::string& path, int rank, int size, std::span<const std::uint8_t> job,
             std::size_t events)
    : path_(path) {
    const std::size_t strings_at = page_bytes;
    const std::size_t groups_at =
        strings_at + round_up(sizeof(TraceString) * (site_count + trace_names), page_bytes);
    const std::size_t events_at = groups_at + round_up(sizeof(TraceGroup) * trace_groups, page_bytes);
    bytes_ = events_at + round_up(sizeof(TraceEvent) * events, page_bytes);
    // A file of an earlier run may be open in a viewer: it keeps that one.
    unlink(path.c_str());
    const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0) throw std::system_error(errno, std::generic_category(), "open");
    int problem = posix_fallocate(fd, 0, off_t(bytes_));
    void* base = MAP_FAILED;
    if (problem == 0) {
        base = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (base == MAP_FAILED) problem = errno;
    }
    close(fd);
    if (problem != 0) {
        unlink(path.c_str());
        throw std::system_error(problem, std::generic_category(), "set room aside");
    }
    base_ = static_cast<std::byte*>(base);
    std::memset(base_, 0, bytes_);  // each page is there before a call writes to it
    header_ = new (base_) TraceHeader{};
    strings_ = reinterpret_cast<TraceString*>(base_ + strings_at);
    groups_ = reinterpret_cast<TraceGroup*>(base_ + groups_at);
    events_ = reinterpret_cast<TraceEvent*>(base_ + events_at);
    header_->version = trace_version;
    header_->rank = std::uint32_t(rank);
    header_->size = std::uint32_t(size);
    header_->pid = std::uint32_t(getpid());
    std::copy_n(job.begin(), std::min(job.size(), header_->job.size()), header_->job.begin());
    read_boot(header_->boot);
    header_->bytes = bytes_;
    header_->strings_at = strings_at;
    header_->groups_at = groups_at;
    header_->events_at = events_at;
    header_->string_bytes = sizeof(TraceString);
    header_->strings = site_count + trace_names;
    header_->groups = trace_groups;
    header_->event_bytes = sizeof(TraceEvent);
    header_->events = events;
    align();
    std::memcpy(header_->magic.data(), "rdtrace\n", header_->magic.size());  // now it can be read
}

Trace::~Trace() { munmap(base_, bytes_); }

void Trace::align() {
    header_->aligned_ns = now_ns();
    header_->wall_ns = wall_ns();
}

std::uint32_t Trace::string(std::string_view text) {
    const std::lock_guard guard(mutex_);
    const auto found = known_.find(std::string(text));
    if (found != known_.end()) return found->second;
    if (known_.size() >= trace_names) return 0;
    const auto number = std::uint32_t(site_count + known_.size());
    put(strings_[number], text);
    known_.emplace(text, number);
    return number;
}

void Trace::copy_site(World& world, int world_rank, std::uint32_t site) {
    const std::lock_guard guard(mutex_);  // calls in the background come from the same lines
    put(strings_[site], world.site(world_rank, site).data());
    sites_[site].store(true, std::memory_order_relaxed);
}

void Trace::list_group(std::uint64_t serial, int rank, int size) {
    const std::uint64_t at = header_->grouped.fetch_add(1);
    if (at < trace_groups)
        groups_[at] = {serial, std::uint32_t(rank), std::uint32_t(size)};
}

std::uint64_t Trace::begin(const TraceEvent& given, std::int64_t asked_ns) {
    const std::uint64_t number = header_->begun.fetch_add(1, std::memory_order_relaxed) + 1;
    TraceEvent& event = place(number);
    event.number.store(0, std::memory_order_relaxed);
    event.ended_ns.store(0, std::memory_order_release);
    event.waited_ns = 0;
    event.call = given.call;
    event.bytes = given.bytes;
    event.group = given.group;
    event.count = given.count;
    event.site = given.site;
    event.name = given.name;
    event.thread = this_thread();
    event.waits_for = -1;
    event.kind = given.kind;
    event.collective = given.collective;
    event.algorithm = given.algorithm;
    event.dtype = given.dtype;
    event.op = given.op;
    event.failed = 0;
    event.way = given.way;
    event.began_ns = now_ns();
    event.asked_ns = asked_ns == 0 ? event.began_ns : asked_ns;
    event.number.store(number, std::memory_order_release);
    return number;
}

void Trace::choose(std::uint64_t number, std::uint8_t algorithm, std::uint8_t way) {
    TraceEvent& event = place(number);
    if (event.number.load(std::memory_order_relaxed) != number) return;
    event.algorithm = algorithm;
    event.way = way;
}

void Trace::end(std::uint64_t number, std::int64_t waited_ns, std::int32_t waits_for, bool failed) {
    const std::int64_t ended = now_ns();
    TraceEvent& event = place(number);
    // Who is overtaken by a whole ring of others is no longer there.
    if (event.number.load(std::memory_order_relaxed) != number) return;
    event.waited_ns = waited_ns;
    event.waits_for = waits_for;
    event.failed = failed;
    event.ended_ns.store(ended, std::memory_order_release);
}

}  // namespace roundelay
