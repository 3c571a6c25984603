#include "group.hpp"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "peer_memory.hpp"

namespace roundelay {

namespace {

constexpr std::int64_t nap_ns = 50'000'000;
constexpr std::int64_t spin_ns = 100'000;
// With more ranks than cores, a core is handed on until the rank comes by. Else that is hardly worth
// it: whatever takes the core may keep it for milliseconds.
constexpr int yields = 64;
constexpr int few_yields = 4;
// Of slots that one slice uses, for each rank: with two sets, and what is read and written beside
// them, they then stay in a core's own cache.
constexpr std::size_t slice_bytes = 32 * 1024;
// Of what is read from other processes at a time, of one of them at least, and of all to be folded.
constexpr std::size_t piece_bytes = 32 * 1024;
constexpr std::size_t scratch_bytes = 512 * 1024;
// Results from here on are written past the caches, in which they would not stay; four times that where
// others fold meanwhile. Both were measured.
constexpr std::size_t stream_bytes = 8 * 1024 * 1024;

bool reached(std::uint32_t flag, std::uint32_t target) {
    return std::int32_t(flag - target) >= 0;  // flags wrap around
}

}  // namespace

std::size_t Group::bytes_for(int size, std::size_t slot_bytes) {
    return round_up(sizeof(RankArea) * std::size_t(size), 4096) +
           std::size_t(size) * 2 * slot_bytes;
}

Group::Group(std::shared_ptr<World> world, std::shared_ptr<Block> block, int rank,
             std::vector<int> world_ranks, std::size_t slot_bytes)
    : world_(std::move(world)),
      block_(std::move(block)),
      at_(block_ == nullptr ? world_->header().group_at : block_->at()),
      rank_(rank),
      size_(int(world_ranks.size())),
      world_ranks_(std::move(world_ranks)),
      slot_bytes_(slot_bytes),
      areas_(world_->at<RankArea>(at_)),
      mine_(areas_ + rank),
      slots_(world_->at<std::byte>(at_) + round_up(sizeof(RankArea) * std::size_t(size_), 4096)),
      known_(std::size_t(size_), 0),
      compared_(std::size_t(size_), 0),
      pulled_(std::size_t(size_)),
      pushed_(std::size_t(size_)),
      // Spinning pays only while every rank has a core to itself.
      spin_ns_(world_->size() <= available_cores() ? spin_ns : 0) {
    mine_->stage = Stage::in;
    if (at_ == world_->header().group_at) return;  // of which everybody knows
    for (int rank = 0; rank < size_; ++rank) {
        areas_[rank].size.store(std::uint32_t(size_), std::memory_order_relaxed);
        areas_[rank].world_rank.store(std::uint32_t(world_ranks_[std::size_t(rank)]),
                                      std::memory_order_relaxed);
    }
}

void Group::tell(Stage stage) {
    if (world_->foreign()) return;  // a child's end is not the rank's
    mine_->stage = stage;
    futex_wake(mine_->line.flag.value);
    for (int member : world_ranks_) world_->rank(member).bell.ring();
}

bool Group::gone(int world_rank) const {
    return world_->rank(world_rank).life.load() == Life::left || world_->dead(world_rank) || told(world_rank, Stage::left) ||
           ended(world_rank);
}

bool Group::ended(int world_rank) const {
    const auto found = std::ranges::find(world_ranks_, world_rank);
    return found != world_ranks_.end() &&
           areas_[found - world_ranks_.begin()].ended.value.load(std::memory_order_acquire) != 0;
}

const char* Group::going(int world_rank) const {
    const bool job = world_->rank(world_rank).life.load() == Life::left || block_ == nullptr;
    return job ? "left" : "closed";
}

bool Group::holds(int world_rank) const {
    return std::ranges::find(world_ranks_, world_rank) != world_ranks_.end();
}

bool Group::told(int world_rank, Stage stage) const {
    const auto found = std::ranges::find(world_ranks_, world_rank);
    return found == world_ranks_.end() || areas_[found - world_ranks_.begin()].stage.load() >= stage;
}

void Group::name(std::uint64_t serial, std::uint32_t made) {
    mine_->serial.store(serial, std::memory_order_relaxed);
    mine_->made.store(made, std::memory_order_relaxed);
}

// Nobody waits for a group that is dropped, and nothing is raised: if its last calls differ, the others,
// and this rank, hear of it with their next call or at the end of the job.
Group::~Group() {
    if (world_->foreign() || at_ == world_->header().group_at) return;
    try {
        end(Ending::dropped, 0);
    } catch (const Broken&) {
    }
}

CallRecord RankArea::latest() const {
    CallRecord found{};
    for (const auto& one : records) {
        const CallRecord each = one.get();
        if (each.call >= found.call) found = each;
    }
    return found;
}

void Group::run(Call& call, const Ways& ways, std::span<const std::size_t> counts, std::size_t count,
                Waiter& waiter) {
    begin(call);
    if (size_ > 1) {
        // Nobody gets more than two slices ahead: two sets of slots and hashes are enough. Where the last
        // call had everybody hear of everybody, all have begun it, and each was compared by another.
        if (slices_ > 0 && !met_)
            for (int other = 0; other < size_; ++other)
                if (other != rank_) compare_previous(other, call, waiter);
        mine_->line.hash[call.record.call % 2].store(call.record.hash, std::memory_order_relaxed);
        last_hash_ = call.record.hash;
    }
    Program& program = choose(call, ways, waiter);
    met_ = program.meets;
    if (counts.empty()) {
        slices(call, program, program.even(count), waiter);
    } else {
        slices(call, program, program.uneven(counts), waiter);
    }
}

// Wait until a rank has begun the call before this one, and see that it was the same: a rank that
// got nothing from another in that call has not compared it yet.
void Group::compare_previous(int rank, const Call& call, Waiter& waiter) {
    arrive(rank, previous_ + 1, call, waiter);
    if (compared_[std::size_t(rank)] + 1 < calls_) compare(rank, calls_ - 1, last_hash_);
}

void Group::begin(Call& call) {
    const bool troubled = world_->troubled();
    // Who comes late to the very call that went wrong still shows what it came with.
    const Header& header = world_->header();
    if (troubled && (header.group != at_ || header.call != calls_ + 1)) throw Broken{};
    call.record.call = ++calls_;
    call.record.in_at = call.in == nullptr ? World::absent : world_->offset_of(call.in);
    call.record.out_at = call.out == nullptr ? World::absent : world_->offset_of(call.out);
    call.record.in_address = std::uint64_t(reinterpret_cast<std::uintptr_t>(call.in));
    mine_->records[calls_ % record_count].put(call.record);
    if (troubled) throw Broken{};
}

Program& Group::choose(const Call& call, const Ways& ways, Waiter& waiter) {
    const bool reads = ways.by_reading != nullptr && all_read(call, waiter);
    if (ways.in_arena != nullptr || reads) buffers_.assign(std::size_t(size_), {});
    // Whose inputs can be read wherever they lie need not agree on where that is.
    if (reads && ways.in_arena == ways.by_reading) return *ways.by_reading;
    if (ways.in_arena != nullptr && agree(call, *ways.in_arena, waiter)) return *ways.in_arena;
    return reads ? *ways.by_reading : *ways.by_slots;
}

// Large messages first show where their buffers lie, so that all ranks take the same path. Who has a
// buffer that others can't reach knows the answer and need not wait for it.
bool Group::agree(const Call& call, const Program& program, Waiter& waiter) {
    kill_point();
    post(base_ + 1);
    const auto fits = [&](const CallRecord& record) {
        return (!program.reaches_in || record.in_at != World::nowhere) &&
               (!program.reaches_out || record.out_at != World::nowhere) &&
               (!program.in_place || record.in_at == record.out_at);
    };
    bool all = fits(call.record);
    for (int other = 0; all && other < size_; ++other) {
        if (other != rank_) wait(other, base_ + 1, call, waiter);
        all = fits(areas_[other].record(calls_));
    }
    base_ += 1;  // no slice: it touches no slots
    return all;
}

void Group::meet(const Call& call, Waiter& waiter) {
    kill_point();
    post(base_ + 1);
    for (int other = 0; other < size_; ++other)
        if (other != rank_) wait(other, base_ + 1, call, waiter);
    base_ += 1;
}

// Whether every rank can read every other's memory. All find out together, in the first call that asks:
// each tries when all are in, and what one can't, none does.
bool Group::all_read(const Call& call, Waiter& waiter) {
    if (reads_ != Reads::unknown) return reads_ == Reads::yes;
    meet(call, waiter);
    bool able = true;
    for (const int other : world_ranks_) {
        if (world_->here(other)) continue;
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

void Group::slices(const Call& call, const Program& program, const Geometry& geometry,
                   Waiter& waiter) {
    std::size_t width = std::max<std::size_t>(geometry.longest, 1);
    const std::size_t out_blocks = program.out_here * program.parts;
    streams_ = out_blocks * geometry.longest * call.item >= (program.folds ? 4 : 1) * stream_bytes;
    inline_ = program.slots == 1 && geometry.longest * call.item <= inline_bytes;
    if (program.slots > 0 && !inline_) {
        const std::size_t grain = std::max<std::size_t>(1, 64 / call.item);
        const std::size_t bytes = std::min(slot_bytes_, slice_bytes * std::size_t(size_));
        const std::size_t room = bytes / program.slots / call.item;
        if (room == 0) throw std::length_error("this algorithm needs more slots than there are");
        width = room < grain ? room : room / grain * grain;
    }
    std::size_t slice = 0;
    for (std::size_t from = 0; slice == 0 || from < geometry.longest; from += width, ++slice) {
        // Slots of two slices ago are written again when all are known to have read them: by a post
        // of the last slice, or by the post that ended that one.
        for (int other = 0; slice > 0 && other < size_; ++other) {
            const bool ended = slice > 1 && program.posts_last[std::size_t(other)];
            if (other != rank_) wait(other, previous_ + (ended ? 0 : 1), call, waiter);
        }
        parity_ = slices_ % 2;
        show_core();
        for (std::size_t number = 0; number < program.instructions.size(); ++number) {
            const Instruction& instruction = program.instructions[number];
            kill_point();
            switch (instruction.kind) {
                case Kind::wait:
                    wait(instruction.rank, base_ + instruction.post, call, waiter);
                    break;
                case Kind::post:
                    post(base_ + instruction.post);
                    break;
                case Kind::apply:
                    apply(call, program, geometry, number, from, width);
                    break;
            }
        }
        if (program.posts > 0) {
            previous_ = base_;
            base_ += program.posts;
            ++slices_;
        }
    }
}

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
    bool streams;

    void run() const {
        if (srcs == 1)
            move(reinterpret_cast<void* const*>(places), int(dsts), places[dsts], count, streams);
        else
            fold(op, dtype, reinterpret_cast<void* const*>(places), dsts,
                 reinterpret_cast<const void* const*>(places + dsts), srcs, count, divisor, ahead);
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
            places[index] = inline_ ? areas_[operand.rank].line.payload[parity_].data()
                                    : slot(operand.rank, operand.at, width * call.item);
            continue;
        }
        const std::size_t offset = (geometry.operands[instruction.first + index] + from) * call.item;
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
    const Geometry::Ahead& next = geometry.ahead[number];
    const std::byte* ahead = nullptr;
    if (next.operand != Geometry::Ahead::none && from + 2 * width <= next.length)
        ahead = call.in + (geometry.operands[next.operand] + from + width) * call.item;
    const bool divides = instruction.complete && call.op == Op::avg;
    // A lone contribution is only moved: as bytes, whatever they mean.
    const bool moves = instruction.srcs == 1;
    const Fold fold{.op = moves ? Op::bor : call.op,
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
                    .streams = streams_ && program.operands[instruction.first].space == Space::out};
    if (pulls)
        pull(fold);
    else
        fold.run();
}

// Piece by piece: what is read from other processes is folded while it lies in the cache. What is only
// moved is read to where it goes.
void Group::pull(Fold fold) {
    const bool moves = fold.srcs == 1;
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
            std::byte* to = moves ? fold.places[0] : scratch_.data() + source * piece * fold.item;
            read(fold.operands[source].rank, to, fold.far[source] + done * fold.item, bytes,
                 done + piece >= count);
            fold.places[fold.dsts + source] = to;
        }
        if (!moves || fold.dsts > 1) fold.run();
        for (std::size_t index = 0; index < fold.dsts + fold.srcs; ++index)
            fold.places[index] += bytes;
    }
}

