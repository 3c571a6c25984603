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
#include <cstdio>
#include <cstring>
#include <new>
#include <system_error>

#include "kill_point.hpp"
#include "memory.hpp"
#include "peer_memory.hpp"
#include "shelf.hpp"

namespace roundelay {

namespace {

constexpr std::uint64_t magic = 0x31796c65646e756f;  // "oundely1"
constexpr std::uint32_t version = 8;
constexpr int heartbeat_ms = 100;
constexpr std::int64_t told_within_ns = 1'000'000'000;
constexpr std::size_t set_aside = 48 * 1024 * 1024;
constexpr std::size_t wards = 8;  // ranks whose end each rank watches for

// Processes that fork while they are ranks: the child must not keep a rank's pipe open.
// Never destroyed: a thread may let go of a world while the process exits.
std::mutex& worlds_mutex = *new std::mutex;
std::vector<World*>& worlds = *new std::vector<World*>;
std::atomic<std::uint32_t> forks;  // counted in the child, so that it knows what it inherited

void before_fork() { worlds_mutex.lock(); }
void after_fork() { worlds_mutex.unlock(); }

[[noreturn]] void throw_errno(const char* what) {
    throw std::system_error(errno, std::generic_category(), what);
}

std::string reason(const std::string& what) { return what + ": " + std::strerror(errno); }

// The ring between two ranks is small when there are many. What fits into it whole is gone when the sender
// goes on to something else: the rest would wait for its thread, and for the receiver's, turn by turn.
std::size_t ring_bytes_for(int size) {
    std::size_t bytes = 512 * 1024;
    while (bytes > 4096 && bytes * std::size_t(size) > 1024 * 1024) bytes /= 2;
    return bytes;
}

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
    worlds.push_back(this);
}

World::Parts World::parts(int size, std::size_t group_bytes) {
    const auto ranks = std::size_t(size);
    Parts parts{};
    parts.ranks_at = round_up(sizeof(Header), page_bytes);
    parts.shelf_at = parts.ranks_at + round_up(sizeof(RankInfo) * ranks, page_bytes);
    parts.rings_at = parts.shelf_at + round_up(sizeof(Shelf::Place) * Shelf::places, page_bytes);
    parts.sites_at = parts.rings_at + round_up(sizeof(std::uint64_t) * ranks * ranks, page_bytes);
    parts.group_at = parts.sites_at + round_up(sizeof(Site) * site_count * ranks, page_bytes);
    parts.bytes = parts.group_at + round_up(group_bytes, page_bytes);
    return parts;
}

std::shared_ptr<World> World::create(int size, std::size_t group_bytes, std::size_t needed_bytes,
                                     std::size_t arena) {
    const Parts parts = World::parts(size, group_bytes);
    const std::size_t fixed = parts.bytes;
    const int fd = memfd_create("roundelay", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) throw_errno("memfd_create");
    // The arena is only addresses until somebody asks for it; a limit on those makes it smaller, also
    // for children that map it beside what they inherit.
    rlimit limit{};
    if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
        arena = std::min(arena, std::size_t(limit.rlim_cur) / 8);
    std::size_t bytes = 0;
    void* base = MAP_FAILED;
    for (; base == MAP_FAILED; arena /= 2) {
        bytes = fixed + round_up(arena, page_bytes);
        if (ftruncate(fd, off_t(bytes)) == 0)
            base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
        if (arena < page_bytes) break;
    }
    // Few ranks have all of it from the start. Many have all but slots and source lines, most of which
    // are never touched.
    const bool room = fixed <= available_memory();
    if (!room) errno = ENOMEM;
    const bool few = fixed <= set_aside;
    if (base == MAP_FAILED || !room || !reserve(fd, 0, few ? fixed : parts.sites_at) ||
        !(few || reserve(fd, parts.group_at, needed_bytes))) {
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
    header->ranks_at = parts.ranks_at;
    header->shelf_at = parts.shelf_at;
    header->rings_at = parts.rings_at;
    header->ring_bytes = round_up(ring_bytes_for(size) + 256, page_bytes);
    header->sites_at = parts.sites_at;
    header->group_at = parts.group_at;
    return std::shared_ptr<World>(new World(fd, static_cast<std::byte*>(base), bytes));
}

std::shared_ptr<World> World::attach(int fd, std::span<const std::uint8_t> token) {
    struct stat info{};
    if (fstat(fd, &info) != 0) throw std::runtime_error(reason("fstat"));
    if (info.st_uid != geteuid() || std::size_t(info.st_size) < sizeof(Header))
        throw std::runtime_error("this shared memory is not of this user's job");
    const int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (own < 0) throw_errno("dup");
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

std::shared_ptr<World> World::look_on(int fd) {
    struct stat info{};
    if (fstat(fd, &info) != 0) throw std::runtime_error(reason("fstat"));
    if (info.st_uid != geteuid() || std::size_t(info.st_size) < sizeof(Header))
        throw std::runtime_error("this shared memory is not of this user's job");
    const int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (own < 0) throw_errno("dup");
    const auto bytes = std::size_t(info.st_size);
    void* base = mmap(nullptr, bytes, PROT_READ, MAP_SHARED | MAP_NORESERVE, own, 0);
    if (base == MAP_FAILED) {
        ::close(own);
        throw OutOfMemory(reason("mmap of " + std::to_string(bytes) + " bytes"));
    }
    const auto* header = static_cast<const Header*>(base);
    const auto refuse = [&](const std::string& why) {
        munmap(base, bytes);
        ::close(own);
        return why;
    };
    if (header->magic != magic) throw std::runtime_error(refuse("this is no job's memory, or not yet"));
    if (header->version != version)
        throw OtherVersion(refuse("layout " + std::to_string(header->version) +
                                  ", where this library has layout " + std::to_string(version)));
    // What it says of itself must lie inside: nothing beyond is ever looked at.
    const std::uint32_t size = header->size;
    const Parts parts = World::parts(int(std::min<std::uint32_t>(size, 1 << 20)), 0);
    if (size == 0 || size > 1 << 20 || header->bytes != bytes || parts.bytes > bytes ||
        header->ranks_at != parts.ranks_at || header->sites_at != parts.sites_at ||
        header->group_at != parts.group_at)
        throw std::runtime_error(refuse("this job's memory is broken"));
    return std::shared_ptr<World>(new World(own, static_cast<std::byte*>(base), bytes));
}

World::~World() {
    {
        const std::lock_guard guard(worlds_mutex);
        std::erase(worlds, this);
    }
    if (!foreign()) {
        for (int rank : std::vector<int>(local_)) leave(rank);
        if (stop_write_ >= 0) ::close(stop_write_);
        if (watcher_.joinable()) watcher_.join();  // there is none if no thread was to be had
        if (stop_read_ >= 0) ::close(stop_read_);
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

void World::enter(int rank) {
    RankInfo& info = this->rank(rank);
    info.pid.store(std::uint32_t(getpid()));
    const Proof& proof = own_proof();
    for (std::size_t at = 0; at < proof.words.size(); ++at) info.proof[at].store(proof.words[at]);
    info.proof_at.store(std::uint64_t(reinterpret_cast<std::uintptr_t>(&proof)));
    let_ranks_read();
    info.life.store(Life::alive, std::memory_order_release);
    const std::lock_guard guard(mutex_);
    local_.push_back(rank);
    speaker_ = local_.front();
    // Whoever is watched has a heart that beat at least once: one that stops at once shows too.
    if (watcher_.joinable()) info.heartbeat.store(now_ns(), std::memory_order_relaxed);
}

bool World::here(int rank) {
    const std::lock_guard guard(mutex_);
    return std::ranges::find(local_, rank) != local_.end();
}

void World::leave(int rank) {
    if (foreign()) return;  // a child's end is not the rank's
    const std::lock_guard guard(mutex_);
    std::erase(local_, rank);
    speaker_ = local_.empty() ? -1 : local_.front();
    Life now = Life::alive;
    std::atomic<Life>& life = this->rank(rank).life;
    if (!life.compare_exchange_strong(now, Life::left) && now == Life::ended)
        life.compare_exchange_strong(now, Life::left);
}

void World::watch(std::vector<int> pipes, int own_pipe) {
    pipes_ = std::move(pipes);
    own_pipe_ = own_pipe;
    next_ = std::size_t(std::ranges::find(pipes_, -1) - pipes_.begin()) + 1;  // its own is none
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) throw_errno("pipe");
    stop_read_ = ends[0];
    stop_write_ = ends[1];
    const std::lock_guard guard(mutex_);
    for (int mine : local_) rank(mine).heartbeat.store(now_ns(), std::memory_order_relaxed);
    watcher_ = std::thread([this] { run_watch(); });
}

void World::run_watch() {
    pthread_setname_np(pthread_self(), "roundelay-watch");
    int lost = -1;  // and not told yet
    while (true) {
        // The next few that have not ended: whoever goes has somebody before it who sees that, and
        // one word in the header reaches all.
        std::array<pollfd, wards + 1> waits{{{stop_read_, POLLIN, 0}}};
        std::array<std::size_t, wards> watched{};
        std::size_t count = 0;
        for (std::size_t turn = 0; turn < pipes_.size() && count < wards; ++turn) {
            const std::size_t index = (next_ + turn) % pipes_.size();
            if (pipes_[index] < 0) continue;
            watched[count++] = index;
            waits[count] = {pipes_[index], POLLIN, 0};
        }
        poll(waits.data(), nfds_t(count + 1), lost < 0 ? heartbeat_ms : 1);
        if (waits[0].revents != 0) return;
        for (std::size_t at = 0; at < count; ++at) {
            const std::size_t index = watched[at];
            if (waits[at + 1].revents == 0) continue;
            ::close(pipes_[index]);
            pipes_[index] = -1;
            // A rank that ends before it has begun is as lost as any other. Everybody who sees it
            // says so: who saw it first may be lost too.
            const int gone = int(index);
            if (rank(gone).life.load() == Life::left || lose(gone, "")) continue;
            rank(gone).life.store(Life::dead);
            if (lost < 0) lost = gone;
        }
        // Nobody is waited for here: whoever is about to tell may die of it, and only this thread sees.
        const int finder = speaker_;
        if (lost >= 0 && tell(Trouble::lost, lost, finder < 0 ? lost : finder, 0, 0, "")) {
            ring_all();
            lost = -1;
        }
        const std::lock_guard guard(mutex_);
        for (int mine : local_) rank(mine).heartbeat.store(now_ns(), std::memory_order_relaxed);
    }
}

// As much of it as there is room for.
template <std::size_t room>
static void put_text(std::array<char, room>& place, const std::string& text) {
    const std::size_t length = std::min(text.size(), room - 1);
    std::memcpy(place.data(), text.data(), length);
    place[length] = 0;
}

// Only one may write what happened. It may die before it has: then the next who knows of trouble does.
bool World::claim_trouble() {
    const std::uint32_t mine = claimant();
    std::uint32_t holder = 0;
    if (header_->trouble_claimed.compare_exchange_strong(holder, mine)) return true;
    const bool silenced =
        holder != no_rank && rank(int(holder) - 1).life.load() == Life::dead && !troubled();
    return silenced && header_->trouble_claimed.compare_exchange_strong(holder, mine);
}

bool World::stopped(int rank) {
    const RankInfo& info = this->rank(rank);
    const Life life = info.life.load();  // who has left has no heartbeat either
    const std::int64_t beat = info.heartbeat.load(std::memory_order_relaxed);
    return (life == Life::alive || life == Life::ended) && beat != 0 &&
           now_ns() - beat > 5 * std::int64_t{heartbeat_ms} * 1'000'000;
}

// Judged when a wait times out and by one: a rank that goes on later is no witness of its own stop. All
// are, since whom all wait for in the end need not be whom the first to give up waits for.
void World::note_stopped(int finder) {
    for (int other = 0; other < size(); ++other)
        if (other != finder && stopped(other)) rank(other).stood_still = true;
}

bool World::tell(Trouble kind, int culprit, int finder, std::uint64_t group, std::uint64_t call,
                 const std::string& text) {
    if (troubled()) return true;
    if (!claim_trouble()) return false;
    kill_point();
    header_->culprit = std::uint32_t(culprit);
    header_->finder = std::uint32_t(finder);
    header_->group = group;
    header_->call = call;
    if (kind == Trouble::timeout) note_stopped(finder);
    put_text(header_->text, text);
    header_->trouble.store(kind, std::memory_order_release);
    kill_point();
    return true;
}

void World::ring_all() {
    for (int other = 0; other < size(); ++other) rank(other).bell.ring();
}

void World::set_raised(int rank, const std::string& text) { put_text(this->rank(rank).raised, text); }

bool World::lose(int rank, const std::string& why) {
    RankInfo& info = this->rank(rank);
    // Who dies with the arena's lock leaves nobody knows what.
    const bool holds = header_->lock.load() == std::uint32_t(rank) + 1;
    if (info.loss.load() == Loss::ends || holds || troubled()) return false;
    if (!why.empty()) put_text(info.why, why);
    if (info.life.exchange(Life::dead) != Life::dead) ++header_->losses;
    ring_all();
    return true;
}

void World::fail(Trouble kind, int culprit, int finder, std::uint64_t group, std::uint64_t call,
                 const std::string& text) {
    if (kind == Trouble::failed && lose(culprit, text)) return;
    // Who comes second returns when the first has told, so that the reason is there for both. If that
    // one dies, a watcher sees it within a moment; only one that is stopped right there is given up.
    const std::int64_t limit = now_ns() + told_within_ns;
    while (!tell(kind, culprit, finder, group, call, text) && now_ns() < limit) sched_yield();
    ring_all();
}

std::string in_seconds(std::int64_t ns) {
    std::array<char, 32> text{};
    std::snprintf(text.data(), text.size(), "%g", double(ns) / 1e9);
    return text.data();
}

Waiting::Waiting(World& world, int rank, Wait wait) : world_(world), rank_(world.rank(rank)) {
    while (place_ < wait_count && rank_.waits_taken[place_].exchange(true)) ++place_;
    if (place_ < wait_count) rank_.waits[place_].put(wait);
}

Waiting::~Waiting() {
    if (place_ == wait_count || world_.troubled()) return;
    rank_.waits[place_].clear();
    rank_.waits_taken[place_] = false;
}

}  // namespace roundelay
