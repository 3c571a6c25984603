// Memory that all ranks of one host share, who is alive in it, and what has gone wrong.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "wait.hpp"

namespace roundelay {

enum class Trouble : std::uint32_t { none, mismatch, lost, timeout, failed, interrupted };
// Who has ended has made its last call and waits for the others to end too; then it has left.
enum class Life : std::uint32_t { absent, alive, left, dead, ended };
inline constexpr std::array<std::string_view, 5> life_names = {"absent", "alive", "left", "dead",
                                                               "ended"};
// What the loss of a rank does to the job: ends it; lets it go on, but fail in the end; or nothing.
enum class Loss : std::uint32_t { ends, fails, passes };
inline constexpr std::array<std::string_view, 3> loss_names = {"ends", "fails", "passes"};

// The kernel has no more memory to give; the message says how much was asked for.
struct OutOfMemory : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Shared memory of a job that another version of this library runs.
struct OtherVersion : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Thrown out of a call that can't be finished; the world's header says why.
struct Broken : std::exception {
    const char* what() const noexcept override { return "the group is broken"; }
};

// 64 bytes that one rank writes and others read at any time, and never see by halves. The first word
// is a number that no other value in the same place has; 0 is none.
template <class T>
class Shown {
   public:
    void put(const T& value) {
        const auto words = std::bit_cast<Words>(value);
        // The number goes first and comes last: in between, readers see none.
        words_[0].store(0, std::memory_order_relaxed);
        for (std::size_t at = 1; at < words.size(); ++at)
            words_[at].store(words[at], std::memory_order_release);
        words_[0].store(words[0], std::memory_order_release);
    }
    void clear() { words_[0].store(0, std::memory_order_release); }
    T get() const {
        Words words;
        do {
            for (std::size_t at = 0; at < words.size(); ++at)
                words[at] = words_[at].load(std::memory_order_acquire);
        } while (words_[0].load(std::memory_order_relaxed) != words[0]);
        return std::bit_cast<T>(words);
    }

   private:
    using Words = std::array<std::uint64_t, 8>;
    std::array<std::atomic<std::uint64_t>, 8> words_;
};

enum class Waits : std::uint32_t { nothing, call, recv, send };
inline constexpr std::array<std::string_view, 4> waits_names = {"nothing", "call", "recv", "send"};

// What a thread of a rank waits for, once that takes long: for the error that tells who waits for whom.
struct Wait {
    std::int64_t since;  // by the monotonic clock; also tells waits apart
    std::uint64_t group;  // where it lies
    std::uint64_t call;
    std::int64_t tag;
    std::int32_t other;  // world rank, or any
    std::uint32_t site;
    Waits kind;
    std::uint32_t unused;
    std::array<std::uint64_t, 2> unused_too;
};
static_assert(sizeof(Wait) == 64);
constexpr std::size_t wait_count = 4;  // that others see of one rank at a time

// What one rank shows the others, on cache lines of its own.
struct alignas(64) RankInfo {
    Signal bell;  // rung when a message comes, when one is taken, and when trouble begins
    std::atomic<Life> life;
    std::atomic<std::uint32_t> pid;
    // By which others know its process when they read its memory; see peer_memory.hpp.
    std::array<std::atomic<std::uint64_t>, 2> proof;
    std::atomic<std::uint64_t> proof_at;
    std::atomic<std::int64_t> heartbeat;  // when it last beat; a stopped process's no longer does
    std::array<std::atomic<bool>, wait_count> waits_taken;
    std::array<Shown<Wait>, wait_count> waits;
    std::atomic<Loss> loss;
    std::atomic<std::uint64_t> step;  // of training that it is in, counted from 1; 0: of none
    std::atomic<std::int32_t> core;   // on which it last waited for a message, counted from 1
    std::atomic<bool> stood_still;    // it was stopped when the first wait of the world timed out
    std::array<char, 256> why;        // it was lost though it lived on; complete once it is dead
    std::array<char, 256> raised;     // under way when it last closed; complete before that is shown
    // For those who look on: the group in which it began a call last, and the bytes of all calls.
    std::atomic<std::uint64_t> group_now, moved;
};

constexpr std::uint32_t no_rank = ~std::uint32_t{0};
constexpr std::size_t page_bytes = 4096;

constexpr std::size_t site_length = 160;
constexpr std::size_t site_count = 256;
using Site = std::array<char, site_length>;

struct alignas(64) Header {
    std::uint64_t magic;
    std::uint32_t version;
    std::uint32_t size;
    std::uint64_t bytes;
    std::array<std::uint8_t, 16> token;

