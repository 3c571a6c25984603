// The Python face of the native core; only files named *_py.cpp know Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "host.hpp"

namespace nb = nanobind;

namespace roundelay {
void register_reduce(nb::module_& module);
void register_world(nb::module_& module);
void register_group(nb::module_& module);
void register_point_to_point(nb::module_& module);
void register_shelf(nb::module_& module);
void register_fork(nb::module_& module);
}  // namespace roundelay

NB_MODULE(_core, module) {
#ifdef NDEBUG
    // A user's globals may outlive the interpreter's last sweep; that is no leak of ours to report.
    nb::set_leak_warnings(false);
#endif
    module.doc() = "Roundelay's native core.";
    module.attr("version") = ROUNDELAY_VERSION;
    module.def("instruction_sets", &roundelay::instruction_sets,
               "Name the instruction sets of this CPU that kernels are built for.");
    module.def("compiler", &roundelay::compiler, "Name the compiler that built this library.");
    const std::string problem = roundelay::limit_problem();
    if (!problem.empty() && PyErr_WarnEx(PyExc_RuntimeWarning, problem.c_str(), 1) < 0) {
        nb::raise_python_error();
    }
    roundelay::register_reduce(module);
    roundelay::register_world(module);
    roundelay::register_group(module);
    roundelay::register_point_to_point(module);
    roundelay::register_shelf(module);
    roundelay::register_fork(module);
}
