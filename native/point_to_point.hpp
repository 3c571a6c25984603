// Messages from one rank to another: one ring of bytes per ordered pair, matched by group and tag.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
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
constexpr std::int64_t inner_tags = std::int64_t(1) << 62;  // and above: never taken by any_tag

struct Envelope {
    std::uint64_t group;
    std::int64_t tag;
    std::uint64_t bytes;
    std::uint64_t dtype;
};

// Why a request is done though it has not come: its group was closed, and whoever could have sent it had
// left, or did not in time; or the world broke, and nobody carries requests any more; or the other rank
// was lost, without which the job goes on.
enum class Fate : std::uint32_t { open, nobody, late, broken, lost };

// One send or receive under way. Ranks are world ranks.
struct MessageRequest {
    bool sends = false;
    std::atomic<int> other{any_rank};  // dst, or src; filled in for a receive from any
    Envelope envelope{};
    std::byte* data = nullptr;
    std::size_t moved = 0;
    bool opened = false;            // the envelope has been sent
    std::atomic<bool> done{false};
    std::atomic<Fate> fate{Fate::open};
    Envelope found{};               // receive: what really came
    std::atomic<std::uint32_t> site{0};  // the user's line, if it had to wait
};

// Its thread holds on to it: forgotten by everybody, it ends with the last request.
class PointToPoint : public std::enable_shared_from_this<PointToPoint> {
   public:
    static constexpr std::uint64_t every = ~std::uint64_t{0};  // group

    PointToPoint(std::shared_ptr<World> world, int rank);

    // The ring of messages to a rank, made by the first: that may have to wait for others.
    bool has_ring(int dst) { return ring(rank_, dst) != nullptr; }
    void open_ring(int dst);
    void post(const std::shared_ptr<MessageRequest>& request);
    // Move what can be moved; true if anything did.
    bool pump();
    bool half_way();
    // Until the request is done; throws Broken. The group tells who of it has left. Who knows of so many
    // losses, and would hear of more, waits no longer than until there are.
    static constexpr std::int64_t deaf = -1;
    void wait(MessageRequest& request, const Group& group, std::int64_t timeout_ns, Waiter& waiter,
              std::int64_t losses = deaf);
    // Whether waiting for the request would end at once.
    bool settled(MessageRequest& request, const Group& group);
    // The group closes: until no request of it is under way (`number` is its serial, or all).
    // Sends are waited for, then receipts, and those that nobody will ever send are cancelled.
    void drain(Group& group, std::uint64_t number, std::int64_t timeout_ns, Waiter& waiter);
    // Messages that came and nobody received, and receives for which nothing came.
    struct Left {
        bool sends;  // it was sent to this rank
        int other;
        Envelope envelope;
        std::uint32_t site;  // of the receive
    };
    std::vector<Left> left_over();
    // Nobody will post any more: the thread ends with what is under way, which is waited for or not. What
    // no thread carries is given up, so that its buffers are free.
    void forget(bool waits);
    // From now on requests move without anybody waiting for them.
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
        std::shared_ptr<MessageRequest> request;  // once somebody wants it
        std::size_t moved = 0;
        bool whole() const { return moved == envelope.bytes; }
    };
    // Made by the first message from one to the other; null before.
    Ring* ring(int src, int dst);
    std::atomic<std::uint64_t>& ring_at(int src, int dst);
    bool push(MessageRequest& request);
    bool pull(int src);
    bool matches(const MessageRequest& request, const Parcel& parcel) const;
    void hand_over(Parcel& parcel);
    bool apart(const MessageRequest& request, const Group& group);
    int gone(const MessageRequest& request, const Group& group) const;
    std::shared_ptr<MessageRequest> under_way(bool sends, std::uint64_t number);
    bool cancel(MessageRequest& request, Fate fate);
    void lose(MessageRequest& request);
    void part_with_dead();
    bool cancel_if_nobody(MessageRequest& request, const Group& group);
    void give_up();
    [[noreturn]] void fail(Trouble kind, int culprit, const Group& group, const std::string& text);

    std::shared_ptr<World> world_;
    int rank_;
    std::size_t capacity_;
    std::mutex opening_;
    std::mutex mutex_;
    std::vector<std::list<std::shared_ptr<MessageRequest>>> outgoing_;  // by dst
    std::list<std::shared_ptr<MessageRequest>> wanted_;
    std::vector<std::unique_ptr<Parcel>> arriving_;  // by src
    std::list<std::unique_ptr<Parcel>> waiting_;     // whole, and nobody wants them yet
    std::vector<Left> cancelled_;                    // receives, when a group was closed
    bool forgotten_ = false;
    std::thread thread_;
};

}  // namespace roundelay