    // The first trouble wins; its details are complete once `trouble` is not none.
    std::atomic<Trouble> trouble;
    std::atomic<std::uint32_t> trouble_claimed;  // by which world rank, counted from 1
    std::uint32_t culprit;  // world rank
    std::uint32_t finder;   // world rank
    std::uint64_t group;    // where the group lies in which it was found
    std::uint64_t call;
    std::array<char, 512> text;

    std::atomic<std::uint64_t> serial;  // numbers groups, so that messages find their own
    std::atomic<std::uint32_t> losses;  // of ranks without which the job goes on
    std::atomic<std::uint32_t> lock;    // of the arena: which world rank holds it, from 1
    std::uint64_t top;
    std::uint64_t first_free;

    std::uint64_t ranks_at, shelf_at, rings_at, sites_at, group_at;
    std::uint64_t ring_bytes;  // of one ring; where each lies is in a table by pair, once it is used
};

class World : public std::enable_shared_from_this<World> {
   public:
    // Where the parts of the memory of `size` ranks lie, before the arena, and how long all of it is.
    struct Parts {
        std::size_t ranks_at, shelf_at, rings_at, sites_at, group_at, bytes;
    };
    static Parts parts(int size, std::size_t group_bytes);
    // Make the memory for `size` ranks: the fixed part, and `arena` bytes to be asked for. Of the group of
    // all ranks, each needs the first `needed_bytes`; the rest are slots.
    static std::shared_ptr<World> create(int size, std::size_t group_bytes, std::size_t needed_bytes,
                                         std::size_t arena);
    // Map memory made by another process; refuses what is not ours.
    static std::shared_ptr<World> attach(int fd, std::span<const std::uint8_t> token);
    // Map it to be read only, by the same user's eyes; throws OtherVersion, or what is not ours.
    static std::shared_ptr<World> look_on(int fd);
    ~World();
    World(const World&) = delete;
    World& operator=(const World&) = delete;

    int size() const { return int(header_->size); }
    int fd() const { return fd_; }
    std::span<const std::uint8_t> token() const { return header_->token; }
    Header& header() { return *header_; }
    RankInfo& rank(int rank) { return at<RankInfo>(header_->ranks_at)[rank]; }
    Site& site(int rank, std::size_t index) {
        return at<Site>(header_->sites_at)[std::size_t(rank) * site_count + index];
    }
    template <class T>
    T* at(std::uint64_t offset) {
        return reinterpret_cast<T*>(base_ + offset);
    }
    // Where a pointer lies in the shared memory, or `nowhere`; `absent` is where no buffer lies.
    static constexpr std::uint64_t nowhere = ~std::uint64_t{0};
    static constexpr std::uint64_t absent = nowhere - 1;
    std::uint64_t offset_of(const void* pointer) const {
        const auto* byte = static_cast<const std::byte*>(pointer);
        return byte >= base_ && byte < base_ + bytes_ ? std::uint64_t(byte - base_) : nowhere;
    }

    bool holds(std::uint64_t at, std::size_t bytes) const {
        return at % 64 == 0 && at <= bytes_ && bytes <= bytes_ - at;
    }

