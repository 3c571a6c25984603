// The Python face of the native core; only files named *_py.cpp know Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstddef>
#include <string_view>

#include "dtype.hpp"
#include "group.hpp"
#include "host.hpp"
#include "point_to_point.hpp"
#include "program.hpp"
#include "reduce.hpp"
#include "trace.hpp"
#include "world.hpp"

namespace nb = nanobind;

namespace {

// Names by number: Python says what they mean, and asks here for the numbers.
template <std::size_t count>
void export_names(nb::module_& module, const char* table,
                  const std::array<std::string_view, count>& names) {
    nb::list every;
    for (std::string_view name : names) every.append(nb::str(name.data(), name.size()));
    module.attr(table) = nb::tuple(every);
}

}  // namespace

namespace roundelay {
void register_reduce(nb::module_& module);
void register_world(nb::module_& module);
void register_group(nb::module_& module);
void register_fast_method(nb::module_& module);
void register_point_to_point(nb::module_& module);
void register_shelf(nb::module_& module);
void register_fork(nb::module_& module);
void register_bound_call(nb::module_& module);
void register_registered(nb::module_& module);
void register_numpy_memory(nb::module_& module);
void register_trace(nb::module_& module);
#ifdef ROUNDELAY_JAX
void register_jax(nb::module_& module);
#endif
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
    export_names(module, "DTYPES", roundelay::dtype_names);
    export_names(module, "REDUCTIONS", roundelay::op_names);
    export_names(module, "INSTRUCTIONS", roundelay::kind_names);
    export_names(module, "SPACES", roundelay::space_names);
    export_names(module, "ENDINGS", roundelay::ending_names);
    export_names(module, "LIVES", roundelay::life_names);
    export_names(module, "LOSSES", roundelay::loss_names);
    export_names(module, "WAITS", roundelay::waits_names);
    export_names(module, "TRACED", roundelay::traced_names);
    export_names(module, "TRACED_WAYS", roundelay::way_names);
    module.attr("ENDING") = int(roundelay::ending);
    module.attr("INNER_TAGS") = roundelay::inner_tags;
    module.attr("WINDOW") = roundelay::window;
    roundelay::register_reduce(module);
    roundelay::register_world(module);
    roundelay::register_group(module);
    roundelay::register_fast_method(module);
    roundelay::register_point_to_point(module);
    roundelay::register_shelf(module);
    roundelay::register_fork(module);
    roundelay::register_bound_call(module);
    roundelay::register_registered(module);
    roundelay::register_numpy_memory(module);
    roundelay::register_trace(module);
#ifdef ROUNDELAY_JAX
    roundelay::register_jax(module);
#endif
}
