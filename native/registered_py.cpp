// The Python face of registered arrays.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include "registered.hpp"

namespace nb = nanobind;

namespace roundelay {

void register_registered(nb::module_& module) {
    // With the interpreter lock: no other thread's Python writes to an array that moves.
    nb::class_<Registration>(module, "Registration")
        .def_static("room", &Registration::room)
        .def_static("make", &Registration::make, nb::arg("world"), nb::arg("block"),
                    nb::arg("address"), nb::arg("nbytes"), nb::arg("storage"))
        .def_static("find", &Registration::find, nb::arg("address"), nb::arg("nbytes"))
        .def_static("can_look", &Registration::can_look)
        .def_prop_ro("address", &Registration::address)
        .def_prop_ro("nbytes", &Registration::bytes)
        .def("is_in", &Registration::in, nb::arg("world"))
        .def("release", &Registration::release);
}

}  // namespace roundelay
