#include "race.hpp"

namespace roundelay {

namespace {

constexpr std::size_t most_kinds = 1024;
// A race that so many calls of other kinds interrupt is given up, where one of them wants its track.
constexpr std::uint64_t patience = 64;
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

Races::Turn Races::take(Race& race, std::array<std::array<Spans::Span, most_runs>, 2>& mine, std::uint64_t kind,
                        std::size_t ways, std::size_t bytes) {
    const auto found = known_.find(kind);
    if (found == known_.end()) {
        if (known_.size() < most_kinds) known_.try_emplace(kind);
        return {};
    }
    Known& known = found->second;
    if (known.rest > 0) --known.rest;
    if (known.look > 0) --known.look;
    if (race.runs > 0 && race.kind != kind && ++race.waited > patience) race.runs = 0;
    if (race.runs == 0 && (known.rest == 0 || known.look == 0)) {
        const std::size_t many = known.rest == 0 ? std::min(ways, most_ways) : 1;
        const std::size_t each = many == 1 ? look_runs : bytes < large_bytes ? most_runs / many : few_runs;
        race = {.kind = kind, .number = race.number + 1, .ways = many, .runs = many * each};
    }
    if (race.runs == 0 || race.kind != kind || race.run == race.runs) return {.way = known.way};
    race.waited = 0;
    const std::size_t run = race.run++;
    return {.way = race.ways == 1 ? known.way : run % race.ways, .run = &mine[race.number % 2][run]};
}

void Races::decide(Race& race, const std::array<std::int64_t, most_runs>& took) {
    Known& known = known_[race.kind];
    std::array<std::int64_t, most_ways> median{};
    std::int64_t whole = 0;
    for (std::size_t way = 0; way < race.ways; ++way) {
        std::array<std::int64_t, most_runs> own{};
        std::size_t count = 0;
        for (std::size_t run = way; run < race.runs; run += race.ways) {
            own[count++] = took[run];
            whole += took[run];
        }
        const auto middle = own.begin() + std::ptrdiff_t((count - 1) / 2);
        std::nth_element(own.begin(), middle, own.begin() + std::ptrdiff_t(count));
        median[way] = *middle;
    }
    const auto runs = std::int64_t(race.runs);
    const bool looked = race.ways == 1;
    race.runs = 0;
    if (looked) {
        known.look = known.gap;
        if (median[0] * 100 <= known.median * worse_percent) return;
        known.rest = 0;  // something has changed, or the machine was busy: then the next look is later
        known.gap = std::min<std::uint64_t>(2 * known.gap, most_gap);
        return;
    }
    const auto best = std::size_t(std::min_element(median.begin(), median.begin() + std::ptrdiff_t(race.ways)) -
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