void Group::read(int rank, std::byte* to, std::uint64_t from, std::size_t bytes, bool last) {
    if (read_peer(world_->rank(world_rank(rank)), to, from, bytes, last)) return;
    // Its process is gone, or going: who watches it says so within a moment.
    const std::int64_t limit = now_ns() + 20 * nap_ns;
    while (!world_->troubled() && !world_->dead(world_rank(rank)) && now_ns() < limit) sched_yield();
    world_->fail(Trouble::lost, world_rank(rank), world_rank(rank_), at_, calls_,
                 world_->dead(world_rank(rank)) ? "" : "unreadable");
    throw Broken{};
}

void Group::arrive(int rank, std::uint32_t target, const Call& call, Waiter& waiter) {
    std::uint32_t& known = known_[std::size_t(rank)];
    if (reached(known, target)) return;
    known = areas_[rank].line.flag.value.load(std::memory_order_acquire);
    if (!reached(known, target)) wait_long(rank, target, call, waiter);
}

void Group::wait(int rank, std::uint32_t target, const Call& call, Waiter& waiter) {
    arrive(rank, target, call, waiter);
    const std::uint32_t known = known_[std::size_t(rank)];
    // Compare before any of its data is touched. What it had posted before this call says nothing.
    if (compared_[std::size_t(rank)] != calls_ && reached(known, base_ + 1))
        compare(rank, calls_, call.record.hash);
}

