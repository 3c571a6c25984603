// How much memory this process may still ask for.
#pragma once

#include <cstddef>
#include <string>

namespace roundelay {

// Bytes that may still be asked for before the kernel would have to kill somebody: what the machine
// has available, cut by the limits of this process and of every control group it is in. The kernel's
// files are looked for under `root`, which tests make themselves.
std::size_t available_memory(const std::string& root = "");

}  // namespace roundelay
