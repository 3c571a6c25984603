#include "registered.hpp"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>

#include "kill_point.hpp"

namespace roundelay {

namespace {

constexpr int readable = PROT_READ | PROT_WRITE;

std::size_t system_page() {
    static const auto bytes = std::size_t(sysconf(_SC_PAGESIZE));
    return bytes;
}

// All of this process, by address: an array has its pages in one arena, whatever groups there are.
struct Table {
    std::shared_mutex mutex;
    std::map<std::uintptr_t, std::shared_ptr<Registration>> by_address;
    std::atomic<std::size_t> count = 0;

    std::shared_ptr<Registration> overlapping(std::uintptr_t address, std::size_t bytes) const {
        auto next = by_address.lower_bound(address + bytes);
        if (next == by_address.begin()) return nullptr;
        const auto& last = std::prev(next)->second;
        return last->address() + last->bytes() > address ? last : nullptr;
    }
};

// Never destroyed: arrays go while the process ends. A forked child has one of its own: it makes no
// calls, and a lock that another thread held would stay locked.
Table* table = new Table;
void after_fork() { table = new Table; }

// A waiter can't be moved from a futex to itself: the kernel compares where the two words lie before it
// does anything, and one page at two addresses is one word. Nobody waits on either.
bool same_page(const void* one, const void* other) {
    const long done = syscall(SYS_futex, one, FUTEX_CMP_REQUEUE_PI, 1, 0L, other, 0);
    return done < 0 && errno == EINVAL;
}

bool probe() {
    const int fd = memfd_create("roundelay-probe", MFD_CLOEXEC);
    if (fd < 0) return false;
    const std::size_t page = system_page();
    void* places[2] = {MAP_FAILED, MAP_FAILED};
    bool tells = ftruncate(fd, off_t(2 * page)) == 0;
    for (void*& place : places)
        place = mmap(nullptr, 2 * page, readable, MAP_SHARED, fd, 0);
    tells = tells && places[0] != MAP_FAILED && places[1] != MAP_FAILED &&
            same_page(places[0], places[1]) &&
            !same_page(places[0], static_cast<std::byte*>(places[1]) + page);
    for (void* place : places)
        if (place != MAP_FAILED) munmap(place, 2 * page);
    ::close(fd);
    return tells;
}

}  // namespace

bool Registration::can_look() {
    static const bool tells = probe();
    return tells;
}

// The array lies in the block as it lies in its pages, so that whole ones can be mapped.
std::size_t Registration::room(std::size_t bytes) { return bytes + 2 * system_page(); }

std::shared_ptr<Registration> Registration::make(std::shared_ptr<World> world,
                                                 std::shared_ptr<Block> block,
                                                 std::uintptr_t address, std::size_t bytes,
                                                 std::uintptr_t storage) {
    static const int once = pthread_atfork(nullptr, nullptr, after_fork);
    (void)once;
    if (world->foreign()) throw Broken{};
    kill_point();
    const std::unique_lock guard(table->mutex);
    if (auto found = table->overlapping(address, bytes)) {
        if (found->intact()) return found;
        // Its memory went unheard of, and this array has got the same addresses.
        table->by_address.erase(found->address());
        --table->count;
    }
    auto made = std::make_shared<Registration>(std::move(world), std::move(block), address, bytes,
                                               storage);
    table->by_address[address] = made;
    ++table->count;
    return made;
}

std::shared_ptr<Registration> Registration::find(std::uintptr_t address, std::size_t bytes) {
    const std::shared_lock guard(table->mutex);
    auto found = table->overlapping(address, bytes);
    return found != nullptr && found->holds(address, bytes) && found->intact() ? found : nullptr;
}

Registration::Registration(std::shared_ptr<World> world, std::shared_ptr<Block> block,
                           std::uintptr_t address, std::size_t bytes,
                           std::uintptr_t storage)
    : world_(std::move(world)),
      block_(std::move(block)),
      address_(address),
      bytes_(bytes),
      storage_(storage),
      inner_(round_up(address, system_page())),
      outer_((address + bytes) / system_page() * system_page()) {
    const std::size_t page = system_page();
    const std::uint64_t start = round_up(block_->at(), page) + address % page;
    first_ = world_->at<std::byte>(start);
    const std::size_t length = outer_ - inner_;
    auto* pages = reinterpret_cast<std::byte*>(inner_);
    std::memcpy(in_arena(inner_), pages, length);
    kill_point();
    const off_t offset = off_t(start + (inner_ - address_));
    void* mapped = mmap(pages, length, readable, MAP_SHARED | MAP_FIXED | MAP_POPULATE, world_->fd(),
                        offset);
    if (mapped == MAP_FAILED)
        throw OutOfMemory("mmap of " + std::to_string(length) + " bytes: " + std::strerror(errno));
    kill_point();
}

// Who still has its pages in the arena keeps them there, for good: nobody else may get them.
Registration::~Registration() {
    if (block_ != nullptr && !released_) new std::shared_ptr<Block>(std::move(block_));
}

bool Registration::same(std::uintptr_t page) const {
    return !can_look() || same_page(reinterpret_cast<const void*>(page), in_arena(page));
}

bool Registration::intact() const {
    return !released_ && same(inner_) && same(outer_ - system_page());
}

bool Registration::release() {
    if (released_) return true;
    if (world_->foreign()) {  // a child takes no lock
        released_ = true;
        put_back();
        return true;
    }
    std::shared_ptr<World> gone;  // after the lock is: the last to have it waits for its threads
    {
        const std::unique_lock guard(table->mutex);
        if (released_) return true;
        if (calls_ > 0) return false;
        if (!put_back())
            throw OutOfMemory("no pages for " + std::to_string(bytes_) +
                              " bytes: " + std::strerror(errno));
        released_ = true;
        const auto found = table->by_address.find(address_);
        if (found != table->by_address.end() && found->second.get() == this) {
            table->by_address.erase(found);
            --table->count;
        }
    }
    block_.reset();
    gone = std::move(world_);
    return true;
}

bool Registration::put_back() {
    const std::size_t length = outer_ - inner_;
    auto* pages = reinterpret_cast<std::byte*>(inner_);
    if (!same(inner_) || !same(outer_ - system_page())) return true;  // they are somebody else's
    void* own = mmap(nullptr, length, readable, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (own == MAP_FAILED) return false;
    std::memcpy(own, pages, length);
    if (mremap(own, length, length, MREMAP_MAYMOVE | MREMAP_FIXED, pages) != MAP_FAILED) return true;
    munmap(own, length);
    return false;
}

std::byte* CallBuffers::Use::begin(World& world, const std::byte* data, const Extent& extent) {
    at = reinterpret_cast<std::uintptr_t>(data);
    bytes = extent.bytes;
    {
        const std::shared_lock guard(table->mutex);
        auto found = table->overlapping(at, bytes);
        if (found == nullptr || !found->in(world) || !found->holds(at, bytes)) return nullptr;
        if (found->storage_ != 0 && found->storage_ != extent.storage) {
            const std::size_t page = system_page();
            const std::uintptr_t last = (at + bytes - 1) / page * page;
            if (!found->same(std::clamp(at / page * page, found->inner_, found->outer_ - page)) ||
                !found->same(std::clamp(last, found->inner_, found->outer_ - page)))
                return nullptr;
        }
        ++found->calls_;
        of = std::move(found);
    }
    copy_edges(true);
    return of->in_arena(at);
}

// Only the bytes of the buffer: beside them may lie another's, in a call of its own.
void CallBuffers::Use::copy_edges(bool into_arena) const {
    const auto copy = [&](std::uintptr_t from, std::uintptr_t to) {
        if (from >= to) return;
        auto* here = reinterpret_cast<std::byte*>(from);
        std::byte* there = of->in_arena(from);
        std::memcpy(into_arena ? there : here, into_arena ? here : there, to - from);
    };
    copy(at, std::min(at + bytes, of->inner_));
    copy(std::max(at, of->outer_), at + bytes);
}

void CallBuffers::Use::end() {
    if (of != nullptr) --of->calls_;
}

CallBuffers::CallBuffers(World& world, Call& call, const Extent& in, const Extent& out) {
    if (table->count.load(std::memory_order_acquire) == 0) return;
    const bool one = call.in == call.out && in.bytes == out.bytes;
    std::byte* to = out.bytes == 0 ? nullptr : out_.begin(world, call.out, out);
    if (to != nullptr) call.out = to;
    const std::byte* from =
        one ? to : in.bytes == 0 ? nullptr : in_.begin(world, call.in, in);
    if (from != nullptr) call.in = from;
}

CallBuffers::~CallBuffers() {
    if (out_.of != nullptr) out_.copy_edges(false);
    in_.end();
    out_.end();
}

}  // namespace roundelay
