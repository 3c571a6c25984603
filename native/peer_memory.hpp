// The private memory of other ranks' processes, read where it lies by the kernel (cross-memory attach).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace roundelay {

struct RankInfo;

// Words in this process's own memory, and where they lie. Whoever reads them in a process knows that it
// is still the process it was told of, and not another with its number.
struct Proof {
    std::array<std::uint64_t, 2> words;
};
const Proof& own_proof();
// The same as it is, and not made anew in a child.
Proof kept_proof();

// Under Yama only who started a process, or whom it names, may read it: name the launcher of this one,
// from which the other ranks stem too.
void let_ranks_read();

// Copy from a rank's process; false if it is gone, has no such memory, or may not be read, or, if it is
// to be proved, if it is another one. Of several reads the last is enough: a process that is still the
// same was so before.
bool read_peer(const RankInfo& rank, void* to, std::uint64_t from, std::size_t bytes, bool proved);

// Why ranks of this process may not read one another's memory, or nothing.
const char* why_no_peer_memory();

}  // namespace roundelay
