#include "world.hpp"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <set>

namespace roundelay {

namespace {

constexpr std::uint64_t magic = 0x31796c65646e756f;  // "oundely1"
constexpr std::uint32_t version = 1;
constexpr std::size_t page = 4096;
constexpr int heartbeat_ms = 100;

struct FreeBlock {
    std::uint64_t next;
    std::uint64_t bytes;
};

// Processes that fork while they are ranks: the child must not keep a rank's pipe open.
std::mutex worlds_mutex;
std::set<World*> worlds;
std::atomic<std::uint32_t> forks;  // counted in the child, so that it knows what it inherited

void before_fork() { worlds_mutex.lock(); }
void after_fork() { worlds_mutex.unlock(); }

std::string reason(const std::string& what) { return what + ": " + std::strerror(errno); }

// Mail between two ranks is small when there are many.
std::size_t mail_ring_bytes(int size) {
    std::size_t bytes = 64 * 1024;
    while (bytes > 4096 && bytes * std::size_t(size) > 1024 * 1024) bytes /= 2;
    return bytes;
}

// Have the kernel set pages aside now, so that no write to them fails later. The kernel would rather
// kill a process than refuse, so what it has is looked at first.
bool reserve(int fd, std::uint64_t at, std::size_t bytes) {
    if (bytes > available_memory()) {
        errno = ENOMEM;
        return false;
    }
    return fallocate(fd, 0, off_t(at), off_t(bytes)) == 0;
}

class SpinLock {
   public:
    // Who holds it may have died with it: then there is trouble, and nobody waits for ever.
    SpinLock(std::atomic<std::uint32_t>& word, const World& world) : word_(word) {
        while (!held_ && !world.troubled()) {
            held_ = word_.exchange(1, std::memory_order_acquire) == 0;
            if (!held_) sched_yield();
        }
    }
    ~SpinLock() {
        if (held_) word_.store(0, std::memory_order_release);
    }
    bool held() const { return held_; }

   private:
    std::atomic<std::uint32_t>& word_;
    bool held_ = false;
};

}  // namespace

void close_after_fork() {
    for (World* world : worlds) {
        for (int fd : {world->own_pipe_, world->stop_read_, world->stop_write_})
            if (fd >= 0) ::close(fd);
        world->own_pipe_ = world->stop_read_ = world->stop_write_ = -1;
    }
    ++forks;
    after_fork();
}

World::World(int fd, std::byte* base, std::size_t bytes)
    : fd_(fd), base_(base), bytes_(bytes), header_(reinterpret_cast<Header*>(base)), forks_(forks) {
    static const int once = pthread_atfork(before_fork, after_fork, close_after_fork);
    (void)once;
    const std::lock_guard guard(worlds_mutex);
    worlds.insert(this);
}

std::shared_ptr<World> World::create(int size, std::size_t group_bytes, std::size_t arena) {
    const std::size_t ranks_at = round_up(sizeof(Header), page);
    const std::size_t sites_at = ranks_at + round_up(sizeof(RankInfo) * std::size_t(size), page);
    const std::size_t mail_at =
        sites_at + round_up(sizeof(Site) * site_count * std::size_t(size), page);
    const std::size_t ring = mail_ring_bytes(size) + 256;
    const std::size_t group_at =
        mail_at + round_up(ring * std::size_t(size) * std::size_t(size), page);
    const std::size_t fixed = group_at + round_up(group_bytes, page);

    const int fd = memfd_create("roundelay", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) throw std::runtime_error(reason("memfd_create"));
    // The arena is only addresses until somebody asks for it; a limit on those makes it smaller, also
    // for children that map it beside what they inherit.
    rlimit limit{};
    if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
        arena = std::min(arena, std::size_t(limit.rlim_cur) / 8);
    std::size_t bytes = 0;
    void* base = MAP_FAILED;
    for (; base == MAP_FAILED; arena /= 2) {
        bytes = fixed + round_up(arena, page);
        if (ftruncate(fd, off_t(bytes)) == 0)
            base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
        if (arena < page) break;
    }
    if (base == MAP_FAILED || !reserve(fd, 0, fixed)) {
        const std::string text = reason("no room for " + std::to_string(fixed) + " bytes");
        if (base != MAP_FAILED) munmap(base, bytes);
        ::close(fd);
        throw OutOfMemory(text);
    }
    fchmod(fd, 0600);  // nobody else may open it by way of /proc either
    // The size is final: nobody can cut pages away under a running job.
    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    auto* header = new (base) Header{};
    header->magic = magic;
    header->version = version;
    header->size = std::uint32_t(size);
    header->bytes = bytes;
    if (getrandom(header->token.data(), header->token.size(), 0) < 0)
        throw std::runtime_error(reason("getrandom"));
    header->top = fixed;
    header->ranks_at = ranks_at;
    header->sites_at = sites_at;
    header->mail_at = mail_at;
    header->mail_bytes = ring;
    header->group_at = group_at;
    return std::shared_ptr<World>(new World(fd, static_cast<std::byte*>(base), bytes));
}

std::shared_ptr<World> World::attach(int fd, std::span<const std::uint8_t> token) {
    struct stat info{};
    if (fstat(fd, &info) != 0) throw std::runtime_error(reason("fstat"));
    if (info.st_uid != geteuid() || std::size_t(info.st_size) < sizeof(Header))
        throw std::runtime_error("this shared memory is not of this user's job");
    const int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (own < 0) throw std::runtime_error(reason("dup"));
    const auto bytes = std::size_t(info.st_size);
    void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, own, 0);
    if (base == MAP_FAILED) {
        ::close(own);
        throw OutOfMemory(reason("mmap of " + std::to_string(bytes) + " bytes"));
    }
    const auto* header = static_cast<const Header*>(base);
    if (header->magic != magic || header->version != version || header->bytes != bytes ||
        !std::ranges::equal(token, header->token)) {
        munmap(base, bytes);
        ::close(own);
        throw std::runtime_error("this shared memory belongs to another job or another version");
    }
    return std::shared_ptr<World>(new World(own, static_cast<std::byte*>(base), bytes));
}

