// What an instruction that applies does: where its operands lie, reading those of other processes, folding.
#include <sched.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "group.hpp"
#include "peer_memory.hpp"

namespace roundelay {

namespace {

// Of what is read from other processes at a time, of one of them at least, and of all to be folded.
constexpr std::size_t piece_bytes = 32 * 1024;
constexpr std::size_t scratch_bytes = 512 * 1024;
// Until the death is told of a rank whose memory can't be read.
constexpr std::int64_t unreadable_ns = 1'000'000'000;
// What is folded is still in the first cache when it goes past all of them.
constexpr std::size_t past_bytes = 16 * 1024;
// Elements that are rounded or widened at a time: they stay in the first cache meanwhile.
constexpr std::size_t rounded_count = 4096;

// Bytes of an element of an operand: one of this rank's own buffers may be float32 where bfloat16 travels.
std::size_t item_of(const Call& call, Space space) {
    const bool wide = space == Space::in ? call.wide_in : space == Space::out && call.wide_out;
    return wide ? sizeof(float) : call.item;
}

}  // namespace

// What an instruction does with one slice: destinations, then sources. A source in another process's
// memory has no place here yet, but a rank and an address there.
struct Group::Fold {
    Op op;
    DType dtype;
    std::size_t item, count;
    std::byte** places;
    const std::uint64_t* far;  // by source; 0 where it has a place
    const Operand* operands;
    std::size_t dsts, srcs;
    int divisor;
    const std::byte* ahead;
    bool past;  // the first destination is written past the caches

    void run() {
        if (!past) return run_into(places, dsts, count);
        if (dsts == 1 && srcs == 1) {
            stream(places[0], places[1], count);
            return settle();
        }
        // Piece by piece: into another destination, or aside, and from there past the caches.
        alignas(64) std::array<std::byte, past_bytes> aside;
        std::byte* lone = aside.data();
        const std::size_t piece = past_bytes / item, whole = count;
        for (std::size_t done = 0; done < whole; done += piece) {
            const std::size_t length = std::min(piece, whole - done);
            std::byte** others = dsts > 1 ? places + 1 : &lone;
            run_into(others, std::max<std::size_t>(1, dsts - 1), length);
            stream(places[0], others[0], length * item);
            go_on(std::ptrdiff_t(length * item));
            if (ahead != nullptr) ahead += length * item;
        }
        go_on(-std::ptrdiff_t(whole * item));
        settle();
    }

    void run_into(std::byte** to, std::size_t number, std::size_t length) const {
        if (srcs == 1)
            move(reinterpret_cast<void* const*>(to), int(number), places[dsts], length);
        else
            fold(op, dtype, reinterpret_cast<void* const*>(to), int(number),
                 reinterpret_cast<const void* const*>(places + dsts), int(srcs), length, divisor, ahead);
    }

