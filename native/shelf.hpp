// What one rank makes for all of them: found by a number, made once, and read by whoever needs it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "wait.hpp"
#include "world.hpp"

namespace roundelay {

class Shelf {
   public:
    enum class Found { whole, yours, later };

    Shelf(std::shared_ptr<World> world, int rank);

    // Look for one part of what has this number. It may be there; or the caller is to make it, and
    // then calls `put` or `drop`; or another rank is at it, and this one has slept for a moment. Who
    // is to make it is not waited for once it is gone. Throws Broken when there is trouble.
    Found take(std::uint64_t key, std::size_t part, std::string_view& found);
    void put(std::uint64_t key, std::span<const std::string_view> parts);
    void drop(std::uint64_t key);

    struct alignas(64) Place {
        std::atomic<std::uint64_t> key;    // 0: free
        std::atomic<std::uint32_t> maker;  // world rank, from 1
        Signal ready;
        std::uint64_t at;
    };
    static constexpr std::size_t places = 256;

   private:
    // Null when all places are taken: then everybody makes it alone.
    Place* find(std::uint64_t key);
    bool claim(Place& place);

    std::shared_ptr<World> world_;
    std::uint32_t mine_;
};

}  // namespace roundelay
