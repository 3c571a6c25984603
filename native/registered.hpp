// Arrays whose pages were moved into the arena: they keep their address, and all ranks reach them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "group.hpp"
#include "world.hpp"

namespace roundelay {

// One array. Only the whole pages inside it move: its first and its last page also hold what belongs to
// others. The bytes of it on those two, its edges, stay where they are, and have room in the arena, into
// which and out of which each call copies them.
class Registration {
   public:
    // How much room in the arena so many bytes need.
    static std::size_t room(std::size_t bytes);
    // Move an array into a block of that size, unless it has been moved: then return what did. Nobody may
    // write to it meanwhile. What has a `storage`, by the address of the Python object, may get other
    // memory while that lives, as a tensor that is shared. So each call looks: a buffer of the same
    // storage is where it was, and of all others the kernel says whether they are in the arena.
    static std::shared_ptr<Registration> make(std::shared_ptr<World> world,
                                              std::shared_ptr<Block> block, std::uintptr_t address,
                                              std::size_t bytes, std::uintptr_t storage);
    // What holds all of these bytes; null if nothing does.
    static std::shared_ptr<Registration> find(std::uintptr_t address, std::size_t bytes);
    // Whether the kernel says if two addresses are the same page.
    static bool can_look();
    Registration(std::shared_ptr<World> world, std::shared_ptr<Block> block, std::uintptr_t address,
                 std::size_t bytes, std::uintptr_t storage);
    ~Registration();
    Registration(const Registration&) = delete;
    Registration& operator=(const Registration&) = delete;

    std::uintptr_t address() const { return address_; }
    std::size_t bytes() const { return bytes_; }
    bool in(const World& world) const { return world_.get() == &world; }
    // Whether its pages still are those of the arena.
    bool intact() const;
    // Give it pages of its own again, with what is in it. False while a call is under way on it. Throws
    // OutOfMemory where there are none.
    bool release();

   private:
    friend class CallBuffers;
    bool holds(std::uintptr_t at, std::size_t bytes) const {
        return at >= address_ && at + bytes <= address_ + bytes_;
    }
    bool same(std::uintptr_t page) const;
    bool put_back();
    std::byte* in_arena(std::uintptr_t at) const { return first_ + (at - address_); }

    std::shared_ptr<World> world_;
    std::shared_ptr<Block> block_;
    std::uintptr_t address_;
    std::size_t bytes_;
    std::uintptr_t storage_;  // 0: none
    std::uintptr_t inner_, outer_;  // where the whole pages begin, and where they end
    std::byte* first_;              // of its bytes, in the arena
    std::atomic<int> calls_ = 0;    // under way on it
    std::atomic<bool> released_ = false;
};

// The buffers of one call while it runs: those that are registered are seen where they lie in the arena.
class CallBuffers {
   public:
    struct Extent {
        std::size_t bytes = 0;
        std::uintptr_t storage = 0;  // as above
    };
    CallBuffers(World& world, Call& call, const Extent& in, const Extent& out);
    ~CallBuffers();
    CallBuffers(const CallBuffers&) = delete;
    CallBuffers& operator=(const CallBuffers&) = delete;

   private:
    struct Use {
        std::shared_ptr<Registration> of;
        std::uintptr_t at = 0;
        std::size_t bytes = 0;
        std::byte* begin(World& world, const std::byte* data, const Extent& extent);
        void copy_edges(bool into_arena) const;
        void end();
    };
    Use in_, out_;
};

}  // namespace roundelay