World::~World() {
    {
        const std::lock_guard guard(worlds_mutex);
        worlds.erase(this);
    }
    if (!foreign()) {
        for (int rank : std::vector<int>(local_)) leave(rank);
        if (watcher_.joinable()) {
            ::close(stop_write_);
            watcher_.join();
            ::close(stop_read_);
        }
        for (int fd : pipes_)
            if (fd >= 0) ::close(fd);
        if (own_pipe_ >= 0) ::close(own_pipe_);
    } else if (watcher_.joinable()) {
        abandon(watcher_);
    }
    munmap(base_, bytes_);
    ::close(fd_);
}

bool World::foreign() const { return forks != forks_; }

std::uint64_t World::allocate(std::size_t bytes) {
    if (foreign()) throw Broken{};
    bytes = std::max(round_up(bytes, page), page);
    const SpinLock guard(header_->lock, *this);
    if (!guard.held()) throw Broken{};
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
        throw OutOfMemory(reason("no room for " + std::to_string(bytes) + " more bytes"));
    header_->top = found + bytes;
    return found;
}

void World::release(std::uint64_t offset, std::size_t bytes) {
    if (foreign()) return;
    bytes = std::max(round_up(bytes, page), page);
    const SpinLock guard(header_->lock, *this);
    if (!guard.held()) return;  // a broken world gives everything back at its end
    if (offset + bytes == header_->top) {
        // The last block goes back to the kernel: a later one starts from zeroed pages.
        fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(offset), off_t(bytes));
        header_->top = offset;
        return;
    }
    auto* block = at<FreeBlock>(offset);
    block->next = header_->first_free;
    block->bytes = bytes;
    header_->first_free = offset;
}

void World::enter(int rank) {
    RankInfo& info = this->rank(rank);
    info.pid.store(std::uint32_t(getpid()));
    info.life.store(Life::alive, std::memory_order_release);
    const std::lock_guard guard(mutex_);
    local_.push_back(rank);
    // Whoever is watched has a heart that beat at least once: one that stops at once shows too.
    if (watcher_.joinable()) info.heartbeat.fetch_add(1, std::memory_order_relaxed);
}

void World::leave(int rank) {
    if (foreign()) return;  // a child's end is not the rank's
    const std::lock_guard guard(mutex_);
    std::erase(local_, rank);
    Life alive = Life::alive;
    this->rank(rank).life.compare_exchange_strong(alive, Life::left);
}

void World::watch(std::vector<int> pipes, int own_pipe) {
    pipes_ = std::move(pipes);
    own_pipe_ = own_pipe;
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error(reason("pipe"));
    stop_read_ = ends[0];
    stop_write_ = ends[1];
    const std::lock_guard guard(mutex_);
    for (int mine : local_) rank(mine).heartbeat.fetch_add(1, std::memory_order_relaxed);
    watcher_ = std::thread([this] { run_watch(); });
}

void World::run_watch() {
    pthread_setname_np(pthread_self(), "roundelay-watch");
    while (true) {
        std::vector<pollfd> waits{{stop_read_, POLLIN, 0}};
        for (int fd : pipes_) waits.push_back({fd, POLLIN, 0});  // negative ones are passed over
        poll(waits.data(), nfds_t(waits.size()), heartbeat_ms);
        if (waits[0].revents != 0) return;
        for (std::size_t index = 0; index < pipes_.size(); ++index) {
            if (waits[index + 1].revents == 0) continue;
            ::close(pipes_[index]);
            pipes_[index] = -1;
            const int gone = int(index);
            // A rank that ends before it has begun is as lost as any other.
            Life before = Life::alive, unborn = Life::absent;
            if (rank(gone).life.compare_exchange_strong(before, Life::dead) ||
                rank(gone).life.compare_exchange_strong(unborn, Life::dead)) {
                const int finder = local_.empty() ? gone : local_.front();
                fail(Trouble::lost, gone, finder, 0, 0, "");
            }
        }
        const std::lock_guard guard(mutex_);
        for (int mine : local_) rank(mine).heartbeat.fetch_add(1, std::memory_order_relaxed);
    }
}

void World::fail(Trouble kind, int culprit, int finder, std::uint64_t group, std::uint64_t call,
                 const std::string& text) {
    if (header_->trouble_claimed.exchange(1) == 0) {
        header_->culprit = std::uint32_t(culprit);
        header_->finder = std::uint32_t(finder);
        header_->group = group;
        header_->call = call;
        const std::size_t length = std::min(text.size(), header_->text.size() - 1);
        std::memcpy(header_->text.data(), text.data(), length);
        header_->text[length] = 0;
        header_->trouble.store(kind, std::memory_order_release);
    }
    for (int other = 0; other < size(); ++other) rank(other).bell.ring();
}

}  // namespace roundelay
