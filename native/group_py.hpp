// The Python face of groups and the programs that they walk.
#pragma once

#include <nanobind/nanobind.h>

#include "group.hpp"

namespace roundelay {

class PyGroup;

// The group behind its Python object.
Group& group_of(nanobind::handle object);
// The user's line that is making a call of it.
std::uint32_t site_of(nanobind::handle object);
// What Python holds of a group, and a plain call of it; see PyGroup::fast_path.
PyGroup& py_group(nanobind::handle object);
bool fast_path(PyGroup& group, int collective, nanobind::handle given, nanobind::handle result, int op,
               int root, int label);

}  // namespace roundelay
