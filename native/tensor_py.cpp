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

nb::object steal(PyObject* result) {
    if (result == nullptr) PyErr_Clear();
    return nb::steal(result);
}

// What an object of a class tells of itself, by the C function behind its attribute, or behind its method
// without arguments: to be looked up by name takes longer than to answer.
class Question {
   public:
    Question() = default;
    Question(nb::handle type, const char* name) : name_(PyUnicode_InternFromString(name)) {
        const nb::object found = nb::getattr(type, name, nb::none());
        if (Py_TYPE(found.ptr()) == &PyGetSetDescr_Type) {
            attribute_ = reinterpret_cast<PyGetSetDescrObject*>(found.ptr())->d_getset;
        } else if (Py_TYPE(found.ptr()) == &PyMethodDescr_Type) {
            const PyMethodDef* method = reinterpret_cast<PyMethodDescrObject*>(found.ptr())->d_method;
            if (method->ml_flags == METH_NOARGS) method_ = method->ml_meth;
        }
    }
    // Nothing, and no Python error, where there is no answer.
    nb::object operator()(nb::handle object) const {
        if (method_ != nullptr) return steal(method_(object.ptr(), nullptr));
        if (attribute_ != nullptr) return steal(attribute_->get(object.ptr(), attribute_->closure));
        return steal(PyObject_CallMethodNoArgs(object.ptr(), name_));
    }

   private:
    PyObject* name_ = nullptr;
    PyCFunction method_ = nullptr;
    const PyGetSetDef* attribute_ = nullptr;
};

// A function of a module, without arguments or with one.
class Function {
   public:
    Function() = default;
    Function(nb::handle module, const char* name) : function_(nb::object(module.attr(name)).release().ptr()) {
        if (PyCFunction_CheckExact(function_) == 0) return;
        const int kind = PyCFunction_GET_FLAGS(function_);
        if (kind == METH_NOARGS || kind == METH_O) direct_ = PyCFunction_GET_FUNCTION(function_);
    }
    PyObject* operator()(PyObject* given = nullptr) const {
        if (direct_ != nullptr) return direct_(PyCFunction_GET_SELF(function_), given);
        return given == nullptr ? PyObject_CallNoArgs(function_) : PyObject_CallOneArg(function_, given);
    }

   private:
    PyObject* function_ = nullptr;
    PyCFunction direct_ = nullptr;
};

// What we call of torch, found when the first tensor comes in, and never let go of.
struct Torch {
    PyTypeObject* tensor = nullptr;
    const dlpack::ExchangeApi* api = nullptr;  // null if this torch lacks any of what follows
    Function increment_version, function_modes, dispatch_modes, transform_level;
    Question requires_grad, is_neg, is_conj, untyped_storage, nbytes, storage_offset;
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
    try {
        torch.requires_grad = Question(type, "requires_grad");
        torch.is_neg = Question(type, "is_neg");
        torch.is_conj = Question(type, "is_conj");
        torch.untyped_storage = Question(type, "untyped_storage");
        torch.storage_offset = Question(type, "storage_offset");
        torch.nbytes = Question(module.attr("UntypedStorage"), "nbytes");
        const nb::object inner = module.attr("_C");
        torch.increment_version = Function(inner, "_increment_version");
        torch.function_modes = Function(inner, "_len_torch_function_stack");
        torch.dispatch_modes = Function(inner, "_len_torch_dispatch_stack");
        torch.transform_level = Function(inner.attr("_functorch"), "maybe_current_level");
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
    return !is_zero(steal(torch.function_modes())) || !is_zero(steal(torch.dispatch_modes())) ||
           steal(torch.transform_level()).ptr() != Py_None;
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
    if (torch->requires_grad(object).ptr() != Py_False || torch->is_neg(object).ptr() != Py_False)
        return std::nullopt;
    nb::object storage = torch->untyped_storage(object);
    if (!storage.is_valid()) return std::nullopt;
    const std::int64_t held = number_of(torch->nbytes(storage));
    const std::int64_t offset = number_of(torch->storage_offset(object));
    dlpack::Tensor tensor;
    if (held < 0 || offset < 0 || !told(*torch, object, tensor)) return std::nullopt;
    const auto dtype = dlpack::dtype_of(tensor.dtype);
    const auto count = contiguous_count(tensor);
    // What has no memory, or no element, is not ours to judge.
    if (!dtype || !count || *count == 0 || tensor.data == nullptr) return std::nullopt;
    const std::size_t reach = (std::size_t(offset) + *count) * itemsize(*dtype);
    if (reach > std::size_t(held)) return std::nullopt;
    const bool complex = *dtype == DType::complex64 || *dtype == DType::complex128;
    if (complex && torch->is_conj(object).ptr() != Py_False) return std::nullopt;
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
    if (!nb::steal(torch->increment_version(one.ptr())).is_valid())
        throw nb::python_error();
}

}  // namespace roundelay
