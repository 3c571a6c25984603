// One communicator of one rank: flags, call records, slots, and the interpreter that walks programs.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "huge_pages.hpp"
#include "kill_point.hpp"
#include "program.hpp"
#include "race.hpp"
#include "reduce.hpp"
#include "trace.hpp"
#include "wait.hpp"
#include "world.hpp"

namespace roundelay {

constexpr std::size_t default_slot_bytes = 256 * 1024;
// So many turns a rank may be ahead of any other: a turn is a slice of a call, or a meeting before it.
constexpr std::size_t window = 32;
// Slices of large messages use so many sets of slots in turn.
constexpr std::size_t large_sets = 3;
constexpr std::size_t line_bytes = 56;  // the rest of the cache line of a mark
constexpr std::size_t small_bytes = line_bytes + 1024;

// Every bit of the value counts in every bit of the result.
inline std::uint32_t mix(std::uint32_t hash, std::uint64_t value) {
    std::uint64_t mixed = (value ^ hash) * 0x9e3779b97f4a7c15u;
    mixed = (mixed ^ (mixed >> 32)) * 0xd6e8feb86659fd93u;
    return std::uint32_t(mixed ^ (mixed >> 32));
}

struct Mark {
    std::atomic<std::uint32_t> flag;  // how far the rank is: the last flag of this turn, or before it
    std::atomic<std::uint32_t> hash;  // of all calls up to this one
};

// What a rank shows in one turn, all of it in one cache line where the message is tiny. The cells of a rank
// are a ring; one is written again when all others have left the turn that it was used for.
struct alignas(64) Cell {
    Mark mark;
    std::array<std::byte, small_bytes> slots;  // of a turn in which all of them fit in here
    // Where nothing lies in slots, each post has a line of its own, the last ones share one: it is written
    // once and read by few, who would else take it from its writer between two posts.
    struct alignas(64) Line {
        Mark mark;
    };
    std::array<Line, 4> later;

    Mark& of(std::uint32_t post, bool apart) {
        return !apart || post < 2 ? mark : later[std::min<std::size_t>(post - 2, later.size() - 1)].mark;
    }
};

// What a rank is doing: for the error that names it.
struct alignas(64) CallRecord {
    std::uint64_t call;
    std::uint32_t hash;  // of this call, then of all up to it
    std::uint32_t site;
    std::uint64_t count;
    std::int32_t root;
    std::uint8_t collective;
    std::uint8_t dtype;
    std::uint8_t op;
    std::uint8_t algorithm;
    std::uint64_t in_at;  // in the shared memory, or nowhere
    std::uint64_t out_at;
    std::uint64_t in_address;  // in the rank's own memory
};
static_assert(sizeof(CallRecord) == 64);

// Who is behind by a window reads those of who is ahead by one.
constexpr std::size_t record_count = 2 * window;

// How far a rank is on its way out of a group: all that it will ever send has been sent; it is gone.
enum class Stage : std::uint32_t { in, quiet, left };

// Whether ranks can read one another's private memory.
enum class Reads : std::uint32_t { unknown, no, yes };

struct alignas(64) RankArea {
    Signal flag;  // as in the cell of its turn: for those who sleep, or ask how far it is at all
    alignas(64) std::array<Shown<CallRecord>, record_count> records;
    std::atomic<std::int32_t> core;  // that the rank was last seen on
    std::atomic<Stage> stage;
    std::atomic<Reads> reads;        // all others of the group
    Signal ended;                    // 1 once the rank makes no more calls
    std::atomic<std::uint32_t> ends;  // in the first area: how many ranks have ended
    // For those who are not in the group and tell of it: its size, who this is in the world, the number
    // of the group, and the line on which this rank made it.
    std::atomic<std::uint32_t> size, world_rank, made;
    std::atomic<std::uint64_t> serial;
    std::atomic<std::uint64_t> finished;  // its last call that came to its end
    Spans spans;

