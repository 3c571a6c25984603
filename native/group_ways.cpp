// By which way a call runs: what is there, what all ranks can reach, and what was found to be quickest.
#include <array>
#include <bit>

#include "group.hpp"
#include "peer_memory.hpp"

namespace roundelay {

namespace {

// Of less, no way is much quicker than another.
constexpr std::size_t race_from = 4 * 1024;

}  // namespace

Group::Way Group::choose(const Call& call, const Ways& ways, std::size_t bytes, Waiter& waiter) {
    run_ = nullptr;
    const bool reads = !ways.by_reading.empty() && all_read(call, waiter);
    if (ways.in_arena != nullptr || reads) buffers_.assign(std::size_t(size_), {});
    const bool in_arena = ways.in_arena != nullptr && agree(call, *ways.in_arena, waiter);
    std::array<Way, most_ways> found;
    std::size_t count = 0;
    const auto add = [&](Program* program) {
        const bool streams = program->slots > 0 && can_stream();
        for (const bool past : {false, true})
            if (count < most_ways && (streams || !past)) found[count++] = {program, past};
    };
    if (in_arena) {
        add(ways.in_arena);
        if (ways.in_arena->in_place) return found[0];  // nothing moves less
    }
    for (Program* program : ways.by_slots) add(program);
    for (Program* program : ways.by_reading)
        if (reads && !in_arena) add(program);
    if (const auto forced = Races::forced(count)) return found[*forced];
    return bytes < race_from || count == 1 ? found[0] : race(call, {found.data(), count}, in_arena, bytes, waiter);
}

Group::Way Group::race(const Call& call, std::span<const Way> ways, bool in_arena, std::size_t bytes,
                       Waiter& waiter) {
    const CallRecord& record = call.record;
    kind_ = std::uint64_t(record.collective) << 32 | std::uint64_t(record.algorithm) << 24 |
            std::uint64_t(std::bit_width(bytes)) << 16 | ways.size() << 8 | (in_arena ? 1 : 0);
    // Before a turn is taken, all are known to have left the one a window ago.
    const Races::Turn turn = races_.next(
        kind_, ways.size(), bytes, turns_, window, size_,
        [&](int rank) -> const Spans& { return areas_[rank].spans; }, mine_->spans);
    run_ = turn.run;
    if (run_ != nullptr) {
        // All begin together: what some have done before others came would be no part of the time.
        run_->began.store(now_ns(), std::memory_order_relaxed);
        meet(call, waiter);
    }
    return ways[turn.way];
}

// Large messages first show where their buffers lie, so that all ranks take the same path. Who has a
// buffer that others can't reach knows the answer and need not wait for it.
bool Group::agree(const Call& call, const Program& program, Waiter& waiter) {
    kill_point();
    begin_turn(call, waiter);
    post(1);
    const auto fits = [&](const CallRecord& record) {
        return (!program.reaches_in || record.in_at != World::nowhere) &&
               (!program.reaches_out || record.out_at != World::nowhere) &&
               (!program.in_place || record.in_at == record.out_at);
    };
    bool all = fits(call.record);
    for (int other = 0; all && other < size_; ++other) {
        if (other != rank_) wait(other, 1, call, waiter);
        all = fits(areas_[other].record(calls_));
    }
    end_turn(1);
    return all;
}

void Group::meet(const Call& call, Waiter& waiter) {
    kill_point();
    begin_turn(call, waiter);
    post(1);
    for (int other = 0; other < size_; ++other)
        if (other != rank_) wait(other, 1, call, waiter);
    end_turn(1);
}

// Whether every rank can read every other's memory. All find out together, in the first call that asks:
// each tries when all are in, and what one can't, none does.
bool Group::all_read(const Call& call, Waiter& waiter) {
    if (reads_ != Reads::unknown) return reads_ == Reads::yes;
    meet(call, waiter);
    bool able = true;
    for (const int other : world_ranks_) {
        if (world_->here(other)) continue;
        far_ = true;
        Proof seen;
        RankInfo& info = world_->rank(other);
        able = able && why_no_peer_memory() == nullptr &&
               read_peer(info, &seen, info.proof_at.load(), sizeof seen, true);
    }
    mine_->reads.store(able ? Reads::yes : Reads::no);
    meet(call, waiter);
    for (int other = 0; other < size_; ++other) able = able && areas_[other].reads.load() == Reads::yes;
    reads_ = able ? Reads::yes : Reads::no;
    return able;
}

// Asked once the rank is known to have begun this call.
const Group::Buffers& Group::buffers(int rank) {
    Buffers& found = buffers_[std::size_t(rank)];
    if (found.in != nullptr || found.out != nullptr || found.far_in != 0) return found;
    const CallRecord record = areas_[rank].record(calls_);
    if (record.in_at < World::absent)
        found.in = world_->at<std::byte>(record.in_at);
    else if (record.in_at == World::nowhere && world_->here(world_rank(rank)))
        found.in = reinterpret_cast<std::byte*>(std::uintptr_t(record.in_address));
    else if (record.in_at == World::nowhere)
        found.far_in = record.in_address;
    if (record.out_at < World::absent) found.out = world_->at<std::byte>(record.out_at);
    return found;
}

}  // namespace roundelay