void Group::compare(int rank, std::uint64_t number, std::uint32_t hash) {
    compared_[std::size_t(rank)] = number;
    if (areas_[rank].line.hash[number % 2].load(std::memory_order_relaxed) != hash)
        differ(rank, number);
}

void Group::differ(int rank, std::uint64_t number) {
    const CallRecord before = areas_[rank].record(number - 1), mine = mine_->record(number - 1);
    if (before.call == number - 1 && mine.call == number - 1 && before.hash != mine.hash) --number;
    // A script that ends while others need it may have been ended: that is a loss, to those others,
    // whichever of the two sees it first.
    const auto left = [&](int one, int other) {
        const CallRecord last = areas_[one].record(number), wanted = areas_[other].record(number);
        return last.call == number && last.collective == ending && Ending(last.root) == Ending::script &&
               wanted.call == number && wanted.collective != ending;
    };
    if (left(rank_, rank))
        world_->fail(Trouble::lost, world_rank(rank_), world_rank(rank), at_, number, "left");
    else if (left(rank, rank_))
        world_->fail(Trouble::lost, world_rank(rank), world_rank(rank_), at_, number, "left");
    else
        world_->fail(Trouble::mismatch, world_rank(rank), world_rank(rank_), at_, number, "");
    throw Broken{};
}

