#include "mail.hpp"

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

Mailbox::Mailbox(std::shared_ptr<World> world, int rank)
    : world_(std::move(world)),
      rank_(rank),
      capacity_(world_->header().mail_bytes - 256),
      outgoing_(std::size_t(world_->size())),
      arriving_(std::size_t(world_->size())) {}

std::atomic<std::uint64_t>& Mailbox::ring_at(int src, int dst) {
    const std::size_t pair = std::size_t(src) * std::size_t(world_->size()) + std::size_t(dst);
    return world_->at<std::atomic<std::uint64_t>>(world_->header().mail_at)[pair];
}

Mailbox::Ring* Mailbox::ring(int src, int dst) {
    const std::uint64_t at = ring_at(src, dst).load(std::memory_order_acquire);
    return at == 0 ? nullptr : world_->at<Ring>(at);
}

void Mailbox::open_ring(int dst) {
    const std::lock_guard guard(opening_);
    std::atomic<std::uint64_t>& at = ring_at(rank_, dst);
    if (at.load(std::memory_order_relaxed) == 0)
        at.store(world_->allocate(world_->header().mail_bytes), std::memory_order_release);
}

void Mailbox::post(const std::shared_ptr<Letter>& letter) {
    kill_point();
    if (letter->sends) open_ring(letter->other);
    const std::lock_guard guard(mutex_);
    if (letter->sends) {
        outgoing_[std::size_t(letter->other)].push_back(letter);
        return;
    }
    // What came first is taken first, whether it is whole yet or not.
    for (auto at = waiting_.begin(); at != waiting_.end(); ++at) {
        Parcel& parcel = **at;
        if (matches(*letter, parcel)) {
            parcel.letter = letter;
            hand_over(parcel);
            waiting_.erase(at);
            return;
        }
    }
    for (auto& parcel : arriving_) {
        if (parcel != nullptr && parcel->letter == nullptr && matches(*letter, *parcel)) {
            parcel->letter = letter;
            return;
        }
    }
    wanted_.push_back(letter);
}

bool Mailbox::matches(const Letter& letter, const Parcel& parcel) const {
    return (letter.other == any_rank || letter.other == parcel.src) &&
           letter.envelope.group == parcel.envelope.group &&
           (letter.envelope.tag == parcel.envelope.tag ||
            (letter.envelope.tag == any_tag && parcel.envelope.tag < inner_tags));
}

void Mailbox::hand_over(Parcel& parcel) {
    Letter& letter = *parcel.letter;
    letter.other = parcel.src;
    letter.found = parcel.envelope;
    // A message of another size or dtype is not squeezed in: the receiver is told.
    if (letter.envelope.bytes == parcel.envelope.bytes &&
        letter.envelope.dtype == parcel.envelope.dtype && !parcel.held.empty())
        std::memcpy(letter.data, parcel.held.data(), parcel.held.size());
    letter.done.store(true, std::memory_order_release);
}

bool Mailbox::push(Letter& letter) {
    Ring& out = *ring(rank_, letter.other);
    const std::uint64_t written = out.written.load(std::memory_order_relaxed);
    std::size_t room = capacity_ - std::size_t(written - out.read.load(std::memory_order_acquire));
    std::uint64_t at = written;
    if (!letter.opened) {
        if (room < sizeof(Envelope)) return false;
        copy_in(out.bytes, capacity_, at, &letter.envelope, sizeof(Envelope));
        at += sizeof(Envelope);
        room -= sizeof(Envelope);
        letter.opened = true;
    }
    const std::size_t bytes = std::min(room, std::size_t(letter.envelope.bytes) - letter.moved);
    copy_in(out.bytes, capacity_, at, letter.data + letter.moved, bytes);
    letter.moved += bytes;
    at += bytes;
    if (at == written) return false;
    kill_point();  // written, and not yet to be seen
    out.written.store(at, std::memory_order_release);
    kill_point();  // to be seen, and nobody told
    world_->rank(letter.other).bell.ring();
    if (letter.moved == letter.envelope.bytes) letter.done.store(true, std::memory_order_release);
    return true;
}

