// Huge pages for arrays that other ranks read where they lie, again and again.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace roundelay {

// Whoever reads a process's memory looks up and holds every page of it: with pages of 2 MiB in place of 4 KiB
// that takes longer than the copy. The kernel makes them of an array in place, which keeps its address and what is
// in it, for the time of some ten reads.
class HugePages {
   public:
    // An array is about to be read by others. One that was so often enough gets huge pages, as far as it
    // has whole ones in it; ever more seldom that is done again, for other memory may have come in its place.
    void note_read(const std::byte* at, std::size_t bytes);

   private:
    struct Seen {
        std::uintptr_t begin = 0, end = 0;
        std::uint64_t times = 0;
    };
    std::array<Seen, 256> seen_{};  // by address; of two in one place the later is counted
};

}  // namespace roundelay
