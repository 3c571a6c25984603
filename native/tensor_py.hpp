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
};

// Reads the tensors of one call. The memory stays where it is while the interpreter lock is held; who lets go
// of that keeps `storage_of` the tensor first.
class TensorReader {
   public:
    // The memory of a plain, dense, contiguous CPU tensor that autograd does not follow. Nothing, and no
    // Python error, for any other object: subclasses, what is lazy, what reaches beyond its storage, and
    // all of them while somebody looks on at what torch does (a mode, vmap, grad), and may make something
    // else of it.
    std::optional<TensorMemory> read(nb::handle object);

   private:
    bool somebody_looks_on(const void* torch);
    bool asked_ = false, looks_on_ = false;
};

// Keeps the memory of a tensor that was read, whatever becomes of the tensor meanwhile.
nb::object storage_of(nb::handle tensor);

// The shape of a CPU tensor, not of a subclass; None for any other object, without a Python error.
nb::object tensor_shape(nb::handle object);

// Tell autograd that the tensor was written behind its back. Throws what torch raises.
void bump_version(nb::handle tensor);

}  // namespace roundelay
