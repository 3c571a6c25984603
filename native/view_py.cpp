#include "view_py.hpp"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

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

// What we read of numpy's arrays. Every extension that was compiled with numpy has these places built in,
// so numpy keeps them; all the same, the first array of each dtype is compared with its buffer.
namespace numpy {

struct Descr {
    PyObject_HEAD
    PyTypeObject* scalar;
    char kind, type, byteorder, flags;
    int number;
};

struct Array {
    PyObject_HEAD
    char* data;
    int ndim;
    Py_ssize_t *shape, *strides;
    PyObject* base;
    Descr* descr;
    int flags;
};
constexpr int c_contiguous = 0x1, aligned = 0x100, writable = 0x400;

// By numpy's numbers.
std::optional<DType> dtype_of(const Descr& descr) {
    if (descr.byteorder != '=' && descr.byteorder != '|') return std::nullopt;
    switch (descr.number) {
        case 0: return DType::boolean;
        case 1: return DType::int8;
        case 2: return DType::uint8;
        case 3: return DType::int16;
        case 4: return DType::uint16;
        case 5: return DType::int32;
        case 6: return DType::uint32;
        case 7: return integer(true, sizeof(long));
        case 8: return integer(false, sizeof(long));
        case 9: return DType::int64;
        case 10: return DType::uint64;
        case 11: return DType::float32;
        case 12: return DType::float64;
        case 14: return DType::complex64;
        case 15: return DType::complex128;
        case 23: return DType::float16;
        default: return std::nullopt;
    }
}

// The type of its arrays, once it is loaded; never let go of. Under the interpreter lock.
PyTypeObject* array_type() {
    static PyTypeObject* found = nullptr;
    if (found == nullptr) [[unlikely]] {
        PyObject* module = PyDict_GetItemString(PyImport_GetModuleDict(), "numpy");
        if (module == nullptr) return nullptr;
        PyObject* type = PyObject_GetAttrString(module, "ndarray");
        if (type == nullptr || !PyType_Check(type)) {
            PyErr_Clear();
            Py_XDECREF(type);
            return nullptr;
        }
        found = reinterpret_cast<PyTypeObject*>(type);
    }
    return found;
}

}  // namespace numpy

}  // namespace

// False for what is no plain array of numpy's, or not as it is expected to be.
bool View::take_array(PyObject* object) {
    static std::uint32_t seen = 0;  // dtypes of which an array was compared
    static bool differs = false;
    if (differs || Py_TYPE(object) != numpy::array_type()) return false;
    const auto& array = *reinterpret_cast<const numpy::Array*>(object);
    const auto found = numpy::dtype_of(*array.descr);
    if (!found) return false;
    data = reinterpret_cast<std::byte*>(array.data);
    shape = {array.shape, std::size_t(array.ndim)};
    count = 1;
    for (const Py_ssize_t length : shape) count *= std::size_t(length);
    dtype = *found;
    writable = (array.flags & numpy::writable) != 0;
    contiguous = (array.flags & numpy::c_contiguous) != 0;
    known = (array.flags & numpy::aligned) != 0;
    const std::uint32_t bit = std::uint32_t{1} << unsigned(dtype);
    if ((seen & bit) != 0) [[likely]] return true;
    View other;
    differs = !other.take(object) || other.data != data || other.count != count ||
              other.dtype != dtype || other.writable != writable ||
              (count > 1 && other.contiguous != contiguous) || !std::ranges::equal(other.shape, shape);
    PyErr_Clear();
    if (!differs) seen |= bit;
    return !differs;
}

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
    if (buffer_.shape != nullptr) shape = {buffer_.shape, std::size_t(buffer_.ndim)};
    const bool simple = buffer_.ndim == 0 || count <= 1 ||
                        (buffer_.ndim == 1 && (buffer_.strides == nullptr ||
                                               buffer_.strides[0] == buffer_.itemsize));
    contiguous = simple || PyBuffer_IsContiguous(&buffer_, 'C') != 0;
    const auto found = dtype_of(buffer_.format, buffer_.itemsize);
    known = found.has_value();
    dtype = found.value_or(DType::uint8);
    return true;
}

void View::take_tensor(PyObject* object, TensorReader& reader) {
    const auto found = reader.read(object);
    if (!found) return;
    data = found->data;
    count = found->count;
    dtype = found->dtype;
    shape = found->shape;
    tensor_ = object;
    writable = known = true;
}

void View::hold() {
    if (tensor_.is_valid() && !storage_.is_valid()) storage_ = storage_of(tensor_);
}

void View::written() const {
    if (tensor_.is_valid()) bump_version(tensor_);
}

View::View(PyObject* object, TensorReader& quietly) {
    if (take_array(object)) return;
    if (PyObject_CheckBuffer(object) == 0) {
        take_tensor(object, quietly);
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
