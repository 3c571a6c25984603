#include "group.hpp"

#include <sched.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>

namespace roundelay {

namespace {

constexpr std::int64_t nap_ns = 50'000'000;
constexpr std::int64_t spin_ns = 100'000;
// With more ranks than cores, a core is handed on until the rank comes by. Else that is hardly worth
// it: whatever takes the core may keep it for milliseconds.
constexpr int yields = 64;
constexpr int few_yields = 4;
// Of slots that one slice uses, for each rank: with the other sets, and what is read and written beside
// them, they then stay in a core's own cache.
constexpr std::size_t slice_bytes = 32 * 1024;
constexpr std::uint64_t look_around_every = 1 << 16;  // turns
// Results from here on are written past the caches, in which they would not stay; four times that where
// others fold meanwhile. Both were measured.
constexpr std::size_t stream_bytes = 8 * 1024 * 1024;

// Areas, then cells, then large slots.
std::size_t slots_at(int size) {
    return round_up((sizeof(RankArea) + window * sizeof(Cell)) * std::size_t(size), page_bytes);
}

bool reached(std::uint32_t flag, std::uint32_t target) {
    return std::int32_t(flag - target) >= 0;  // flags wrap around
}

}  // namespace

std::size_t Group::bytes_for(int size, std::size_t slot_bytes) {
    return slots_at(size) + std::size_t(size) * large_sets * slot_bytes;
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
      cells_(world_->at<Cell>(at_ + sizeof(RankArea) * std::size_t(size_))),
      slots_(world_->at<std::byte>(at_ + slots_at(size_))),
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
    futex_wake(mine_->flag.value);
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

bool Group::tell_raised(int world_rank, int finder) const {
    const auto found = std::ranges::find(world_ranks_, world_rank);
    if (found == world_ranks_.end()) return false;
    const CallRecord last = areas_[found - world_ranks_.begin()].latest();
    const Ending how = last.collective == ending ? Ending(last.root) : Ending::closed;
    if (how != Ending::raised && how != Ending::cancelled) return false;
    const Trouble kind = how == Ending::raised ? Trouble::failed : Trouble::interrupted;
    world_->fail(kind, world_rank, finder, 0, 0, world_->rank(world_rank).raised.data());
    // Of a rank without which the job goes on, only those hear who need it.
    world_->fail(Trouble::lost, world_rank, finder, at_, calls_, "");
    return true;
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
    CallMark mark(*world_, world_rank(rank_), at_, trace_.get());
    const Program& usual = *ways.by_slots.front();
    const std::uint64_t bytes = show(mark, call, usual, counts, count);
    const std::size_t most = counts.empty() ? usual.most * count : std::reduce(counts.begin(), counts.end());
    const Way way = choose(call, ways, most * call.item, waiter);
    Program& program = *way.program;
    past_ = way.past;
    mark.took(program.algorithm, way_number(ways, way));
    if (counts.empty()) {
        const bool read = far_ && program.reaches_in && call.record.in_at == World::nowhere;
        if (read) huge_pages_.note_read(call.in, program.in_here * count * call.item);
        slices(call, program, program.even(count), waiter);
    } else {
        slices(call, program, program.uneven(counts), waiter);
    }
    if (run_ != nullptr) {
        run_->ended.store(now_ns(), std::memory_order_relaxed);
        races_.ended(kind_, turns_);
    }
    mark.done(bytes);
    mine_->finished.store(calls_, std::memory_order_relaxed);
}

void Group::begin(Call& call) {
    const bool troubled = world_->troubled();
    // Who comes late to the very call that went wrong still shows what it came with.
    const Header& header = world_->header();
    if (troubled && (header.group != at_ || header.call != calls_ + 1)) throw Broken{};
    call.record.call = ++calls_;
    // With the hash of all calls before, any later comparison tells of an old difference.
    hash_ = mix(hash_, std::uint64_t(call.record.collective) << 32 | call.record.hash);
    call.record.hash = hash_;
    call.record.in_at = call.in == nullptr ? World::absent : world_->offset_of(call.in);
    call.record.out_at = call.out == nullptr ? World::absent : world_->offset_of(call.out);
    call.record.in_address = std::uint64_t(reinterpret_cast<std::uintptr_t>(call.in));
    mine_->records[calls_ % record_count].put(call.record);
    if (troubled) throw Broken{};
    // A rank that is lost may not be needed before the window ends, though the job goes on without it.
    if (const std::uint32_t losses = header.losses.load(std::memory_order_acquire); losses != losses_) {
        losses_ = losses;
        for (const int member : world_ranks_)
            if (world_->dead(member) && call.record.collective != ending) {
                world_->fail(Trouble::lost, member, world_rank(rank_), at_, calls_, "");
                throw Broken{};
            }
    }
}

// The cell of this turn was last written a window ago. It is ours again once all others have left that turn.
void Group::begin_turn(const Call& call, Waiter& waiter) {
    const Turn& last = taken_[turns_ % window];
    if (turns_ >= window && !reached(passed_, last.end + 1)) catch_up(last, call, waiter);
}

// What is shown in a turn may be looked at until so many turns have ended, itself included.
void Group::end_turn(std::uint32_t posts, std::uint32_t turns) {
    taken_[turns_ % window] = {base_, base_ + posts * turns, calls_};
    base_ += posts;
    ++turns_;
    prefetch_to_write(&cell(rank_));  // which others have read, a window ago
    // Flags wrap around: who was never asked for must not seem to be ahead one day.
    if (turns_ % look_around_every == 0)
        for (int other = 0; other < size_; ++other)
            known_[std::size_t(other)] = areas_[other].flag.value.load(std::memory_order_acquire);
}

// Wait until all have left a turn. How far each has come by now is remembered, so this is seldom asked.
void Group::catch_up(const Turn& turn, const Call& call, Waiter& waiter) {
    std::uint32_t least = base_;
    for (int other = 0; other < size_; ++other) {
        if (other == rank_) continue;
        arrive(other, turn.end + 1, areas_[other].flag.value, call, waiter);
        compare_begun(other);
        if (!reached(known_[std::size_t(other)], least)) least = known_[std::size_t(other)];
    }
    passed_ = least;
}

// See that a rank made the same calls as this one, up to the last that both are known to have begun: who gets
// nothing from another in a call has not compared it yet.
void Group::compare_begun(int rank) {
    std::uint64_t turn = turns_ - 1;
    while (!reached(known_[std::size_t(rank)], taken_[turn % window].begin + 1)) --turn;
    const std::uint64_t number = taken_[turn % window].call;
    std::uint64_t& compared = compared_[std::size_t(rank)];
    if (compared >= number) return;
    const CallRecord theirs = areas_[rank].record(number);
    if (theirs.call != number || theirs.hash != mine_->record(number).hash) differ(rank, number);
    compared = number;
}

// The slots of a slice are written again when all are known to have read them: by a later post, or by the post
// that ended its last turn. This one's is ended in so many turns.
void Group::take_large(const Call& call, const Program& program, std::uint32_t turns, Waiter& waiter) {
    LargeSet& set = large_sets_[larges_ % large_sets];
    if (larges_ >= large_sets && !reached(passed_, set.end + 1))
        for (int other = 0; other < size_; ++other)
            if (other != rank_)
                arrive(other, set.end + (set.posts_last[std::size_t(other)] ? 0 : 1),
                       areas_[other].flag.value, call, waiter);
    set.end = base_ + program.posts * turns;
    set.posts_last = program.posts_last;
}

void Group::slices(const Call& call, const Program& program, const Geometry& geometry,
                   Waiter& waiter) {
    std::size_t width = std::max<std::size_t>(geometry.longest, 1);
    const std::size_t out_blocks = program.out_here * program.parts;
    // What this rank has just brought from there lies in its cache.
    const bool brought = program.in_here > 0 && call.in == call.out && !program.folds;
    streams_ = !brought &&
               out_blocks * geometry.longest * (call.wide_out ? sizeof(float) : call.item) >=
                   (program.folds ? 4 : 1) * stream_bytes;
    const std::size_t slots = program.slots * geometry.longest * call.item;
    // A line that others look at is written once: several slots lie behind it.
    small_from_ = program.slots > 1 ? line_bytes : 0;
    large_ = slots > small_bytes - small_from_;
    apart_ = slots == 0;
    if (large_) {
        const std::size_t grain = std::max<std::size_t>(1, 64 / call.item);
        const std::size_t bytes = std::min(slot_bytes_, slice_bytes * std::size_t(size_));
        const std::size_t room = bytes / program.slots / call.item;
        if (room == 0) throw std::length_error("this algorithm needs more slots than there are");
        width = room < grain ? room : room / grain * grain;
    }
    const std::size_t slices = std::max<std::size_t>(1, (geometry.longest + width - 1) / width);
    // Of a message of many slices, what a rank brings of the next is there before it waits for the others'
    // part of this one: so that who folds and who only brings or takes something do so at the same time.
    leads_ = large_ && slices > 1 && !program.reaches_in && !program.reaches_out;
    const std::uint32_t ahead = leads_ ? 1 : 0;
    for (std::size_t turn = 0; turn < slices + ahead; ++turn) {
        if (program.posts > 0) begin_turn(call, waiter);
        if (large_ && turn < slices) take_large(call, program, 1 + ahead, waiter);
        show_core();
        slice_ = larges_;
        if (program.collects && !large_)
            for (int other = 0; other < size_; ++other) __builtin_prefetch(&cell(other));
        const std::size_t all = program.instructions.size(), head = leads_ ? program.head : all;
        walk(call, program, geometry, 0, head, turn * width, width, waiter);
        if (leads_ && turn > 0) {
            slice_ = larges_ - 1;
            walk(call, program, geometry, head, all, (turn - 1) * width, width, waiter);
        }
        if (program.posts == 0) continue;
        if (program.hears_all && turn >= ahead) passed_ = base_ - ahead * program.posts + 1;
        if (large_ && turn < slices) ++larges_;
        end_turn(program.posts, turn < slices ? 1 + ahead : 1);
    }
}

// What lies past the end of a message is not there: of a slice that begins there only the posts are made.
void Group::walk(const Call& call, const Program& program, const Geometry& geometry, std::size_t first,
                 std::size_t last, std::size_t from, std::size_t width, Waiter& waiter) {
    for (std::size_t number = first; number < last; ++number) {
        const Instruction& instruction = program.instructions[number];
        kill_point();
        switch (instruction.kind) {
            case Kind::wait: {
                // What is posted ahead was posted in the turn before this one.
                const bool before = leads_ && instruction.post <= program.leads[instruction.rank];
                wait(instruction.rank, instruction.post, call, waiter, before ? program.posts : 0);
                break;
            }
            case Kind::post:
                post(instruction.post);
                break;
            case Kind::apply:
                apply(call, program, geometry, number, from, width);
                break;
        }
    }
}

void Group::arrive(int rank, std::uint32_t target, const std::atomic<std::uint32_t>& flag,
                   const Call& call, Waiter& waiter) {
    std::uint32_t& known = known_[std::size_t(rank)];
    if (reached(known, target)) return;
    known = flag.load(std::memory_order_acquire);
    if (reached(known, target)) return;
    const WaitMark wait(mark_, world_rank(rank));
    wait_long(rank, target, flag, call, waiter);
}

// Until a rank has posted in this turn, or in the one before, which began so many flags back. Its calls are
// compared before any of its data is touched.
void Group::wait(int rank, std::uint32_t post, const Call& call, Waiter& waiter, std::uint32_t back) {
    const Mark& theirs = cell(rank, back == 0 ? 0 : 1).of(post, apart_);
    arrive(rank, base_ - back + post, theirs.flag, call, waiter);
    if (compared_[std::size_t(rank)] == calls_) return;
    compared_[std::size_t(rank)] = calls_;
    if (theirs.hash.load(std::memory_order_relaxed) != hash_) differ(rank, calls_);
}

// The first call in which this rank and another differ, of those that both still remember, or 0.
std::uint64_t Group::first_difference(int rank) const {
    const std::uint64_t kept = record_count - 1;
    for (std::uint64_t number = calls_ > kept ? calls_ - kept : 1; number <= calls_; ++number) {
        const CallRecord theirs = areas_[rank].record(number), mine = mine_->record(number);
        if (theirs.call == number && mine.call == number && theirs.hash != mine.hash) return number;
    }
    return 0;
}

void Group::differ(int rank, std::uint64_t number) {
    if (const std::uint64_t first = first_difference(rank); first != 0) number = first;
    for (const auto& [one, other] : {std::pair{rank_, rank}, std::pair{rank, rank_}}) {
        const CallRecord last = areas_[one].record(number), wanted = areas_[other].record(number);
        const bool needed = last.call == number && last.collective == ending &&
                            wanted.call == number && wanted.collective != ending;
        if (!needed) continue;
        const int gone = world_rank(one), finder = world_rank(other);
        if (tell_raised(gone, finder)) throw Broken{};
        // A script that ends while others need it may have been ended: that is a loss, to those
        // others, whichever of the two sees it first. Who ends too soon is the one to look at.
        const bool script = Ending(last.root) == Ending::script;
        world_->fail(script ? Trouble::lost : Trouble::mismatch, gone, finder, at_, number,
                     script ? "left" : "");
        throw Broken{};
    }
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
    mine_->flag.wake();  // whoever sleeps on it sees that nothing more comes
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

// Of ranks that have ended, by the last call that all of them made.
void Group::compare_ends() {
    std::uint64_t last = calls_;
    for (int other = 0; other < size_; ++other)
        if (areas_[other].ended.value.load(std::memory_order_acquire) != 0)
            last = std::min(last, areas_[other].latest().call);
    const CallRecord mine = mine_->record(last);
    for (int other = 0; other < size_; ++other) {
        const CallRecord theirs = areas_[other].record(last);
        if (theirs.call == last && mine.call == last && theirs.hash != mine.hash) differ(other, last);
    }
}

void Group::show_core() {
    const int now = sched_getcpu();
    if (now == core_) return;
    core_ = now;
    mine_->core.store(now, std::memory_order_relaxed);
}

void Group::wait_long(int rank, std::uint32_t target, const std::atomic<std::uint32_t>& word,
                      const Call& call, Waiter& waiter) {
    Signal& flag = areas_[rank].flag;
    std::uint32_t& known = known_[std::size_t(rank)];
    const auto arrived = [&] {
        known = word.load(std::memory_order_acquire);
        return reached(known, target);
    };
    // A couple of microseconds are spent with all that the caller holds; then it is told.
    // A pause may take as long as the news from another core: it looks several times before each.
    for (int turn = 0; turn < 512 && spin_ns_ > 0; ++turn) {
        if (arrived()) return;
        if (turn % 8 == 7) cpu_pause();
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
        const std::uint32_t seen = flag.value.load(std::memory_order_acquire);
        if (arrived()) return;
        if (world_->troubled()) throw Broken{};
        const CallRecord theirs = areas_[rank].record(calls_);
        if (theirs.call == calls_ && theirs.hash != call.record.hash) differ(rank, calls_);
        // It may wait itself, in an earlier call that this rank has already left.
        if (now_ns() - start > nap_ns)
            if (const std::uint64_t number = first_difference(rank); number != 0) differ(rank, number);
        if (world_->dead(world_rank(rank)) && !arrived()) {
            world_->fail(Trouble::lost, world_rank(rank), world_rank(rank_), at_, calls_, "");
            throw Broken{};
        }
        if (ended(world_rank(rank)) && !arrived())
            differ(rank, std::min(calls_, areas_[rank].latest().call));
        if (theirs.call < calls_ && gone(world_rank(rank)) && !arrived()) {
            if (tell_raised(world_rank(rank), world_rank(rank_))) throw Broken{};
            world_->fail(Trouble::lost, world_rank(rank), world_rank(rank_), at_, calls_,
                         going(world_rank(rank)));
            throw Broken{};
        }
        flag.sleep(seen, nap_ns);
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
