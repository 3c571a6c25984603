// The Python face of groups and the programs that they walk.
#pragma once

#include <nanobind/nanobind.h>

#include "group.hpp"

namespace roundelay {

// The group behind its Python object.
Group& group_of(nanobind::handle object);
// The user's line that is making a call of it.
std::uint32_t site_of(nanobind::handle object);

}  // namespace roundelay
