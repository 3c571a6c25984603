// The user's source line of a call, found in tens of nanoseconds and readable by other ranks.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
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
    // Lines of another package are passed over too: its users stand above it.
    static void skip_package(const std::string& folder);
    // The place this call comes from, for a thread that will make another call on its behalf.
    static nb::object caller();
    // From now on, calls of this thread come from that place; None ends it.
    static void work_for(nb::object place);

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
    // The number of a place; its line is that of the frame, if there is one.
    std::uint32_t number(PyCodeObject* code, int offset, PyFrameObject* frame, int line);

    std::shared_ptr<World> world_;
    int world_rank_;
    // Both keep their code objects alive, so that an address never means another one.
    std::unordered_map<PyCodeObject*, std::pair<nb::object, bool>> ours_;
    std::unordered_map<Key, std::uint32_t, Hash> numbers_;
    // Places of late, each where its hash says: a loop makes its calls from the same few.
    struct Recent {
        Key key{nullptr, 0};
        std::uint32_t number = 0;
    };
    std::array<Recent, 16> recent_;
};

}  // namespace roundelay