    // Zeroed memory, in whole pages, really there; throws OutOfMemory.
    std::uint64_t allocate(std::size_t bytes);
    void release(std::uint64_t offset, std::size_t bytes);
    // Who of the world's ranks, counted from 1, claims something for this process.
    std::uint32_t claimant() const { return speaker_ < 0 ? no_rank : std::uint32_t(speaker_) + 1; }
    std::size_t used() const { return header_->top; }

    // A rank of this process begins and ends.
    void enter(int rank);
    void leave(int rank);
    // Whether a rank is a thread of this process, whose memory is this one's.
    bool here(int rank);
    // Watch other processes: each rank's pipe is at its end when the rank is.
    void watch(std::vector<int> pipes, int own_pipe);
    // This process is a forked child: it may look at nothing here any more.
    bool foreign() const;

    // Tell everybody; only the first call counts.
    void fail(Trouble kind, int culprit, int finder, std::uint64_t group, std::uint64_t call,
              const std::string& text);
    // By which exception a rank closes.
    void set_raised(int rank, const std::string& text);
    bool dead(int rank) { return this->rank(rank).life.load() == Life::dead; }
    bool troubled() const {
        return header_->trouble.load(std::memory_order_acquire) != Trouble::none;
    }

   private:
    World(int fd, std::byte* base, std::size_t bytes);
    void run_watch();
    bool claim_trouble();
    // Write what went wrong, unless somebody has; false while somebody else is about to.
    bool tell(Trouble kind, int culprit, int finder, std::uint64_t group, std::uint64_t call,
              const std::string& text);
    // A rank is lost without which the job goes on: only calls that need it fail. False if it ends.
    bool lose(int rank, const std::string& why);
    void ring_all();
    void take_back();
    void lower_top(std::uint64_t top);
    bool stopped(int rank);
    void note_stopped(int finder);
    friend void close_after_fork();

    int fd_;
    std::byte* base_;
    std::size_t bytes_;
    Header* header_;
    std::uint32_t forks_;  // of this process and its forebears when the world was made
    std::mutex mutex_;
    std::vector<int> local_;        // ranks of this process
    std::atomic<int> speaker_{-1};  // the first of them
    std::vector<std::pair<std::uint64_t, std::size_t>> given_back_;  // and not yet free for others
    std::vector<int> pipes_;
    std::size_t next_ = 0;  // the rank after this one, whom it watches first
    int own_pipe_ = -1;
    int stop_read_ = -1, stop_write_ = -1;
    std::thread watcher_;
};

// Memory in the arena that some ranks share; goes back when the last of them lets go of it.
class Block : public std::enable_shared_from_this<Block> {
   public:
    // Room for a block that so many ranks hold; each then makes its own end of it.
    static std::uint64_t reserve(World& world, std::size_t bytes, std::uint32_t ranks);
    Block(std::shared_ptr<World> world, std::uint64_t at, std::size_t bytes);
    ~Block();
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;
    std::uint64_t at() const { return at_ + page_bytes; }
    std::byte* data(std::size_t from) { return world_->at<std::byte>(at() + from); }

   private:
    std::shared_ptr<World> world_;
    std::uint64_t at_;
    std::size_t bytes_;
};

// A thread of a rank waits for long, and shows for what. It stays to be seen if trouble ends the wait.
class Waiting {
   public:
    Waiting(World& world, int rank, Wait wait);
    ~Waiting();
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    World& world_;
    RankInfo& rank_;
    std::size_t place_ = 0;
};

// How a timeout is told: in seconds.
std::string in_seconds(std::int64_t ns);

// Have the kernel set pages aside now, so that no write to them fails later. The kernel would rather
// kill a process than refuse, so what it has is looked at first.
bool reserve(int fd, std::uint64_t at, std::size_t bytes);

// A thread that did not come along into a forked child can be neither joined nor detached there.
inline void abandon(std::thread& thread) { new std::thread(std::move(thread)); }

constexpr std::size_t round_up(std::size_t value, std::size_t unit) {
    return (value + unit - 1) / unit * unit;
}

}  // namespace roundelay
