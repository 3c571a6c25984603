#include "tensor_py.hpp"

#include <cstdint>
#include <cstring>
#include <utility>

namespace roundelay {

namespace {

// What we read of DLPack 1, by which a tensor tells of itself in one call from C; see dlpack.h.
namespace dlpack {

constexpr std::int32_t cpu = 1;

struct DataType {
    std::uint8_t code;
    std::uint8_t bits;
    std::uint16_t lanes;
};

struct Tensor {
    void* data;
    std::int32_t device_type, device_id;
    std::int32_t ndim;
    DataType dtype;
    std::int64_t* shape;
    std::int64_t* strides;
    std::uint64_t byte_offset;
};

struct ExchangeApi {
    std::uint32_t major, minor;
    const ExchangeApi* older;
    void* allocate;
    void* managed_from_object;
    void* managed_to_object;
    int (*tensor_from_object)(void* object, Tensor* tensor);
    void* current_work_stream;
};

std::optional<DType> dtype_of(DataType type) {
    const auto by_bits = [&](DType of_8, DType of_16, DType of_32, DType of_64) {
        switch (type.bits) {
            case 8: return std::optional(of_8);
            case 16: return std::optional(of_16);
            case 32: return std::optional(of_32);
            case 64: return std::optional(of_64);
            default: return std::optional<DType>();
        }
    };
    if (type.lanes != 1) return std::nullopt;
    switch (type.code) {
        case 0: return by_bits(DType::int8, DType::int16, DType::int32, DType::int64);
        case 1: return by_bits(DType::uint8, DType::uint16, DType::uint32, DType::uint64);
        case 2:
            if (type.bits == 16) return DType::float16;
            if (type.bits == 32) return DType::float32;
            if (type.bits == 64) return DType::float64;
            return std::nullopt;
        case 4: return type.bits == 16 ? std::optional(DType::bfloat16) : std::nullopt;
        case 5:
            if (type.bits == 64) return DType::complex64;
            if (type.bits == 128) return DType::complex128;
            return std::nullopt;
        case 6: return type.bits == 8 ? std::optional(DType::boolean) : std::nullopt;
        default: return std::nullopt;
    }
}

}  // namespace dlpack

// What we call of torch, found when the first tensor comes in, and never let go of.
struct Torch {
    PyTypeObject* tensor = nullptr;
    const dlpack::ExchangeApi* api = nullptr;  // null if this torch lacks any of what follows
    PyObject *increment_version = nullptr, *function_modes = nullptr, *dispatch_modes = nullptr,
             *transform_level = nullptr;
    PyObject *requires_grad = nullptr, *is_neg = nullptr, *is_conj = nullptr,
             *untyped_storage = nullptr, *nbytes = nullptr, *storage_offset = nullptr;  // words
};

const dlpack::ExchangeApi* exchange_api(nb::handle type) {
    constexpr const char* name = "dlpack_exchange_api";
    const nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
    if (PyCapsule_IsValid(capsule.ptr(), name) == 0) return nullptr;
    auto* api = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), name));
    while (api != nullptr && api->major != 1) api = api->older;
    return api != nullptr && api->tensor_from_object != nullptr ? api : nullptr;
}

Torch found_in(nb::handle module, nb::handle type) {
    Torch torch;
    torch.tensor = reinterpret_cast<PyTypeObject*>(type.ptr());
    const auto word = [](const char* name) { return PyUnicode_InternFromString(name); };
    torch.requires_grad = word("requires_grad");
    torch.is_neg = word("is_neg");
    torch.is_conj = word("is_conj");
    torch.untyped_storage = word("untyped_storage");
    torch.nbytes = word("nbytes");
    torch.storage_offset = word("storage_offset");
    try {
        const nb::object inner = module.attr("_C");
        const auto function = [](nb::handle from, const char* name) {
            return nb::object(from.attr(name)).release().ptr();
        };
        torch.increment_version = function(inner, "_increment_version");
        torch.function_modes = function(inner, "_len_torch_function_stack");
        torch.dispatch_modes = function(inner, "_len_torch_dispatch_stack");
        torch.transform_level = function(inner.attr("_functorch"), "maybe_current_level");
        torch.api = exchange_api(type);
    } catch (const nb::python_error&) {
        torch.api = nullptr;  // of another torch: its tensors take the long way
    }
    return torch;
}

// The torch that a type is the plain tensor of, if it is. Under the interpreter lock.
const Torch* torch_of(PyTypeObject* type) {
    static Torch torch;
    if (torch.tensor == nullptr) [[unlikely]] {
        const char* dot = std::strrchr(type->tp_name, '.');
        if (std::strcmp(dot == nullptr ? type->tp_name : dot + 1, "Tensor") != 0) return nullptr;
        PyObject* module = PyDict_GetItemString(PyImport_GetModuleDict(), "torch");
        if (module == nullptr) return nullptr;
        const nb::object tensor = nb::getattr(module, "Tensor", nb::none());
        if (tensor.ptr() != reinterpret_cast<PyObject*>(type)) return nullptr;
        torch = found_in(module, nb::object(tensor).release());
    }
    return type == torch.tensor && torch.api != nullptr ? &torch : nullptr;
}

