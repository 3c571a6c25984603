#include "shelf.hpp"

#include <cstring>

#include "kill_point.hpp"

namespace roundelay {

namespace {

constexpr std::int64_t nap_ns = 50'000'000;

}  // namespace

Shelf::Shelf(std::shared_ptr<World> world, int rank)
    : world_(std::move(world)), mine_(std::uint32_t(rank) + 1) {}

Shelf::Place* Shelf::find(std::uint64_t key) {
    auto* table = world_->at<Place>(world_->header().shelf_at);
    for (std::size_t probe = 0; probe < places; ++probe) {
        Place& place = table[(key + probe) % places];
        std::uint64_t held = 0;
        if (place.key.compare_exchange_strong(held, key) || held == key) return &place;
    }
    return nullptr;
}

bool Shelf::claim(Place& place) {
    std::uint32_t holder = 0;
    if (place.maker.compare_exchange_strong(holder, mine_)) return true;
    const bool gone = world_->rank(int(holder) - 1).life.load() != Life::alive;
    return gone && place.maker.compare_exchange_strong(holder, mine_);
}

Shelf::Found Shelf::take(std::uint64_t key, std::size_t part, std::string_view& found) {
    if (world_->foreign()) throw Broken{};
    Place* place = find(key);
    if (place == nullptr) return Found::yours;
    if (place->ready.value.load(std::memory_order_acquire) == 0) {
        if (claim(*place)) return Found::yours;
        kill_point();
        place->ready.sleep(0, nap_ns);
        if (world_->troubled()) throw Broken{};
        if (place->ready.value.load(std::memory_order_acquire) == 0) return Found::later;
    }
    const auto* ends = world_->at<std::uint64_t>(place->at);
    found = {world_->at<char>(place->at + ends[part]), std::size_t(ends[part + 1] - ends[part])};
    return Found::whole;
}

void Shelf::put(std::uint64_t key, std::span<const std::string_view> parts) {
    Place* place = find(key);
    if (place == nullptr || place->maker.load() != mine_) return;
    std::uint64_t end = (parts.size() + 1) * sizeof(std::uint64_t);
    std::size_t bytes = end;
    for (const std::string_view part : parts) bytes += part.size();
    const std::uint64_t at = world_->allocate(bytes);
    kill_point();
    auto* ends = world_->at<std::uint64_t>(at);
    *ends = end;
    for (const std::string_view part : parts) {
        std::memcpy(world_->at<char>(at + end), part.data(), part.size());
        *++ends = end += part.size();
    }
    place->at = at;
    kill_point();  // made, and nobody told
    place->ready.set(1);
}

void Shelf::drop(std::uint64_t key) {
    if (world_->foreign()) return;
    if (Place* place = find(key); place != nullptr) {
        std::uint32_t holder = mine_;
        place->maker.compare_exchange_strong(holder, 0);
    }
}

}  // namespace roundelay
