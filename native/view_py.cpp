#include "view_py.hpp"

#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "tensor_py.hpp"

namespace roundelay {

namespace {

DType integer(bool is_signed, Py_ssize_t size) {
    switch (size) {
        case 1: return is_signed ? DType::int8 : DType::uint8;
        case 2: return is_signed ? DType::int16 : DType::uint16;
        case 4: return is_signed ? DType::int32 : DType::uint32;
        default: return is_signed ? DType::int64 : DType::uint64;
    }
}

std::optional<DType> dtype_of(const char* format, Py_ssize_t size) {
    std::string_view code = format == nullptr ? "B" : format;
    if (!code.empty() && (code[0] == '@' || code[0] == '=' || code[0] == '<')) code.remove_prefix(1);
    if (code.size() == 1) {
        switch (code[0]) {
            case '?': return DType::boolean;
            case 'c': return DType::uint8;
            case 'b': case 'h': case 'i': case 'l': case 'q': case 'n': return integer(true, size);
            case 'B': case 'H': case 'I': case 'L': case 'Q': case 'N': return integer(false, size);
            case 'e': return DType::float16;
            case 'f': return DType::float32;
            case 'd': return DType::float64;
            default: break;
        }
    }
    if (code == "Zf") return DType::complex64;
    if (code == "Zd") return DType::complex128;
    return std::nullopt;
}

}  // namespace

// False, with a Python error set, when the object exports nothing.
bool View::take(PyObject* object) {
    // Writable if it can be; a read-only one is asked for again.
    if (PyObject_GetBuffer(object, &buffer_, PyBUF_FULL) != 0) {
        PyErr_Clear();
        if (PyObject_GetBuffer(object, &buffer_, PyBUF_FULL_RO) != 0) return false;
    }
    exported_ = true;
    data = static_cast<std::byte*>(buffer_.buf);
    count = buffer_.itemsize == 0 ? 0 : std::size_t(buffer_.len / buffer_.itemsize);
    writable = buffer_.readonly == 0;
    const bool simple = buffer_.ndim == 0 || count <= 1 ||
                        (buffer_.ndim == 1 && (buffer_.strides == nullptr ||
                                               buffer_.strides[0] == buffer_.itemsize));
    contiguous = simple || PyBuffer_IsContiguous(&buffer_, 'C') != 0;
    const auto found = dtype_of(buffer_.format, buffer_.itemsize);
    known = found.has_value();
    dtype = found.value_or(DType::uint8);
    return true;
}

void View::take_tensor(PyObject* object) {
    auto found = read_tensor(object);
    if (!found) return;
    data = found->data;
    count = found->count;
    dtype = found->dtype;
    storage_ = std::move(found->storage);
    tensor_ = object;
    writable = known = true;
}

void View::written() const {
    if (tensor_.is_valid()) bump_version(tensor_);
}

View::View(PyObject* object, Quietly) {
    if (PyObject_CheckBuffer(object) == 0) {
        take_tensor(object);
        return;
    }
    // A class of Python's, a masked array say, may mean more than its memory: others look closer.
    if ((PyType_GetFlags(Py_TYPE(object)) & Py_TPFLAGS_HEAPTYPE) != 0) return;
    if (!take(object)) PyErr_Clear();
}

View::View(PyObject* object) {
    if (!take(object)) throw nb::python_error();
    if (known) return;
    const std::string text =
        std::string("a buffer of format '") + buffer_.format + "' has no dtype here";
    PyBuffer_Release(&buffer_);
    throw nb::type_error(text.c_str());
}

View::~View() {
    if (exported_) PyBuffer_Release(&buffer_);
}

}  // namespace roundelay
