// A buffer handed in from Python: where it lies, how long it is, of which dtype.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "dtype.hpp"
#include "tensor_py.hpp"

namespace roundelay {

namespace nb = nanobind;

// Keeps the buffer exported (and so alive, and of fixed size) while it exists; a tensor, from when it is held.
class View {
   public:
    // Anything with the buffer protocol. Throws nb::type_error for formats that are no dtype.
    explicit View(PyObject* object);
    // The same and a plain tensor of torch, but what can't be read or is no dtype only leaves `known`
    // false.
    View(PyObject* object, TensorReader& quietly);
    ~View();
    View(const View&) = delete;
    View& operator=(const View&) = delete;

    std::byte* data = nullptr;
    std::size_t count = 0;
    DType dtype = DType::uint8;
    bool writable = false;
    bool contiguous = true;
    bool known = false;  // read, and of a format that is a dtype
    std::span<const Py_ssize_t> shape;
    std::size_t bytes() const { return count * itemsize(dtype); }
    // Have the memory stay where it is without the interpreter lock.
    void hold();
    // The storage of a tensor that is held, by the address of the Python object; else 0.
    std::uintptr_t storage() const { return reinterpret_cast<std::uintptr_t>(storage_.ptr()); }
    // To be called when it was written: autograd counts what is done to a tensor.
    void written() const;

   private:
    View() = default;
    bool take(PyObject* object);
    bool take_array(PyObject* object);
    void take_tensor(PyObject* object, TensorReader& reader);
    Py_buffer buffer_;  // of what is exported; else it costs nothing
    bool exported_ = false;
    nb::handle tensor_;   // which the caller keeps
    nb::object storage_;  // of it, once it is held
};

}  // namespace roundelay