bool Mailbox::pull(int src) {
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
                    slot->letter = *wish;
                    wanted_.erase(wish);
                    break;
                }
            }
        }
        Parcel& parcel = *slot;
        const bool fits = parcel.letter != nullptr && parcel.held.empty() &&
                          parcel.letter->envelope.bytes == parcel.envelope.bytes &&
                          parcel.letter->envelope.dtype == parcel.envelope.dtype;
        if (!fits) parcel.held.resize(parcel.envelope.bytes);
        std::byte* to = fits ? parcel.letter->data : parcel.held.data();
        const std::size_t bytes = std::min(ready, std::size_t(parcel.envelope.bytes) - parcel.moved);
        copy_out(in.bytes, capacity_, at, to + parcel.moved, bytes);
        parcel.moved += bytes;
        at += bytes;
        ready -= bytes;
        if (!parcel.whole()) break;
        if (parcel.letter != nullptr)
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

bool Mailbox::pump() {
    const std::lock_guard guard(mutex_);
    bool moved = false;
    for (auto& letters : outgoing_) {
        while (!letters.empty() && push(*letters.front())) {
            moved = true;
            if (!letters.front()->done) break;
            letters.pop_front();
        }
    }
    for (int src = 0; src < world_->size(); ++src) moved = pull(src) || moved;
    return moved;
}

// The rank without which this letter will never be done; for any rank, the last of all others.
int Mailbox::gone(const Letter& letter, const Group& group) const {
    if (letter.other != any_rank) return group.gone(letter.other) ? letter.other.load() : -1;
    int found = -1;
    for (int rank = 0; rank < world_->size(); ++rank) {
        if (rank == rank_ || !group.holds(rank)) continue;
        if (!group.gone(rank)) return -1;
        found = rank;
    }
    return found;
}

bool Mailbox::settled(Letter& letter, const Group& group) {
    return letter.done || world_->troubled() ||
           (gone(letter, group) >= 0 && (!pump() || letter.done));
}

void Mailbox::fail(Trouble kind, int culprit, const Group& group, const char* text) {
    world_->fail(kind, culprit, rank_, group.at(), 0, text);
    throw Broken{};
}

std::vector<Mailbox::Left> Mailbox::left_over() {
    pump();
    const std::lock_guard guard(mutex_);
    std::vector<Left> found = cancelled_;
    for (const auto& parcel : waiting_) found.push_back({true, parcel->src, parcel->envelope, 0});
    for (const auto& parcel : arriving_)
        if (parcel != nullptr) found.push_back({true, parcel->src, parcel->envelope, 0});
    return found;
}

void Mailbox::wait(Letter& letter, const Group& group, std::int64_t timeout_ns, Waiter& waiter) {
    RankInfo& mine = world_->rank(rank_);
    std::int64_t start = 0;
    std::optional<Waiting> shown;
    for (int idle = 0; !letter.done.load(std::memory_order_acquire); ++idle) {
        const std::uint32_t seen = mine.bell.value.load();
        if (pump()) idle = 0;
        if (letter.done.load(std::memory_order_acquire)) return;
        if (world_->troubled()) throw Broken{};
        if (idle < 64) {
            cpu_pause();
            continue;
        }
        if (start == 0) {
            start = now_ns();
            waiter.blocks();
            shown.emplace(*world_, rank_,
                          Wait{.since = start, .group = group.at(), .call = 0,
                               .tag = letter.envelope.tag, .other = letter.other,
                               .site = letter.site, .kind = letter.sends ? Waits::send : Waits::recv});
        }
        if (idle < 128) {
            sched_yield();
            continue;
        }
        kill_point();
        const bool closing = !letter.sends && group.told(rank_, Stage::quiet);
        if (closing && cancel_if_nobody(letter, group)) return;
        const int missing = closing ? -1 : gone(letter, group);
        if (missing >= 0 && !pump() && !letter.done) {
            // Who closed did not mean to be needed any more; a script may have been ended.
            const bool left = world_->rank(missing).life.load() == Life::left;
            if (group.ended(missing) && !left) fail(Trouble::mismatch, missing, group, "");
            fail(Trouble::lost, missing, group, group.going(missing));
        }
        mine.bell.sleep(seen, nap_ns);
        const std::int64_t waited = now_ns() - start;
        const bool on = waiter.goes_on(letter.other, waited);
        if (world_->foreign()) throw Broken{};  // forked by a signal handler: it is no rank
        if (!on) fail(Trouble::interrupted, rank_, group, "");
        if (waited > timeout_ns && !letter.done) {
            if (closing && cancel(letter, Fate::late)) return;
            // From any rank: nobody in particular is late.
            const int culprit = letter.other == any_rank ? rank_ : letter.other.load();
            fail(Trouble::timeout, culprit, group, "");
        }
    }
}

