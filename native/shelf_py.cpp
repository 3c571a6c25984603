// The Python face of the shelf.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include <vector>

#include "lock_py.hpp"
#include "shelf.hpp"

namespace nb = nanobind;

namespace roundelay {

void register_shelf(nb::module_& module) {
    nb::class_<Shelf>(module, "Shelf")
        .def(nb::init<std::shared_ptr<World>, int>(), nb::arg("world"), nb::arg("rank"))
        // The bytes; or whether the caller is to make them.
        .def("take",
             [](Shelf& self, std::uint64_t key, std::size_t part) -> nb::object {
                 std::string_view found;
                 auto kind = Shelf::Found::later;
                 {
                     const Unlocked unlocked;
                     kind = self.take(key, part, found);
                 }
                 if (kind == Shelf::Found::whole) return nb::bytes(found.data(), found.size());
                 return nb::bool_(kind == Shelf::Found::yours);
             })
        .def("put",
             [](Shelf& self, std::uint64_t key, nb::list parts) {
                 std::vector<std::string_view> views;
                 for (nb::handle part : parts) {
                     const auto data = nb::cast<nb::bytes>(part);
                     views.emplace_back(data.c_str(), data.size());
                 }
                 const Unlocked unlocked;
                 self.put(key, views);
             })
        .def("drop", &Shelf::drop);
}

}  // namespace roundelay