void Group::show_end(Ending how, std::uint32_t site) {
    ended_ = true;
    Call call;
    call.record.collective = ending;
    call.record.root = std::int32_t(how);
    call.record.site = site;
    begin(call);
    mine_->ended.set(1);
    mine_->line.flag.wake();  // whoever sleeps on it sees that nothing more comes
}

void Group::end(Ending how, std::uint32_t site) {
    if (ended_) return;
    show_end(how, site);
    if (areas_[0].ends.fetch_add(1) + 1 == std::uint32_t(size_)) compare_ends();
}

void Group::end_together(Ending how, std::uint32_t site, Waiter& waiter) {
    if (ended_) return;
    show_end(how, site);
    Life alive = Life::alive;
    world_->rank(world_rank(rank_))
        .life.compare_exchange_strong(alive, how == Ending::script ? Life::left : Life::ended);
    for (int other = 0; other < size_; ++other) world_->rank(world_rank(other)).bell.ring();
    std::int64_t start = now_ns();
    for (int other = 0; other < size_; ++other) {
        RankArea& theirs = areas_[other];
        while (other != rank_ && theirs.ended.value.load(std::memory_order_acquire) == 0) {
            kill_point();
            if (world_->troubled()) throw Broken{};
            if (world_->dead(world_rank(other))) break;
            const CallRecord made = theirs.record(calls_);
            if (made.call == calls_ && made.collective != ending) differ(other, calls_);
            if (now_ns() - start > timeout_ns_) break;
            theirs.ended.sleep(0, nap_ns);
            const bool on = waiter.goes_on(other, now_ns() - start);
            if (world_->foreign()) throw Broken{};  // forked by a signal handler: it is no rank
            if (!on) {
                world_->fail(Trouble::interrupted, world_rank(rank_), world_rank(rank_), at_, calls_, "");
                throw Broken{};
            }
            if (theirs.ended.value.load(std::memory_order_acquire) != 0) start = now_ns();
        }
    }
    compare_ends();
    if (world_->troubled()) throw Broken{};
}