    CallRecord record(std::uint64_t call) const { return records[call % record_count].get(); }
    CallRecord latest() const;
};

// How a rank ends its calls: the last record says so, in place of a root.
// Who closes because of an exception has failed, or was interrupted, if others still need it.
enum class Ending : std::int32_t { closed, returned, script, dropped, raised, cancelled };
inline constexpr std::array<std::string_view, 6> ending_names = {"closed", "returned", "script",
                                                                 "dropped", "raised", "cancelled"};
constexpr std::uint8_t ending = 0xff;  // in place of a collective

// What a caller asks for.
struct Call {
    CallRecord record{};
    const std::byte* in = nullptr;
    std::byte* out = nullptr;
    DType dtype = DType::uint8;
    Op op = Op::sum;
    std::size_t item = 1;  // bytes of one element
    // A buffer of float32, of a call on bfloat16: rounded as it goes in, widened as it comes out.
    bool wide_in = false, wide_out = false;
    std::int64_t asked_ns = 0;  // for a trace, as is its name: when it was asked for, if not now
    std::uint32_t name = 0;
};

// The programs by which a call may run, each to the same bits: by slots alone, the usual one first; where
// all ranks can read one another's private memory; where the buffers of all lie in shared memory, or none.
struct Ways {
    std::vector<Program*> by_slots, by_reading;
    Program* in_arena = nullptr;
};

// How the caller wants to wait: told when it blocks, asked from time to time whether to go on.
struct Waiter {
    virtual ~Waiter() = default;
    virtual void blocks() {}  // about to wait for long, or to work for long
    virtual bool may_spin() { return true; }  // or there is better use for its core
    // Called every 50 ms of sleep; false interrupts.
    virtual bool goes_on(int /*for_rank*/, std::int64_t /*waited_ns*/) { return true; }
};

class Group {
   public:
    static std::size_t bytes_for(int size, std::size_t slot_bytes);
    // The group of all ranks lies in the world's fixed part, others in a block that they keep.
    Group(std::shared_ptr<World> world, std::shared_ptr<Block> block, int rank,
          std::vector<int> world_ranks, std::size_t slot_bytes);
    ~Group();
    void name(std::uint64_t serial, std::uint32_t made);
    Group(const Group&) = delete;
    Group& operator=(const Group&) = delete;

    int rank() const { return rank_; }
    int size() const { return size_; }
    World& world() { return *world_; }
    int world_rank(int rank) const { return world_ranks_[std::size_t(rank)]; }
    std::uint64_t at() const { return at_; }
    std::uint64_t calls() const { return calls_; }
    Reads reads() const { return reads_; }
    // Bytes read from, and written to, the memory of a rank so far.
    std::uint64_t pulled(int rank) const { return pulled_[std::size_t(rank)].load(); }
    std::uint64_t pushed(int rank) const { return pushed_[std::size_t(rank)].load(); }
    void set_timeout(std::int64_t ns) { timeout_ns_ = ns; }
    void set_spin(std::int64_t ns) { spin_ns_ = ns; }
    std::int64_t spin() const { return spin_ns_; }
    void set_trace(std::shared_ptr<Trace> trace);
    Trace* trace() const { return trace_.get(); }

    // Tell the others how far this rank is on its way out.
    void tell(Stage stage);
    // What one does who goes: closes the group, or with that of all ranks leaves the job.
    const char* going(int world_rank) const;
    // Tell of a rank that is needed and has closed because of an exception; false if it has not.
    bool tell_raised(int world_rank, int finder) const;
    bool holds(int world_rank) const;
    bool gone(int world_rank) const;
    bool ended(int world_rank) const;
    // Whether a rank of the world has come as far, or was never in.
    bool told(int world_rank, Stage stage) const;

    // Run a call in one of the ways, the same on all ranks. One call at a time, whichever thread of this
    // rank makes it: callers take turns.
    void run(Call& call, const Ways& ways, std::span<const std::size_t> counts, std::size_t count,
             Waiter& waiter);
    // Make no more calls. The last rank to end compares what all of them called last.
    void end(Ending how, std::uint32_t site);
    // The same for the group of all ranks: wait for the others, each of which compares. Who does not
    // end in time is not waited for any longer; it compares with those that have.
    void end_together(Ending how, std::uint32_t site, Waiter& waiter);

