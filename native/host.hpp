// What this CPU can do; reduction kernels are chosen by it at run time.
#pragma once

#include <string>
#include <vector>

namespace roundelay {

// The instruction sets of this CPU that kernels are built for, from the oldest to the newest. The
// environment variable ROUNDELAY_MAX_ISA names the newest to be used: sse2, avx2 or avx512.
std::vector<std::string> instruction_sets();

// What is wrong with that variable; nothing if it can be meant.
std::string limit_problem();

// The compiler that built this library, as it calls itself.
std::string compiler();

}  // namespace roundelay