// Of ranks that have ended: all calls but the last were compared when the next one began.
void Group::compare_ends() {
    std::uint64_t first = calls_;
    for (int other = 0; other < size_; ++other)
        if (areas_[other].ended.value.load(std::memory_order_acquire) != 0)
            first = std::min(first, areas_[other].latest().call);
    for (std::uint64_t number = std::max<std::uint64_t>(first, 2) - 1; number <= first; ++number) {
        const CallRecord mine = mine_->record(number);
        for (int other = 0; other < size_; ++other) {
            const CallRecord theirs = areas_[other].record(number);
            if (theirs.call == number && mine.call == number &&
                (theirs.hash != mine.hash || theirs.collective != mine.collective))
                differ(other, number);
        }
    }
}

void Group::show_core() {
    const int now = sched_getcpu();
    if (now == core_) return;
    core_ = now;
    mine_->core.store(now, std::memory_order_relaxed);
}

void Group::wait_long(int rank, std::uint32_t target, const Call& call, Waiter& waiter) {
    Signal& flag = areas_[rank].line.flag;
    std::uint32_t& known = known_[std::size_t(rank)];
    const auto arrived = [&] {
        known = flag.value.load(std::memory_order_acquire);
        return reached(known, target);
    };
    // A couple of microseconds are spent with all that the caller holds; then it is told.
    for (int turn = 0; turn < 64 && spin_ns_ > 0; ++turn) {
        if (arrived()) return;
        cpu_pause();
    }
    waiter.blocks();
    const std::int64_t start = now_ns();
    // The scheduler may have put the very rank that is waited for on this core. Who then sleeps is
    // woken on another one, if one is free.
    show_core();
    const bool apart = areas_[rank].core.load(std::memory_order_relaxed) != core_;
    while (apart && spin_ns_ > 0 && waiter.may_spin() && now_ns() - start < spin_ns_) {
        for (int turn = 0; turn < 32; ++turn) {
            if (arrived()) return;
            cpu_pause();
        }
        if (world_->troubled()) throw Broken{};
    }
    const int turns = spin_ns_ == 0 ? yields : apart ? few_yields : 0;
    for (int turn = 0; turn < turns; ++turn) {
        if (arrived()) return;
        sched_yield();
    }
    const Waiting shown(*world_, world_rank(rank_),
                        {.since = start, .group = at_, .call = calls_, .other = world_rank(rank),
                         .site = call.record.site, .kind = Waits::call});
    while (true) {
        kill_point();
        if (arrived()) return;
        if (world_->troubled()) throw Broken{};
        const CallRecord theirs = areas_[rank].record(calls_);
        if (theirs.call == calls_ && theirs.hash != call.record.hash) differ(rank, calls_);
        if (world_->dead(world_rank(rank)) && !arrived()) {
            world_->fail(Trouble::lost, world_rank(rank), world_rank(rank_), at_, calls_, "");
            throw Broken{};
        }
        if (ended(world_rank(rank)) && !arrived())
            differ(rank, std::min(calls_, areas_[rank].latest().call));
        if (theirs.call < calls_ && gone(world_rank(rank)) && !arrived()) {
            world_->fail(Trouble::lost, world_rank(rank), world_rank(rank_), at_, calls_,
                         going(world_rank(rank)));
            throw Broken{};
        }
        flag.sleep(known, nap_ns);
        const std::int64_t waited = now_ns() - start;
        const bool on = waiter.goes_on(rank, waited);
        if (world_->foreign()) throw Broken{};  // forked by a signal handler: it is no rank
        if (!on) {
            world_->fail(Trouble::interrupted, world_rank(rank_), world_rank(rank_), at_, calls_, "");
            throw Broken{};
        }
        if (waited > timeout_ns_ && !arrived()) {
            world_->fail(Trouble::timeout, world_rank(rank), world_rank(rank_), at_, calls_,
                         in_seconds(timeout_ns_));
            throw Broken{};
        }
    }
}

}  // namespace roundelay