    void go_on(std::ptrdiff_t bytes) {
        for (std::size_t index = 0; index < dsts + srcs; ++index) places[index] += bytes;
    }
};

void Group::apply(const Call& call, const Program& program, const Geometry& geometry,
                  std::size_t number, std::size_t from, std::size_t width) {
    const Instruction& instruction = program.instructions[number];
    const std::size_t length = geometry.lengths[number];
    if (from >= length) return;
    const std::size_t count = std::min(width, length - from);
    constexpr std::size_t few = 32;
    std::array<std::byte*, few> small;
    std::array<std::uint64_t, few> small_far;
    std::vector<std::byte*> large;
    std::vector<std::uint64_t> large_far;
    std::byte** places = small.data();
    std::uint64_t* far = small_far.data();
    const std::size_t total = std::size_t(instruction.dsts) + instruction.srcs;
    if (total > few) {
        large.resize(total);
        places = large.data();
        large_far.resize(total);
        far = large_far.data();
    }
    bool pulls = false;
    for (std::size_t index = 0; index < total; ++index) {
        const Operand& operand = program.operands[instruction.first + index];
        far[index] = 0;
        if (operand.rank != rank_) {
            auto& moved = (index < instruction.dsts ? pushed_ : pulled_)[operand.rank];
            moved.store(moved.load(std::memory_order_relaxed) + count * call.item,
                        std::memory_order_relaxed);
        }
        if (operand.space == Space::slot) {
            places[index] = slot(operand.rank, operand.at, width * call.item);
            continue;
        }
        const std::size_t offset =
            (geometry.operands[instruction.first + index] + from) * item_of(call, operand.space);
        std::byte* buffer = nullptr;
        if (operand.rank == rank_) {
            buffer = operand.space == Space::in ? const_cast<std::byte*>(call.in) : call.out;
        } else {
            const Buffers& theirs = buffers(operand.rank);
            buffer = operand.space == Space::in ? theirs.in : theirs.out;
            if (buffer == nullptr) {
                far[index] = theirs.far_in + offset;
                pulls = true;
                continue;
            }
        }
        places[index] = buffer + offset;
    }
    if (call.wide_in || call.wide_out)
        return apply_rounding(call, instruction, program.operands.data() + instruction.first, places, count);
    const Geometry::Ahead& next = geometry.ahead[number];
    const std::byte* ahead = nullptr;
    const std::size_t coming = from + (leads_ ? 2 : 1) * width;  // the slice that is brought next
    if (next.operand != Geometry::Ahead::none && coming + width <= next.length)
        ahead = call.in + (geometry.operands[next.operand] + coming) * call.item;
    const bool divides = instruction.complete && call.op == Op::avg;
    // A lone contribution is only moved: as bytes, whatever they mean.
    const bool moves = instruction.srcs == 1;
    // A slot that others have read lies in their caches, from where a store fetches every line.
    bool past = streams_ && moves && !pulls && instruction.dsts == 1 &&
                program.operands[instruction.first].space == Space::out;
    for (std::size_t index = 0; past_ && large_ && !past && index < instruction.dsts; ++index) {
        past = program.operands[instruction.first + index].space == Space::slot;
        if (past) std::swap(places[0], places[index]);
    }
    Fold fold{.op = moves ? Op::bor : call.op,
              .dtype = moves ? DType::uint8 : call.dtype,
              .item = moves ? 1 : call.item,
              .count = moves ? count * call.item : count,
              .places = places,
              .far = far + instruction.dsts,
              .operands = program.operands.data() + instruction.first + instruction.dsts,
              .dsts = instruction.dsts,
              .srcs = instruction.srcs,
              .divisor = divides && !moves ? size_ : 0,
              .ahead = ahead,
              .past = past};
    if (pulls)
        pull(fold);
    else
        fold.run();
}

// Of a call whose float32 travels as bfloat16. What is not in the caller's buffers is bfloat16.
void Group::apply_rounding(const Call& call, const Instruction& instruction, const Operand* operands,
                           std::byte** places, std::size_t count) {
    const std::size_t dsts = instruction.dsts, srcs = instruction.srcs, narrow_bytes = rounded_count * call.item;
    const auto wide = [&](std::size_t index) { return item_of(call, operands[index].space) != call.item; };
    const auto past = [&](std::size_t index) {
        return operands[index].space == Space::slot ? past_ && large_ : streams_ && wide(index);
    };
    // A result, what it is widened to, and what comes from the caller's buffers.
    std::size_t rounded = 0;
    for (std::size_t index = dsts; index < dsts + srcs; ++index) rounded += wide(index) ? 1 : 0;
    scratch_.resize(std::max(scratch_.size(), narrow_bytes * (3 + rounded)));
    std::byte* const aside = scratch_.data();
    std::byte* const widened = aside + narrow_bytes;
    const auto put = [&](std::size_t index, std::byte* to, const std::byte* from, std::size_t bytes) {
        if (past(index))
            stream(to, from, bytes);
        else if (to != from)
            std::memcpy(to, from, bytes);
    };
    const auto* direct = std::find_if(operands, operands + dsts, [&](const Operand& operand) {
        return operand.space == Space::slot && !(past_ && large_);
    });
    for (std::size_t done = 0; done < count; done += rounded_count) {
        const std::size_t length = std::min(rounded_count, count - done);
        const auto at = [&](std::size_t index) {
            return places[index] + done * item_of(call, operands[index].space);
        };
        std::byte* result = direct == operands + dsts ? aside : at(std::size_t(direct - operands));
        std::vector<const void*>& from = rounded_;
        from.clear();
        rounded = 0;
        for (std::size_t index = dsts; index < dsts + srcs; ++index) {
            std::byte* one = at(index);
            if (wide(index)) {
                std::byte* const to = srcs == 1 ? result : aside + (3 + rounded++) * narrow_bytes;
                to_bfloat16(to, one, length);
                one = to;
            }
            from.push_back(one);
        }
        void* const into = result;
        if (srcs == 1)
            result = static_cast<std::byte*>(const_cast<void*>(from[0]));
        else
            fold(call.op, call.dtype, &into, 1, from.data(), int(srcs), length,
                 instruction.complete && call.op == Op::avg ? size_ : 0, nullptr);
        for (std::size_t index = 0; index < dsts; ++index) {
            if (!wide(index)) {
                put(index, at(index), result, length * call.item);
            } else if (past(index)) {
                from_bfloat16(widened, result, length);
                stream(at(index), widened, length * sizeof(float));
            } else {
                from_bfloat16(at(index), result, length);
            }
        }
    }
    if (streams_ || past_) settle();
}

// Piece by piece: what is read from other processes is folded while it lies in the cache. What is only
// moved is read to where it goes, from where it may go past the caches.
void Group::pull(Fold fold) {
    const bool moves = fold.srcs == 1;
    fold.past &= !moves || fold.dsts > 1;
    std::size_t piece = fold.count;
    if (!moves || fold.dsts > 1) {
        const std::size_t bytes = std::clamp(scratch_bytes / fold.srcs, piece_bytes, 4 * piece_bytes);
        piece = bytes / fold.item / 64 * 64;
        if (!moves && scratch_.size() < fold.srcs * bytes) scratch_.resize(fold.srcs * bytes);
    }
    const std::size_t count = fold.count;
    for (std::size_t done = 0; done < count; done += piece) {
        kill_point();
        fold.count = std::min(piece, count - done);
        const std::size_t bytes = fold.count * fold.item;
        // Each rank begins with another: the kernel locks a process's memory while it is read.
        for (std::size_t turn = 0; turn < fold.srcs; ++turn) {
            const std::size_t source = (turn + std::size_t(rank_)) % fold.srcs;
            if (fold.far[source] == 0) continue;
            std::byte* to = moves ? fold.places[fold.past ? 1 : 0]
                                  : scratch_.data() + source * piece * fold.item;
            read(fold.operands[source].rank, to, fold.far[source] + done * fold.item, bytes,
                 done + piece >= count);
            fold.places[fold.dsts + source] = to;
        }
        if (!moves || fold.dsts > 1) fold.run();
        fold.go_on(std::ptrdiff_t(bytes));
    }
}

void Group::read(int rank, std::byte* to, std::uint64_t from, std::size_t bytes, bool last) {
    if (read_peer(world_->rank(world_rank(rank)), to, from, bytes, last)) return;
    // Its process is gone, or going: who watches it says so within a moment.
    const std::int64_t limit = now_ns() + unreadable_ns;
    while (!world_->troubled() && !world_->dead(world_rank(rank)) && now_ns() < limit) sched_yield();
    world_->fail(Trouble::lost, world_rank(rank), world_rank(rank_), at_, calls_,
                 world_->dead(world_rank(rank)) ? "" : "unreadable");
    throw Broken{};
}

}  // namespace roundelay