   private:
    // Where another rank's buffers lie: here, or, of an input, in that rank's own memory. What is not
    // known yet is looked up when it is needed.
    struct Buffers {
        std::byte *in = nullptr, *out = nullptr;
        std::uint64_t far_in = 0;
    };
    // A turn that this rank has taken: the flags before its first post and after its last, and its call.
    struct Turn {
        std::uint32_t begin = 0, end = 0;
        std::uint64_t call = 0;
    };
    // The turn in which the last slice that used a set of large slots is ended.
    struct LargeSet {
        std::uint32_t end = 0;
        std::vector<bool> posts_last;
    };
    void begin(Call& call);
    std::uint64_t show(CallMark& mark, const Call& call, const Program& program,
                       std::span<const std::size_t> counts, std::size_t count);
    void show_end(Ending how, std::uint32_t site);
    void compare_ends();
    std::uint64_t first_difference(int rank) const;
    [[noreturn]] void differ(int rank, std::uint64_t number);
    void show_core();
    // A program, and whether what it writes into large slots goes past the caches.
    struct Way {
        Program* program;
        bool past;
    };
    static std::uint8_t way_number(const Ways& ways, const Way& way);
    Way choose(const Call& call, const Ways& ways, std::size_t bytes, Waiter& waiter);
    Way race(const Call& call, std::span<const Way> ways, bool in_arena, std::size_t bytes, Waiter& waiter);
    bool agree(const Call& call, const Program& program, Waiter& waiter);
    void meet(const Call& call, Waiter& waiter);
    bool all_read(const Call& call, Waiter& waiter);
    const Buffers& buffers(int rank);
    void begin_turn(const Call& call, Waiter& waiter);
    void end_turn(std::uint32_t posts, std::uint32_t turns = 1);
    void catch_up(const Turn& turn, const Call& call, Waiter& waiter);
    void compare_begun(int rank);
    void take_large(const Call& call, const Program& program, std::uint32_t turns, Waiter& waiter);
    void slices(const Call& call, const Program& program, const Geometry& geometry, Waiter& waiter);
    void walk(const Call& call, const Program& program, const Geometry& geometry, std::size_t first,
              std::size_t last, std::size_t from, std::size_t width, Waiter& waiter);
    void apply(const Call& call, const Program& program, const Geometry& geometry, std::size_t number,
               std::size_t from, std::size_t width);
    void apply_rounding(const Call& call, const Instruction& instruction, const Operand* operands,
                        std::byte** places, std::size_t count);
    struct Fold;
    void pull(Fold fold);
    void read(int rank, std::byte* to, std::uint64_t from, std::size_t bytes, bool last);
    void arrive(int rank, std::uint32_t target, const std::atomic<std::uint32_t>& flag, const Call& call,
                Waiter& waiter);
    void wait(int rank, std::uint32_t post, const Call& call, Waiter& waiter, std::uint32_t back = 0);
    void wait_long(int rank, std::uint32_t target, const std::atomic<std::uint32_t>& flag,
                   const Call& call, Waiter& waiter);
    // The cells of one turn lie side by side, an odd number of cache lines apart.
    Cell& cell(int rank, std::uint64_t back = 0) {
        return cells_[((turns_ - back) % window) * std::size_t(size_) + std::size_t(rank)];
    }
    // Posts are counted from the turn's first, which is 1.
    void post(std::uint32_t number) {
        Mark& mark = cell(rank_).of(number, apart_);
        mark.hash.store(hash_, std::memory_order_relaxed);
        mark.flag.store(base_ + number, std::memory_order_release);
        mine_->flag.set(base_ + number);
        if (apart_) prefetch_to_write(&cell(rank_).of(number + 1, true));
    }
    // Where a rank's large slot lies moves back by one rank with every use of its set, so that two ranks in
    // turn, and all along a chain, write where they have just read, into cache lines that are theirs already;
    // else each write would have to take every line back first. Any place will do, as long as all ranks agree:
    // nobody begins such a slice before all have ended the last to use these slots.
    std::byte* slot(int rank, std::uint32_t index, std::size_t stride) {
        if (!large_) return cell(rank).slots.data() + small_from_ + index * stride;
        const std::size_t ranks = std::size_t(size_);
        const std::size_t place = (std::size_t(rank) + ranks - slice_ / large_sets % ranks) % ranks;
        return slots_ + (place * large_sets + slice_ % large_sets) * slot_bytes_ + index * stride;
    }

    std::shared_ptr<World> world_;
    std::shared_ptr<Block> block_;
    std::uint64_t at_;
    int rank_, size_;
    std::vector<int> world_ranks_;
    std::uint32_t losses_ = 0;  // that were seen
    std::size_t slot_bytes_;
    RankArea* areas_;
    RankArea* mine_;
    Cell* cells_;
    std::byte* slots_;

    std::uint64_t calls_ = 0;
    std::uint32_t hash_ = 0;    // of all of them
    std::uint64_t turns_ = 0;
    std::uint64_t larges_ = 0;  // slices that used large slots
    std::uint64_t slice_ = 0;   // the one of them that is worked on
    std::uint32_t base_ = 0;    // flag value at which this turn began
    // All ranks are known to have come as far, and to have made the same calls until then.
    std::uint32_t passed_ = 0;
    std::array<Turn, window> taken_{};
    std::array<LargeSet, large_sets> large_sets_;
    bool ended_ = false;
    bool large_ = false;          // this call uses large slots
    bool apart_ = false;          // or none: its posts have lines of their own
    std::size_t small_from_ = 0;  // where small slots begin in a cell
    bool leads_ = false;          // the head of its program is a slice ahead of the rest
    bool streams_ = false;        // the result of this call is written past the caches
    bool past_ = false;           // and so are its large slots
    Races races_;
    Spans::Span* run_ = nullptr;  // of a race, if this call is one
    std::uint64_t kind_ = 0;      // of this call, or of the last that could be one
    Reads reads_ = Reads::unknown;  // agreed by all
    bool far_ = false;              // some of them by the kernel
    HugePages huge_pages_;
    std::vector<Buffers> buffers_;  // of this call, by rank
    std::vector<std::byte> scratch_;
    std::vector<const void*> rounded_;  // sources of one piece
    std::vector<std::uint32_t> known_;   // flags as last seen
    std::vector<std::uint64_t> compared_;  // call in which a rank's hash was last compared
    std::vector<std::atomic<std::uint64_t>> pulled_, pushed_;  // by rank
    std::atomic<std::int64_t> timeout_ns_ = 60'000'000'000;  // Python may set both at any time
    std::atomic<std::int64_t> spin_ns_;
    int core_ = -1;  // that this rank was on when it last looked
    std::shared_ptr<Trace> trace_;   // or none
    CallMark* mark_ = nullptr;       // of the call under way
};

}  // namespace roundelay
