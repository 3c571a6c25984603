// Room in the arena: found and given back under a lock that nobody waits for in vain.
#include <fcntl.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "kill_point.hpp"
#include "memory.hpp"
#include "world.hpp"

namespace roundelay {

namespace {

constexpr std::int64_t patience_ns = 60'000'000'000;  // as a call has by default
constexpr std::int64_t moment_ns = 10'000'000;

struct FreeBlock {
    std::uint64_t next;
    std::uint64_t bytes;
};

// Held by one rank of all. Who holds it may die with it, then there is trouble; or be stopped.
class ArenaLock {
   public:
    ArenaLock(World& world, std::int64_t limit_ns)
        : word_(world.header().lock), limit_(now_ns() + limit_ns) {
        for (int turn = 0; !try_lock(world.claimant()) && !world.troubled(); ++turn) {
            if (turn < 1000) {
                sched_yield();
            } else {
                if (now_ns() > limit_) return;
                const timespec nap{0, 1'000'000};
                nanosleep(&nap, nullptr);
            }
        }
    }
    ~ArenaLock() {
        if (held_) word_.store(0, std::memory_order_release);
    }
    bool held() const { return held_; }
    std::uint32_t holder() const { return holder_; }  // if it is not held here

   private:
    bool try_lock(std::uint32_t mine) {
        holder_ = 0;
        held_ = word_.compare_exchange_strong(holder_, mine, std::memory_order_acquire);
        return held_;
    }

    std::atomic<std::uint32_t>& word_;
    std::int64_t limit_;
    std::uint32_t holder_ = 0;
    bool held_ = false;
};

}  // namespace

bool reserve(int fd, std::uint64_t at, std::size_t bytes) {
    // A sixteenth stays for what the ranks themselves need to go on, tables of pages among it.
    const std::size_t available = available_memory();
    if (bytes > available - available / 16) {
        errno = ENOMEM;
        return false;
    }
    return fallocate(fd, 0, off_t(at), off_t(bytes)) == 0;
}

std::uint64_t World::allocate(std::size_t bytes) {
    if (foreign()) throw Broken{};
    bytes = std::max(round_up(bytes, page_bytes), page_bytes);
    const ArenaLock guard(*this, patience_ns);
    if (!guard.held()) {
        const bool known = guard.holder() != 0 && guard.holder() != no_rank;
        const int late = known ? int(guard.holder()) - 1 : int(speaker_);
        if (!troubled()) fail(Trouble::timeout, late, speaker_, 0, 0, in_seconds(patience_ns));
        throw Broken{};
    }
    kill_point();
    take_back();
    std::uint64_t* link = &header_->first_free;
    while (*link != 0) {
        auto* block = at<FreeBlock>(*link);
        if (block->bytes == bytes) {
            const std::uint64_t found = *link;
            *link = block->next;
            std::memset(base_ + found, 0, bytes);
            return found;
        }
        link = &block->next;
    }
    const std::uint64_t found = header_->top;
    if (bytes > header_->bytes - found)
        throw OutOfMemory("the arena of " + std::to_string(header_->bytes) + " bytes has " +
                          std::to_string(header_->bytes - found) + " left, not " +
                          std::to_string(bytes));
    if (!reserve(fd_, found, bytes))
        throw OutOfMemory("no room for " + std::to_string(bytes) +
                          " more bytes: " + std::strerror(errno));
    header_->top = found + bytes;
    return found;
}

void World::release(std::uint64_t offset, std::size_t bytes) {
    if (foreign() || troubled()) return;  // what went wrong is still to be read there
    {
        const std::lock_guard own(mutex_);
        given_back_.emplace_back(offset, std::max(round_up(bytes, page_bytes), page_bytes));
    }
    // Whoever lets go of memory is not made to wait for it: the next call under the lock sees to it,
    // and a broken world gives everything back at its end.
    const ArenaLock guard(*this, moment_ns);
    if (!guard.held()) return;
    kill_point();
    take_back();
}

std::uint64_t Block::reserve(World& world, std::size_t bytes, std::uint32_t ranks) {
    const std::uint64_t at = world.allocate(bytes + page_bytes);
    world.at<std::atomic<std::uint32_t>>(at)->store(ranks);
    return at;
}

Block::Block(std::shared_ptr<World> world, std::uint64_t at, std::size_t bytes)
    : world_(std::move(world)), at_(at), bytes_(bytes) {}

Block::~Block() {
    if (world_->foreign()) return;
    if (world_->at<std::atomic<std::uint32_t>>(at_)->fetch_sub(1) == 1)
        world_->release(at_, bytes_ + page_bytes);
}

// Under the lock: what ranks of this process have given back is free for all.
void World::take_back() {
    const std::lock_guard own(mutex_);
    for (const auto& [offset, bytes] : given_back_) {
        if (offset + bytes == header_->top) {
            lower_top(offset);
            continue;
        }
        auto* block = at<FreeBlock>(offset);
        block->next = header_->first_free;
        block->bytes = bytes;
        header_->first_free = offset;
    }
    given_back_.clear();
}

// The last block goes back to the kernel, and the free ones before it: a later one starts from zeroed
// pages.
void World::lower_top(std::uint64_t top) {
    for (std::uint64_t* link = &header_->first_free; *link != 0;) {
        const auto* block = at<FreeBlock>(*link);
        if (*link + block->bytes != top) {
            link = &at<FreeBlock>(*link)->next;
            continue;
        }
        top = *link;
        *link = block->next;
        link = &header_->first_free;
    }
    fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(top),
              off_t(header_->top - top));
    header_->top = top;
}

}  // namespace roundelay