nb::object steal(PyObject* result) {
    if (result == nullptr) PyErr_Clear();
    return nb::steal(result);
}

nb::object asked(nb::handle object, PyObject* method) {
    return steal(PyObject_CallMethodNoArgs(object.ptr(), method));
}

bool is_zero(const nb::object& number) {
    return number.is_valid() && PyLong_Check(number.ptr()) && PyLong_AsLong(number.ptr()) == 0;
}

// -1 for what is no number.
std::int64_t number_of(const nb::object& object) {
    if (!object.is_valid() || !PyLong_Check(object.ptr())) return -1;
    const std::int64_t number = PyLong_AsLongLong(object.ptr());
    if (number < 0) PyErr_Clear();
    return number;
}

// Whether somebody is told of all that torch does, and may make something else of it.
bool somebody_looks_on(const Torch& torch) {
    return !is_zero(steal(PyObject_CallNoArgs(torch.function_modes))) ||
           !is_zero(steal(PyObject_CallNoArgs(torch.dispatch_modes))) ||
           steal(PyObject_CallNoArgs(torch.transform_level)).ptr() != Py_None;
}

// False for what is no memory of ours to read; also where torch itself says so.
bool told(const Torch& torch, nb::handle object, dlpack::Tensor& tensor) {
    if (torch.api->tensor_from_object(object.ptr(), &tensor) == 0)
        return tensor.device_type == dlpack::cpu;
    PyErr_Clear();
    return false;
}

// The number of elements, if they lie one after the other.
std::optional<std::size_t> contiguous_count(const dlpack::Tensor& tensor) {
    std::int64_t count = 1;
    for (std::int32_t dim = tensor.ndim - 1; dim >= 0; --dim) {
        const std::int64_t length = tensor.shape[dim];
        if (length != 1 && tensor.strides != nullptr && tensor.strides[dim] != count)
            return std::nullopt;
        count *= length;
    }
    return std::size_t(count);
}

}  // namespace

std::optional<TensorMemory> read_tensor(nb::handle object) {
    const Torch* torch = torch_of(Py_TYPE(object.ptr()));
    if (torch == nullptr || somebody_looks_on(*torch)) return std::nullopt;
    if (steal(PyObject_GetAttr(object.ptr(), torch->requires_grad)).ptr() != Py_False ||
        asked(object, torch->is_neg).ptr() != Py_False)
        return std::nullopt;
    nb::object storage = asked(object, torch->untyped_storage);
    if (!storage.is_valid()) return std::nullopt;
    const std::int64_t held = number_of(asked(storage, torch->nbytes));
    const std::int64_t offset = number_of(asked(object, torch->storage_offset));
    dlpack::Tensor tensor;
    if (held < 0 || offset < 0 || !told(*torch, object, tensor)) return std::nullopt;
    const auto dtype = dlpack::dtype_of(tensor.dtype);
    const auto count = contiguous_count(tensor);
    // What has no memory, or no element, is not ours to judge.
    if (!dtype || !count || *count == 0 || tensor.data == nullptr) return std::nullopt;
    const std::size_t reach = (std::size_t(offset) + *count) * itemsize(*dtype);
    if (reach > std::size_t(held)) return std::nullopt;
    const bool complex = *dtype == DType::complex64 || *dtype == DType::complex128;
    if (complex && asked(object, torch->is_conj).ptr() != Py_False) return std::nullopt;
    return TensorMemory{static_cast<std::byte*>(tensor.data) + tensor.byte_offset, *count, *dtype,
                        {reinterpret_cast<const Py_ssize_t*>(tensor.shape), std::size_t(tensor.ndim)},
                        std::move(storage)};
}

nb::object tensor_shape(nb::handle object) {
    const Torch* torch = torch_of(Py_TYPE(object.ptr()));
    dlpack::Tensor tensor;
    if (torch == nullptr || !told(*torch, object, tensor)) return nb::none();
    nb::object shape = nb::steal(PyTuple_New(tensor.ndim));
    if (!shape.is_valid()) throw nb::python_error();
    for (std::int32_t dim = 0; dim < tensor.ndim; ++dim)
        PyTuple_SET_ITEM(shape.ptr(), dim, PyLong_FromLongLong(tensor.shape[dim]));
    return shape;
}

void bump_version(nb::handle tensor) {
    const Torch* torch = torch_of(Py_TYPE(tensor.ptr()));
    if (torch == nullptr) return;
    const nb::tuple one = nb::make_tuple(tensor);
    if (!nb::steal(PyObject_CallOneArg(torch->increment_version, one.ptr())).is_valid())
        throw nb::python_error();
}

}  // namespace roundelay
