#include "point_to_point.hpp"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <thread>

#include "kill_point.hpp"

namespace roundelay {

namespace {

constexpr std::int64_t nap_ns = 50'000'000;
constexpr int patience = 64;  // turns in which a thread gives its core to others before it sleeps

// Copy between a flat buffer and a ring, which may wrap around once.
void copy_in(std::byte* ring, std::size_t capacity, std::uint64_t at, const void* from,
             std::size_t bytes) {
    if (bytes == 0) return;  // an empty message may lie nowhere
    const std::size_t start = at % capacity, head = std::min(bytes, capacity - start);
    std::memcpy(ring + start, from, head);
    std::memcpy(ring, static_cast<const std::byte*>(from) + head, bytes - head);
}

void copy_out(const std::byte* ring, std::size_t capacity, std::uint64_t at, void* to,
              std::size_t bytes) {
    if (bytes == 0) return;
    const std::size_t start = at % capacity, head = std::min(bytes, capacity - start);
    std::memcpy(to, ring + start, head);
    std::memcpy(static_cast<std::byte*>(to) + head, ring, bytes - head);
}

}  // namespace

PointToPoint::PointToPoint(std::shared_ptr<World> world, int rank)
    : world_(std::move(world)),
      rank_(rank),
      capacity_(world_->header().ring_bytes - 256),
      outgoing_(std::size_t(world_->size())),
      arriving_(std::size_t(world_->size())) {}

std::atomic<std::uint64_t>& PointToPoint::ring_at(int src, int dst) {
    const std::size_t pair = std::size_t(src) * std::size_t(world_->size()) + std::size_t(dst);
    return world_->at<std::atomic<std::uint64_t>>(world_->header().rings_at)[pair];
}

PointToPoint::Ring* PointToPoint::ring(int src, int dst) {
    const std::uint64_t at = ring_at(src, dst).load(std::memory_order_acquire);
    return at == 0 ? nullptr : world_->at<Ring>(at);
}

void PointToPoint::open_ring(int dst) {
    const std::lock_guard guard(opening_);
    std::atomic<std::uint64_t>& at = ring_at(rank_, dst);
    if (at.load(std::memory_order_relaxed) == 0)
        at.store(world_->allocate(world_->header().ring_bytes), std::memory_order_release);
}

void PointToPoint::post(const std::shared_ptr<MessageRequest>& request) {
    kill_point();
    if (request->sends) open_ring(request->other);
    const std::lock_guard guard(mutex_);
    if (request->sends) {
        outgoing_[std::size_t(request->other)].push_back(request);
        return;
    }
    // What came first is taken first, whether it is whole yet or not.
    for (auto at = waiting_.begin(); at != waiting_.end(); ++at) {
        Parcel& parcel = **at;
        if (matches(*request, parcel)) {
            parcel.request = request;
            hand_over(parcel);
            waiting_.erase(at);
            return;
        }
    }
    for (auto& parcel : arriving_) {
        if (parcel != nullptr && parcel->request == nullptr && matches(*request, *parcel)) {
            parcel->request = request;
            return;
        }
    }
    wanted_.push_back(request);
}

bool PointToPoint::matches(const MessageRequest& request, const Parcel& parcel) const {
    return (request.other == any_rank || request.other == parcel.src) &&
           request.envelope.group == parcel.envelope.group &&
           (request.envelope.tag == parcel.envelope.tag ||
            (request.envelope.tag == any_tag && parcel.envelope.tag < inner_tags));
}

void PointToPoint::hand_over(Parcel& parcel) {
    MessageRequest& request = *parcel.request;
    request.other = parcel.src;
    request.found = parcel.envelope;
    // A message of another size or dtype is not squeezed in: the receiver is told.
    if (request.envelope.bytes == parcel.envelope.bytes &&
        request.envelope.dtype == parcel.envelope.dtype && !parcel.held.empty())
        std::memcpy(request.data, parcel.held.data(), parcel.held.size());
    request.done.store(true, std::memory_order_release);
}

bool PointToPoint::push(MessageRequest& request) {
    Ring& out = *ring(rank_, request.other);
    const std::uint64_t written = out.written.load(std::memory_order_relaxed);
    std::size_t room = capacity_ - std::size_t(written - out.read.load(std::memory_order_acquire));
    std::uint64_t at = written;
    if (!request.opened) {
        if (room < sizeof(Envelope)) return false;
        copy_in(out.bytes, capacity_, at, &request.envelope, sizeof(Envelope));
        at += sizeof(Envelope);
        room -= sizeof(Envelope);
        request.opened = true;
    }
    const std::size_t bytes = std::min(room, std::size_t(request.envelope.bytes) - request.moved);
    copy_in(out.bytes, capacity_, at, request.data + request.moved, bytes);
    request.moved += bytes;
    at += bytes;
    if (at == written) return false;
    kill_point();  // written, and not yet to be seen
    out.written.store(at, std::memory_order_release);
    kill_point();  // to be seen, and nobody told
    world_->rank(request.other).bell.ring();
    if (request.moved == request.envelope.bytes) request.done.store(true, std::memory_order_release);
    return true;
}

bool PointToPoint::pull(int src) {
    Ring* from = ring(src, rank_);
    if (from == nullptr) return false;
    Ring& in = *from;
    const std::uint64_t read = in.read.load(std::memory_order_relaxed);
    std::size_t ready = std::size_t(in.written.load(std::memory_order_acquire) - read);
    std::uint64_t at = read;
    std::unique_ptr<Parcel>& slot = arriving_[std::size_t(src)];
    while (ready > 0 || (slot != nullptr && slot->whole())) {
        if (slot == nullptr) {
            if (ready < sizeof(Envelope)) break;
            slot = std::make_unique<Parcel>();
            slot->src = src;
            copy_out(in.bytes, capacity_, at, &slot->envelope, sizeof(Envelope));
            at += sizeof(Envelope);
            ready -= sizeof(Envelope);
            kill_point();  // opened, and nothing of it taken
            for (auto wish = wanted_.begin(); wish != wanted_.end(); ++wish) {
                if (matches(**wish, *slot)) {
                    slot->request = *wish;
                    wanted_.erase(wish);
                    break;
                }
            }
        }
        Parcel& parcel = *slot;
        const bool fits = parcel.request != nullptr && parcel.held.empty() &&
                          parcel.request->envelope.bytes == parcel.envelope.bytes &&
                          parcel.request->envelope.dtype == parcel.envelope.dtype;
        if (!fits) parcel.held.resize(parcel.envelope.bytes);
        std::byte* to = fits ? parcel.request->data : parcel.held.data();
        const std::size_t bytes = std::min(ready, std::size_t(parcel.envelope.bytes) - parcel.moved);
        copy_out(in.bytes, capacity_, at, to + parcel.moved, bytes);
        parcel.moved += bytes;
        at += bytes;
        ready -= bytes;
        if (!parcel.whole()) break;
        if (parcel.request != nullptr)
            hand_over(parcel);
        else
            waiting_.push_back(std::move(slot));
        slot = nullptr;
    }
    if (at == read) return false;
    kill_point();  // taken, and its room not yet given back
    in.read.store(at, std::memory_order_release);
    kill_point();  // given back, and nobody told
    world_->rank(src).bell.ring();
    return true;
}

bool PointToPoint::pump() {
    const std::lock_guard guard(mutex_);
    bool moved = false;
    for (auto& requests : outgoing_) {
        while (!requests.empty() && push(*requests.front())) {
            moved = true;
            if (!requests.front()->done) break;
            requests.pop_front();
        }
    }
    for (int src = 0; src < world_->size(); ++src) moved = pull(src) || moved;
    return moved;
}

// Whether part of a message has moved, and the rest has not.
bool PointToPoint::half_way() {
    const std::lock_guard guard(mutex_);
    const auto begun = [](const auto& requests) { return !requests.empty() && requests.front()->moved > 0; };
    return std::ranges::any_of(outgoing_, begun) ||
           std::ranges::any_of(arriving_, [](const auto& parcel) { return parcel != nullptr; });
}

// Whether none that could bring it was last seen on this core: then waiting here is in nobody's way.
bool PointToPoint::apart(const MessageRequest& request, const Group& group) {
    const int here = sched_getcpu() + 1;
    world_->rank(rank_).core.store(here, std::memory_order_relaxed);
    for (int rank = 0; rank < world_->size(); ++rank) {
        const bool concerned = request.other == any_rank ? group.holds(rank) : request.other == rank;
        const int there = world_->rank(rank).core.load(std::memory_order_relaxed);
        if (rank != rank_ && concerned && there == here) return false;
    }
    return true;
}

// The rank without which this request will never be done; for any rank, the last of all others.
int PointToPoint::gone(const MessageRequest& request, const Group& group) const {
    if (request.other != any_rank) return group.gone(request.other) ? request.other.load() : -1;
    int found = -1;
    for (int rank = 0; rank < world_->size(); ++rank) {
        if (rank == rank_ || !group.holds(rank)) continue;
        if (!group.gone(rank)) return -1;
        found = rank;
    }
    return found;
}

bool PointToPoint::settled(MessageRequest& request, const Group& group) {
    return request.done || world_->troubled() ||
           (gone(request, group) >= 0 && (!pump() || request.done));
}

void PointToPoint::fail(Trouble kind, int culprit, const Group& group, const std::string& text) {
    world_->fail(kind, culprit, rank_, group.at(), 0, text);
    throw Broken{};
}

std::vector<PointToPoint::Left> PointToPoint::left_over() {
    pump();
    const std::lock_guard guard(mutex_);
    std::vector<Left> found = cancelled_;
    for (const auto& parcel : waiting_) found.push_back({true, parcel->src, parcel->envelope, 0});
    for (const auto& parcel : arriving_)
        if (parcel != nullptr) found.push_back({true, parcel->src, parcel->envelope, 0});
    return found;
}

void PointToPoint::wait(MessageRequest& request, const Group& group, std::int64_t timeout_ns,
                        Waiter& waiter,
                   std::int64_t losses) {
    RankInfo& mine = world_->rank(rank_);
    std::int64_t start = 0, spin = 0;
    std::optional<Waiting> shown;
    for (int idle = 0; !request.done.load(std::memory_order_acquire); ++idle) {
        const std::uint32_t seen = mine.bell.value.load();
        if (pump()) idle = 0;
        if (request.done.load(std::memory_order_acquire)) return;
        if (world_->troubled()) throw Broken{};
        if (losses != deaf && losses != world_->header().losses.load()) {
            part_with_dead();
            return;
        }
        if (idle < 64) {
            cpu_pause();
            continue;
        }
        if (start == 0) {
            start = now_ns();
            waiter.blocks();
            shown.emplace(*world_, rank_,
                          Wait{.since = start, .group = group.at(), .call = 0,
                               .tag = request.envelope.tag, .other = request.other,
                               .site = request.site, .kind = request.sends ? Waits::send : Waits::recv});
            // The same as in a collective: who sleeps is woken late, and often on the waker's core.
            if (apart(request, group) && waiter.may_spin()) spin = group.spin();
        }
        if (spin > 0 && now_ns() - start < spin) {
            for (int turn = 0; turn < 32 && mine.bell.value.load() == seen; ++turn) cpu_pause();
            continue;
        }
        if (spin == 0 && idle < 128) {
            sched_yield();
            continue;
        }
        kill_point();
        if (world_->header().losses.load() != 0) part_with_dead();
        const bool closing = !request.sends && group.told(rank_, Stage::quiet);
        if (closing && cancel_if_nobody(request, group)) return;
        const int missing = closing ? -1 : gone(request, group);
        // Who hears of losses knows by itself whether anybody is left, on its own rank perhaps.
        const bool known = losses != deaf && missing >= 0 && missing != request.other &&
                           world_->dead(missing);
        if (missing >= 0 && !known && !pump() && !request.done) {
            if (missing == request.other && world_->dead(missing)) return lose(request);
            if (group.tell_raised(missing, rank_)) throw Broken{};
            // Who closed did not mean to be needed any more; a script may have been ended.
            const bool left = world_->rank(missing).life.load() == Life::left;
            if (group.ended(missing) && !left) fail(Trouble::mismatch, missing, group, "");
            fail(Trouble::lost, missing, group, group.going(missing));
        }
        mine.bell.sleep(seen, nap_ns);
        const std::int64_t waited = now_ns() - start;
        const bool on = waiter.goes_on(request.other, waited);
        if (world_->foreign()) throw Broken{};  // forked by a signal handler: it is no rank
        if (!on) fail(Trouble::interrupted, rank_, group, "");
        if (waited > timeout_ns && !request.done) {
            if (closing && cancel(request, Fate::late)) return;
            // From any rank: nobody in particular is late.
            const int culprit = request.other == any_rank ? rank_ : request.other.load();
            fail(Trouble::timeout, culprit, group, in_seconds(timeout_ns));
        }
    }
}

std::shared_ptr<MessageRequest> PointToPoint::under_way(bool sends, std::uint64_t number) {
    const auto of_it = [&](const std::shared_ptr<MessageRequest>& request) {
        return request != nullptr && (number == every || request->envelope.group == number);
    };
    const std::lock_guard guard(mutex_);
    if (sends) {
        for (const auto& requests : outgoing_)
            for (const auto& request : requests)
                if (of_it(request)) return request;
        return nullptr;
    }
    for (const auto& request : wanted_)
        if (of_it(request)) return request;
    for (const auto& parcel : arriving_)
        if (parcel != nullptr && of_it(parcel->request)) return parcel->request;
    return nullptr;
}

void PointToPoint::drain(Group& group, std::uint64_t number, std::int64_t timeout_ns,
                         Waiter& waiter) {
    while (const auto request = under_way(true, number)) wait(*request, group, timeout_ns, waiter);
    group.tell(Stage::quiet);
    while (const auto request = under_way(false, number)) wait(*request, group, timeout_ns, waiter);
}

// A receipt that no message has come for; false if one has.
bool PointToPoint::cancel(MessageRequest& request, Fate fate) {
    const std::lock_guard guard(mutex_);
    const auto same = [&](const auto& wish) { return wish.get() == &request; };
    const auto found = std::ranges::find_if(wanted_, same);
    if (found == wanted_.end()) return false;
    const auto kept = *found;
    wanted_.erase(found);
    cancelled_.push_back({false, request.other, request.envelope, request.site});
    request.fate = fate;
    request.done = true;
    world_->rank(rank_).bell.ring();  // another thread may wait for it
    return true;
}

// Its other rank is dead, and the job goes on: nobody will ever take or bring it.
void PointToPoint::lose(MessageRequest& request) {
    const std::lock_guard guard(mutex_);
    const auto same = [&](const auto& one) { return one.get() == &request; };
    for (auto& requests : outgoing_) std::erase_if(requests, same);
    std::erase_if(wanted_, same);
    for (auto& parcel : arriving_)
        if (parcel != nullptr && same(parcel->request)) parcel = nullptr;
    if (request.done) return;
    request.fate = Fate::lost;
    request.done = true;
    world_->rank(rank_).bell.ring();  // another thread may wait for it
}

// Half a message of a rank that is dead: what waits for any rank's goes on waiting for another.
void PointToPoint::part_with_dead() {
    for (int src = 0; src < world_->size(); ++src) {
        if (!world_->dead(src)) continue;
        pump();  // what it had written comes first
        std::unique_ptr<Parcel> half;
        {
            const std::lock_guard guard(mutex_);
            const auto& slot = arriving_[std::size_t(src)];
            if (slot == nullptr || slot->request == nullptr || slot->request->other != any_rank) continue;
            half = std::move(arriving_[std::size_t(src)]);
        }
        post(half->request);
    }
}

// Who is quiet has nothing more to send: what did come lies in the rings by now.
bool PointToPoint::cancel_if_nobody(MessageRequest& request, const Group& group) {
    const auto quiet = [&](int rank) {
        return world_->rank(rank).life.load() == Life::left || world_->dead(rank) ||
               group.told(rank, Stage::quiet);
    };
    for (int rank = 0; rank < world_->size(); ++rank)
        if ((request.other == any_rank || request.other == rank) && !quiet(rank)) return false;
    return !pump() && cancel(request, Fate::nobody);
}

void PointToPoint::forget(bool waits) {
    std::thread thread;
    {
        const std::lock_guard guard(mutex_);
        forgotten_ = true;
        thread.swap(thread_);
        if (!thread.joinable() || world_->troubled()) give_up();
    }
    world_->rank(rank_).bell.ring();
    if (!thread.joinable()) return;
    if (waits)
        thread.join();
    else
        thread.detach();
}

// Under the mutex: nothing moves any more.
void PointToPoint::give_up() {
    const auto end = [](const std::shared_ptr<MessageRequest>& request) {
        if (request == nullptr || request->done) return;
        request->fate = Fate::broken;
        request->done = true;
    };
    for (auto& requests : outgoing_) {
        std::ranges::for_each(requests, end);
        requests.clear();
    }
    std::ranges::for_each(wanted_, end);
    wanted_.clear();
    for (auto& parcel : arriving_) {
        if (parcel == nullptr) continue;
        end(parcel->request);
        parcel = nullptr;
    }
}

void PointToPoint::run_in_background() {
    const std::lock_guard guard(mutex_);
    if (thread_.joinable()) return;
    const auto see_to_it = [self = shared_from_this()] {
        pthread_setname_np(pthread_self(), "roundelay-p2p");
        PointToPoint& messages = *self;
        RankInfo& mine = messages.world_->rank(messages.rank_);
        const auto needed = [&] {
            if (messages.under_way(true, every) || messages.under_way(false, every)) return true;
            const std::lock_guard guarded(messages.mutex_);
            return !messages.forgotten_;
        };
        int idle = 0;
        while (!messages.world_->troubled() && needed()) {
            const std::uint32_t seen = mine.bell.value.load();
            kill_point();
            if (messages.pump()) {
                idle = 0;
            } else if (idle < patience && messages.half_way()) {
                // The other rank moves the next piece: it is there sooner than a sleeper wakes.
                ++idle;
                sched_yield();
            } else {
                mine.bell.sleep(seen, nap_ns);
            }
        }
        const std::lock_guard guarded(messages.mutex_);
        if (messages.forgotten_) messages.give_up();
    };
    thread_ = std::thread(see_to_it);
}

}  // namespace roundelay
