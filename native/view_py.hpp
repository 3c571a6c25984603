// A buffer handed in from Python: where it lies, how long it is, of which dtype.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "dtype.hpp"

namespace roundelay {

namespace nb = nanobind;

// Keeps the buffer exported (and so alive, and of fixed size) while it exists.
class View {
   public:
    // Anything with the buffer protocol. Throws nb::type_error for formats that are no dtype.
    explicit View(PyObject* object);
    // The same, but what can't be exported or is no dtype only leaves `known` false.
    struct Quietly {};
    View(PyObject* object, Quietly);
    ~View();
    View(const View&) = delete;
    View& operator=(const View&) = delete;

    std::byte* data = nullptr;
    std::size_t count = 0;
    DType dtype = DType::uint8;
    bool writable = false;
    bool contiguous = true;
    bool known = false;  // exported, and of a format that is a dtype
    std::size_t bytes() const { return count * itemsize(dtype); }

   private:
    bool take(PyObject* object);
    Py_buffer buffer_{};
    bool exported_ = false;
};

}  // namespace roundelay
