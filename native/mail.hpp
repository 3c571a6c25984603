// Messages from one rank to another: one ring of bytes per ordered pair, matched by group and tag.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "group.hpp"
#include "world.hpp"

namespace roundelay {

constexpr int any_rank = -1;
constexpr std::int64_t any_tag = INT64_MIN;

struct Envelope {
    std::uint64_t group;
    std::int64_t tag;
    std::uint64_t bytes;
    std::uint64_t dtype;
};

// One send or receive under way. Ranks are world ranks.
struct Letter {
    bool sends = false;
    std::atomic<int> other{any_rank};  // dst, or src; filled in for a receive from any
    Envelope envelope{};
    std::byte* data = nullptr;
    std::size_t moved = 0;
    bool opened = false;            // the envelope has been sent
    std::atomic<bool> done{false};
    Envelope found{};               // receive: what really came
};

class Mailbox {
   public:
    Mailbox(std::shared_ptr<World> world, int rank);
    ~Mailbox();

    void post(const std::shared_ptr<Letter>& letter);
    // Move what can be moved; true if anything did.
    bool pump();
    // Until the letter is done; throws Broken.
    void wait(Letter& letter, std::int64_t timeout_ns, Waiter& waiter);
    // No letter moves in the background any more.
    void stop();
    // From now on letters move without anybody waiting for them.
    void run_in_background();
    int rank() const { return rank_; }
    World& world() { return *world_; }

   private:
    struct Ring {
        alignas(64) std::atomic<std::uint64_t> written;
        alignas(64) std::atomic<std::uint64_t> read;
        alignas(64) std::byte bytes[1];
    };
    struct Parcel {  // a message on its way in
        int src;
        Envelope envelope;
        std::vector<std::byte> held;
        std::shared_ptr<Letter> letter;  // once somebody wants it
        std::size_t moved = 0;
        bool whole() const { return moved == envelope.bytes; }
    };
    // Made by the first message from one to the other; null before.
    Ring* ring(int src, int dst);
    std::atomic<std::uint64_t>& ring_at(int src, int dst);
    void open_ring(int dst);
    bool push(Letter& letter);
    bool pull(int src);
    bool matches(const Letter& letter, const Parcel& parcel) const;
    void hand_over(Parcel& parcel);
    int gone(const Letter& letter) const;

    std::shared_ptr<World> world_;
    int rank_;
    std::size_t capacity_;
    std::mutex opening_;
    std::mutex mutex_;
    std::vector<std::deque<std::shared_ptr<Letter>>> outgoing_;  // by dst
    std::list<std::shared_ptr<Letter>> wanted_;
    std::vector<std::unique_ptr<Parcel>> arriving_;  // by src
    std::list<std::unique_ptr<Parcel>> waiting_;     // whole, and nobody wants them yet
    std::thread thread_;
    std::atomic<bool> stop_{false};
};

}  // namespace roundelay
