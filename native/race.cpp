#include "race.hpp"

namespace roundelay {

namespace {

constexpr std::size_t most_kinds = 1024;
// A race that calls of other kinds interrupt for so many turns is given up.
constexpr std::uint64_t patience = 1 << 16;
// Of large messages few runs say enough, and of small ones many cost little.
constexpr std::size_t large_bytes = 256 * 1024, few_runs = 3, look_runs = 2;
// What is taken stays unless another way takes at most so much of its time.
constexpr std::int64_t better_percent = 96;
// Races may take a hundredth of the time; and between two of them there are so many times their calls.
constexpr std::int64_t share = 100, apart = 16;
// Looks: so far apart in time, and in calls; and what they must find for a race at once.
constexpr std::int64_t look_ns = 2'000'000, worse_percent = 150;
constexpr std::int64_t least_gap = 2, most_gap = 2048;

}  // namespace

void Races::begin(std::uint64_t kind, std::size_t ways, std::size_t runs) {
    racing_ = kind;
    ways_ = ways;
    runs_ = runs;
    run_ = 0;
    ++number_;
}

Races::Turn Races::take(std::uint64_t kind, std::size_t ways, std::size_t bytes, std::uint64_t turns, Spans& mine) {
    const auto found = known_.find(kind);
    if (found == known_.end()) {
        if (known_.size() < most_kinds) known_.try_emplace(kind);
        return {};
    }
    Known& known = found->second;
    if (known.rest > 0) --known.rest;
    if (known.look > 0) --known.look;
    if (runs_ > 0 && racing_ != kind && turns - since_ > patience) runs_ = 0;
    if (runs_ == 0) {
        since_ = turns;
        const std::size_t many = std::min(ways, most_ways);
        if (known.rest == 0)
            begin(kind, many, many * (bytes < large_bytes ? most_runs / many : few_runs));
        else if (known.look == 0)
            begin(kind, 1, look_runs);
    }
    if (runs_ == 0 || racing_ != kind || run_ == runs_) return {.way = known.way};
    const std::size_t run = run_++;
    return {.way = ways_ == 1 ? known.way : run % ways_, .run = &mine.of[number_ % 2][run]};
}

void Races::decide(const std::array<std::int64_t, most_runs>& took) {
    Known& known = known_[racing_];
    std::array<std::int64_t, most_ways> median{};
    std::int64_t whole = 0;
    for (std::size_t way = 0; way < ways_; ++way) {
        std::array<std::int64_t, most_runs> own{};
        std::size_t count = 0;
        for (std::size_t run = way; run < runs_; run += ways_) {
            own[count++] = took[run];
            whole += took[run];
        }
        const auto middle = own.begin() + std::ptrdiff_t((count - 1) / 2);
        std::nth_element(own.begin(), middle, own.begin() + std::ptrdiff_t(count));
        median[way] = *middle;
    }
    const auto runs = std::int64_t(runs_);
    const bool looked = ways_ == 1;
    runs_ = 0;
    if (looked) {
        known.look = known.gap;
        if (median[0] * 100 <= known.median * worse_percent) return;
        known.rest = 0;  // something has changed, or the machine was busy: then the next look is later
        known.gap = std::min<std::uint64_t>(2 * known.gap, most_gap);
        return;
    }
    const auto best = std::size_t(std::min_element(median.begin(), median.begin() + std::ptrdiff_t(ways_)) -
                                  median.begin());
    const bool changes = median[best] * 100 < median[known.way] * better_percent;
    if (changes) known.way = best;
    known.median = median[known.way];
    if (changes || known.gap == 0)
        known.gap = std::uint64_t(std::clamp(look_ns / known.median, least_gap, most_gap));
    known.look = known.gap;
    const std::int64_t lost = std::max<std::int64_t>(0, whole / known.median - runs);
    known.rest = std::uint64_t(share * lost + apart * runs);
}

}  // namespace roundelay
