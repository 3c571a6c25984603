// The Python face of the native core; no other file here knows Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "host.hpp"

namespace nb = nanobind;

NB_MODULE(_core, module) {
    module.doc() = "Roundelay's native core.";
    module.attr("version") = ROUNDELAY_VERSION;
    module.def("instruction_sets", &roundelay::instruction_sets,
               "Name the instruction sets of this CPU that kernels are built for.");
    module.def("compiler", &roundelay::compiler, "Name the compiler that built this library.");
}
