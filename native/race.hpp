// Which of several ways to do the same is quickest here and now: tried in turn, and measured by all ranks.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_map>

namespace roundelay {

constexpr std::size_t most_ways = 8;
constexpr std::size_t most_runs = 24;  // of one race
constexpr std::size_t tracks = 4;      // on which races are under way at the same time

// When a rank began and ended its part of each run, on each track: of two races in turn, as some ranks may
// still read about the last one.
struct Spans {
    struct Span {
        std::atomic<std::int64_t> began, ended;
    };
    std::array<std::array<std::array<Span, most_runs>, 2>, tracks> of;
};

// Ways that give the same bits differ by the machine: how cores share caches, how large pages are, how many
// ranks there are; and by the hour, where a machine is virtual. So calls of a kind try each way in turn, in
// calls that are made anyway, and from time to time it is seen whether what was found still holds. All ranks
// make the same calls, so each knows by itself whose turn it is; and when all are known to have ended the
// last run, each comes to the same result from what all have measured.
class Races {
   public:
    // For tests: from now on all calls of this process take this way of those there are, counted from the
    // last one if negative; nothing is measured. None are raced again.
    static void force(std::optional<int> way) { forced_ = way.value_or(none); }
    static std::optional<std::size_t> forced(std::size_t ways) {
        const int way = forced_.load(std::memory_order_relaxed), many = int(ways);
        if (way == none) [[likely]] return std::nullopt;
        return std::size_t((way % many + many) % many);
    }

    struct Turn {
        std::size_t way = 0;
        Spans::Span* run = nullptr;  // of this rank, to be written: this call is a run
    };

    // Which way a call takes. `turns` are those that this rank has taken, and `window` of them are known
    // to be over on all ranks. All that is given and returned is the same on all ranks, but for the spans.
    // There are at most `most_ways`.
    template <class SpansOf>
    Turn next(std::uint64_t kind, std::size_t ways, std::size_t bytes, std::uint64_t turns, std::uint64_t window,
              int size, SpansOf spans_of, Spans& mine) {
        const std::size_t number = track_of(kind);
        Race& race = races_[number];
        if (race.runs > 0 && race.run == race.runs && turns >= race.over + window) {
            std::array<std::int64_t, most_runs> took{};
            for (std::size_t run = 0; run < race.runs; ++run) {
                // From when the last rank came until the last one went.
                std::int64_t began = 0, ended = 0;
                for (int rank = 0; rank < size; ++rank) {
                    const Spans::Span& span = spans_of(rank).of[number][race.number % 2][run];
                    const std::int64_t from = span.began.load(std::memory_order_relaxed);
                    const std::int64_t to = span.ended.load(std::memory_order_relaxed);
                    began = rank == 0 ? from : std::max(began, from);
                    ended = rank == 0 ? to : std::max(ended, to);
                }
                took[run] = std::max<std::int64_t>(1, ended - began);
            }
            decide(race, took);
        }
        return take(race, mine.of[number], kind, ways, bytes);
    }
    // A run of this kind is over; this many turns have been taken by now.
    void ended(std::uint64_t kind, std::uint64_t turns) { races_[track_of(kind)].over = turns; }

   private:
    static std::size_t track_of(std::uint64_t kind) { return (kind * 0x9e3779b97f4a7c15u) >> 62; }
    static_assert(tracks == 4);  // which two bits count

    // What is under way on a track: a race, or a look, which has one way.
    struct Race {
        std::uint64_t kind = 0;
        std::uint64_t waited = 0;  // calls of other kinds since its last run
        std::uint64_t over = 0;    // when that was, in turns
        std::uint64_t number = 0;  // of all of this track
        std::size_t ways = 0, runs = 0, run = 0;
    };
    struct Known {
        std::size_t way = 0;
        std::int64_t median = 0;  // of its runs, when it was last raced
        std::uint64_t rest = 1;   // calls until the next race; the first call of a kind meets new memory
        std::uint64_t look = 0;   // and until the next look at how long the way takes
        std::uint64_t gap = 0;    // between two looks
    };
    Turn take(Race& race, std::array<std::array<Spans::Span, most_runs>, 2>& mine, std::uint64_t kind,
              std::size_t ways, std::size_t bytes);
    void decide(Race& race, const std::array<std::int64_t, most_runs>& took);

    static constexpr int none = INT_MAX;
    static inline std::atomic<int> forced_{none};

    std::unordered_map<std::uint64_t, Known> known_;
    std::array<Race, tracks> races_;
};

}  // namespace roundelay