std::shared_ptr<Letter> Mailbox::under_way(bool sends, std::uint64_t number) {
    const auto of_it = [&](const std::shared_ptr<Letter>& letter) {
        return letter != nullptr && (number == every || letter->envelope.group == number);
    };
    const std::lock_guard guard(mutex_);
    if (sends) {
        for (const auto& letters : outgoing_)
            for (const auto& letter : letters)
                if (of_it(letter)) return letter;
        return nullptr;
    }
    for (const auto& letter : wanted_)
        if (of_it(letter)) return letter;
    for (const auto& parcel : arriving_)
        if (parcel != nullptr && of_it(parcel->letter)) return parcel->letter;
    return nullptr;
}

void Mailbox::drain(Group& group, std::uint64_t number, std::int64_t timeout_ns, Waiter& waiter) {
    while (const auto letter = under_way(true, number)) wait(*letter, group, timeout_ns, waiter);
    group.tell(Stage::quiet);
    while (const auto letter = under_way(false, number)) wait(*letter, group, timeout_ns, waiter);
}

// A receipt that no message has come for; false if one has.
bool Mailbox::cancel(Letter& letter, Fate fate) {
    const std::lock_guard guard(mutex_);
    const auto same = [&](const auto& wish) { return wish.get() == &letter; };
    const auto found = std::ranges::find_if(wanted_, same);
    if (found == wanted_.end()) return false;
    const auto kept = *found;
    wanted_.erase(found);
    cancelled_.push_back({false, letter.other, letter.envelope, letter.site});
    letter.fate = fate;
    letter.done = true;
    world_->rank(rank_).bell.ring();  // another thread may wait for it
    return true;
}

// Who is quiet has nothing more to send: what did come lies in the rings by now.
bool Mailbox::cancel_if_nobody(Letter& letter, const Group& group) {
    const auto quiet = [&](int rank) {
        return world_->rank(rank).life.load() == Life::left || group.told(rank, Stage::quiet);
    };
    for (int rank = 0; rank < world_->size(); ++rank)
        if ((letter.other == any_rank || letter.other == rank) && !quiet(rank)) return false;
    return !pump() && cancel(letter, Fate::nobody);
}

void Mailbox::forget(bool waits) {
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
void Mailbox::give_up() {
    const auto end = [](const std::shared_ptr<Letter>& letter) {
        if (letter == nullptr || letter->done) return;
        letter->fate = Fate::broken;
        letter->done = true;
    };
    for (auto& letters : outgoing_) {
        std::ranges::for_each(letters, end);
        letters.clear();
    }
    std::ranges::for_each(wanted_, end);
    wanted_.clear();
    for (auto& parcel : arriving_) {
        if (parcel == nullptr) continue;
        end(parcel->letter);
        parcel = nullptr;
    }
}

void Mailbox::run_in_background() {
    const std::lock_guard guard(mutex_);
    if (thread_.joinable()) return;
    const auto see_to_it = [self = shared_from_this()] {
        pthread_setname_np(pthread_self(), "roundelay-mail");
        Mailbox& box = *self;
        RankInfo& mine = box.world_->rank(box.rank_);
        const auto needed = [&] {
            if (box.under_way(true, every) || box.under_way(false, every)) return true;
            const std::lock_guard guarded(box.mutex_);
            return !box.forgotten_;
        };
        while (!box.world_->troubled() && needed()) {
            const std::uint32_t seen = mine.bell.value.load();
            kill_point();
            if (!box.pump()) mine.bell.sleep(seen, nap_ns);
        }
        const std::lock_guard guarded(box.mutex_);
        if (box.forgotten_) box.give_up();
    };
    thread_ = std::thread(see_to_it);
}

}  // namespace roundelay
