// What this CPU can do; reduction kernels are chosen by it at run time.
#pragma once

#include <string>
#include <vector>

namespace roundelay {

// The instruction sets of this CPU that kernels are built for, from the oldest to the newest.
std::vector<std::string> instruction_sets();

// The compiler that built this library, as it calls itself.
std::string compiler();

}  // namespace roundelay
