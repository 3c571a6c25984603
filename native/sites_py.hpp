// The user's source line of a call, found in tens of nanoseconds and readable by other ranks.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <unordered_map>

#include "world.hpp"

namespace roundelay {

namespace nb = nanobind;

// One per rank: numbers the places calls come from and writes them into the rank's shared table.
class Sites {
   public:
    Sites(std::shared_ptr<World> world, int world_rank)
        : world_(std::move(world)), world_rank_(world_rank) {}

    // The number of the innermost Python frame outside this package; 0 when there is none.
    std::uint32_t here();
    static void set_package(const std::string& folder);

   private:
    struct Key {
        PyCodeObject* code;
        int offset;
        bool operator==(const Key&) const = default;
    };
    struct Hash {
        std::size_t operator()(const Key& key) const {
            return std::hash<void*>()(key.code) ^ std::size_t(key.offset) * 0x9e3779b97f4a7c15;
        }
    };
    bool ours(PyCodeObject* code);

    std::shared_ptr<World> world_;
    int world_rank_;
    // Both keep their code objects alive, so that an address never means another one.
    std::unordered_map<PyCodeObject*, std::pair<nb::object, bool>> ours_;
    std::unordered_map<Key, std::uint32_t, Hash> numbers_;
};

}  // namespace roundelay
