// What a rank did and when: a ring of events in a mapped file, which is whole whatever ends the rank.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>

#include "world.hpp"

namespace roundelay {

// The layout of a file, as docs/tracing.md has it and records/read.py reads it.
constexpr std::uint32_t trace_version = 1;
constexpr std::size_t trace_names = 1024;  // strings beside source lines, which have the first numbers
constexpr std::size_t trace_groups = 256;  // groups of one rank that are listed
constexpr std::size_t trace_events = 32 * 1024;
using TraceString = Site;

struct TraceTable {
    std::uint32_t first, count;  // strings
};

struct TraceHeader {
    std::array<char, 8> magic;
    std::uint32_t version;
    std::uint32_t rank, size, pid;
    std::array<std::uint8_t, 16> job;  // the same on all ranks of a job
    std::array<char, 40> boot;         // of the kernel whose clock it is
    std::int64_t aligned_ns, wall_ns;  // both clocks, when all ranks had come together
    std::uint64_t bytes, strings_at, groups_at, events_at;
    std::uint32_t string_bytes, strings, groups, event_bytes;
    std::uint64_t events;  // that the ring has room for
    TraceTable collectives, algorithms, dtypes, ops;
    std::uint32_t host, program;  // strings
    std::atomic<std::uint64_t> begun;    // events so far
    std::atomic<std::uint64_t> grouped;  // groups so far
};
static_assert(sizeof(TraceHeader) == 208);

struct TraceGroup {
    std::uint64_t serial;
    std::uint32_t rank, size;
};
static_assert(sizeof(TraceGroup) == 16);

enum class Traced : std::uint8_t { call, forward, backward, exchange, gather, step, checkpoint, phase,
                                     message };
inline constexpr std::array<std::string_view, 9> traced_names = {
    "call", "forward", "backward", "exchange", "gather", "step", "checkpoint", "phase", "message"};

inline constexpr std::array<std::string_view, 5> way_names = {
    "slots", "slots past caches", "reading", "reading past caches", "arena"};

struct TraceEvent {
    std::atomic<std::uint64_t> number;  // from 1; 0 while the event is written
    std::int64_t asked_ns, began_ns;
    std::atomic<std::int64_t> ended_ns;  // 0 while it is under way
    std::int64_t waited_ns;
    std::uint64_t call;   // its number in its group; of other events the step
    std::uint64_t bytes;  // of the largest buffer of any rank
    std::uint64_t group;
    std::uint64_t count;
    std::uint32_t site, name;  // strings
    std::uint32_t thread;
    std::int32_t waits_for;  // the rank that it waited for longest, or -1
    Traced kind;
    std::uint8_t collective, algorithm, dtype, op, failed;
    std::uint8_t way, unused;  // by which way a call ran: one of these below, and 1; 0 where nobody said
};
static_assert(sizeof(TraceEvent) == 96);

class Trace {
   public:
    // Make the file, with all its room set aside, so that no write to it fails later.
    Trace(const std::string& path, int rank, int size, std::span<const std::uint8_t> job,
          std::size_t events);
    ~Trace();
    Trace(const Trace&) = delete;
    Trace& operator=(const Trace&) = delete;

    // The number of a string; 0, which says nothing, when there is no more room.
    std::uint32_t string(std::string_view text);
    void list_group(std::uint64_t serial, int rank, int size);
    void align();
    TraceHeader& header() { return *header_; }
    const std::string& path() const { return path_; }

    // What the next call in the background is for, by the number of a string.
    void name_next(std::uint32_t name) { next_name_ = name; }
    std::uint32_t take_name() {
        const std::uint32_t name = next_name_;
        next_name_ = 0;
        return name;
    }

    // Begin an event; all but its number and clock is taken from `given`.
    std::uint64_t begin(const TraceEvent& given, std::int64_t asked_ns);
    // Which algorithm a call takes, where there were several, and by which way.
    void choose(std::uint64_t number, std::uint8_t algorithm, std::uint8_t way);
    void end(std::uint64_t number, std::int64_t waited_ns, std::int32_t waits_for, bool failed);
    // Source lines have the same numbers as in the world; each is copied when it first comes.
    void know_site(World& world, int world_rank, std::uint32_t site) {
        if (!sites_[site].load(std::memory_order_relaxed)) [[unlikely]]
            copy_site(world, world_rank, site);
    }

   private:
    TraceEvent& place(std::uint64_t number) { return events_[(number - 1) % header_->events]; }
    TraceString& string_at(std::size_t number) { return strings_[number]; }
    void copy_site(World& world, int world_rank, std::uint32_t site);

    std::string path_;
    std::byte* base_;
    std::size_t bytes_;
    TraceHeader* header_;
    TraceString* strings_;
    TraceGroup* groups_;
    TraceEvent* events_;
    std::uint32_t next_name_ = 0;  // under the interpreter lock
    std::mutex mutex_;
    std::unordered_map<std::string, std::uint32_t> known_;
    std::array<std::atomic<bool>, site_count> sites_{};
};

// A call, from its begin to its end: what others see of it live, and its event if there is a trace.
class CallMark {
   public:
    CallMark(World& world, int world_rank, std::uint64_t at, Trace* trace)
        : trace_(trace), info_(world.rank(world_rank)) {
        info_.group_now.store(at, std::memory_order_relaxed);
    }
    CallMark(const CallMark&) = delete;
    CallMark& operator=(const CallMark&) = delete;
    ~CallMark() {
        if (trace_ != nullptr) [[unlikely]] trace_->end(number_, waited_ns_, waits_for_, !done_);
    }
    bool traces() const { return trace_ != nullptr; }
    void begin(const TraceEvent& event, std::int64_t asked_ns) {
        number_ = trace_->begin(event, asked_ns);
    }
    void took(std::uint8_t algorithm, std::uint8_t way) {
        if (trace_ != nullptr) [[unlikely]] trace_->choose(number_, algorithm, way);
    }
    // It has moved so much. Two threads at once may lose some: it is for people who look.
    void done(std::uint64_t bytes) {
        done_ = true;
        info_.moved.store(info_.moved.load(std::memory_order_relaxed) + bytes,
                          std::memory_order_relaxed);
    }
    void waited(int world_rank, std::int64_t ns) {
        waited_ns_ += ns;
        if (ns > longest_ns_) {
            longest_ns_ = ns;
            waits_for_ = world_rank;
        }
    }

   private:
    Trace* trace_;
    RankInfo& info_;
    std::uint64_t number_ = 0;
    std::int64_t waited_ns_ = 0, longest_ns_ = 0;
    std::int32_t waits_for_ = -1;
    bool done_ = false;
};

// A wait inside a call.
class WaitMark {
   public:
    WaitMark(CallMark* mark, int world_rank)
        : mark_(mark != nullptr && mark->traces() ? mark : nullptr),
          world_rank_(world_rank),
          began_ns_(mark_ == nullptr ? 0 : now_ns()) {}
    ~WaitMark() {
        if (mark_ != nullptr) mark_->waited(world_rank_, now_ns() - began_ns_);
    }
    WaitMark(const WaitMark&) = delete;
    WaitMark& operator=(const WaitMark&) = delete;

   private:
    CallMark* mark_;
    int world_rank_;
    std::int64_t began_ns_;
};

}  // namespace roundelay
