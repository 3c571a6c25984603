// torch's tensors on the host, read where they lie; torch is neither linked nor imported for it.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <optional>
#include <span>

#include "dtype.hpp"

namespace roundelay {

namespace nb = nanobind;

struct TensorMemory {
    std::byte* data;
    std::size_t count;
    DType dtype;
    std::span<const Py_ssize_t> shape;  // as the tensor holds it
    nb::object storage;  // keeps the memory, whatever becomes of the tensor meanwhile
};

// The memory of a plain, dense, contiguous CPU tensor that autograd does not follow. Nothing, and no
// Python error, for any other object: subclasses, what is lazy, what reaches beyond its storage, and
// all of them while somebody looks on at what torch does (a mode, vmap, grad).
std::optional<TensorMemory> read_tensor(nb::handle object);

// The shape of a CPU tensor, not of a subclass; None for any other object, without a Python error.
nb::object tensor_shape(nb::handle object);

// Tell autograd that the tensor was written behind its back. Throws what torch raises.
void bump_version(nb::handle tensor);

}  // namespace roundelay
