#include "tensor_py.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <exception>
#include <string>

namespace roundelay {

namespace {

nb::object steal(PyObject* result) {
    if (result == nullptr) PyErr_Clear();
    return nb::steal(result);
}

// A method of a class without arguments, by the C function behind it: to be looked up by name takes longer than
// to answer.
class Question {
   public:
    Question() = default;
    Question(nb::handle type, const char* name) : name_(PyUnicode_InternFromString(name)) {
        const nb::object found = nb::getattr(type, name, nb::none());
        if (Py_TYPE(found.ptr()) != &PyMethodDescr_Type) return;
        const PyMethodDef* method = reinterpret_cast<PyMethodDescrObject*>(found.ptr())->d_method;
        if (method->ml_flags == METH_NOARGS) method_ = method->ml_meth;
    }
    // Nothing, and no Python error, where there is no answer.
    nb::object operator()(nb::handle object) const {
        return steal(method_ != nullptr ? method_(object.ptr(), nullptr)
                                        : PyObject_CallMethodNoArgs(object.ptr(), name_));
    }

   private:
    PyObject* name_ = nullptr;
    PyCFunction method_ = nullptr;
};

// What we call of torch, found when the first tensor comes in, and never let go of. What it offers to compiled
// programs as functions of C, and some of C++ that take and give no more than addresses and numbers, are
// called without Python: methods ask first whether anybody overrides them, which takes ten times as long as
// the answer.
struct Torch {
    using Tensor = void;  // at::Tensor, as those functions know it
    template <class Answer>
    using Tell = std::int32_t(const Tensor*, Answer*);  // 0, or what went wrong

    PyTypeObject* type = nullptr;  // null while nobody has looked
    bool known = false;            // it has all that follows
    std::int64_t (*function_modes)() = nullptr;
    std::int64_t (*dispatch_modes)() = nullptr;
    bool (*requires_grad)(const void* impl) = nullptr;
    bool (*has_storage)(const void* impl) = nullptr;
    bool (*is_neg)(const Tensor*) = nullptr;
    bool (*is_conj)(const Tensor*) = nullptr;
    void (*bump_version)(const Tensor*) = nullptr;
    Tell<std::int32_t>*device = nullptr, *layout = nullptr, *dtype = nullptr;
    Tell<std::int64_t>*dim = nullptr, *storage_size = nullptr, *storage_offset = nullptr;
    Tell<std::int64_t*>*sizes = nullptr, *strides = nullptr;
    Tell<void*>* data = nullptr;
    std::int32_t cpu = 0, strided = 0;  // its numbers of these
    std::array<std::int32_t, dtype_count> dtypes{};
    nb::handle transform_level, increment_version;
    Question untyped_storage;

    std::optional<DType> dtype_of(const Tensor* tensor) const {
        std::int32_t number = -1;
        if (dtype(tensor, &number) != 0) return std::nullopt;
        const auto found = std::ranges::find(dtypes, number);
        return found == dtypes.end() ? std::nullopt : std::optional(DType(found - dtypes.begin()));
    }
    // A strided tensor on the host, the only ones of which the rest may be asked.
    bool on_host(const Tensor* tensor) const {
        std::int32_t where = -1, how = -1;
        return device(tensor, &where) == 0 && where == cpu && layout(tensor, &how) == 0 && how == strided;
    }
    // Its lengths, if its elements lie one after the other, or if that does not matter.
    std::optional<std::span<const std::int64_t>> shape(const Tensor* tensor, bool contiguous) const {
        std::int64_t dims = 0, *lengths = nullptr, *steps = nullptr;
        if (dim(tensor, &dims) != 0 || sizes(tensor, &lengths) != 0) return std::nullopt;
        if (contiguous && strides(tensor, &steps) != 0) return std::nullopt;
        std::int64_t count = 1;
        for (std::int64_t at = contiguous ? dims : 0; at-- > 0; count *= lengths[at])
            if (lengths[at] != 1 && steps[at] != count) return std::nullopt;
        return std::span<const std::int64_t>(lengths, std::size_t(dims));
    }
};

// The tensor behind a Python object: one address, that of its implementation.
struct Object {
    PyObject_HEAD
    void* impl;
};

const Torch::Tensor* tensor_in(nb::handle object) { return &reinterpret_cast<Object*>(object.ptr())->impl; }

template <class Function>
bool find(Function*& function, const std::string& name) {
    for (const char* library : {"libtorch_cpu.so", "libc10.so"}) {
        void* loaded = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
        if (loaded == nullptr) continue;
        function = reinterpret_cast<Function*>(dlsym(loaded, name.c_str()));
        dlclose(loaded);  // which only undoes what dlopen counted
        if (function != nullptr) return true;
    }
    return false;
}

bool find_number(std::int32_t& number, const std::string& name) {
    std::int32_t (*function)() = nullptr;
    if (!find(function, "aoti_torch_" + name)) return false;
    number = function();
    return true;
}

bool find_all(Torch& torch) {
    bool found = find(torch.function_modes, "_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv") &&
                 find(torch.dispatch_modes, "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv") &&
                 find(torch.requires_grad, "_ZNK3c1010TensorImpl13requires_gradEv") &&
                 find(torch.has_storage, "_ZNK3c1010TensorImpl11has_storageEv") &&
                 find(torch.is_neg, "_ZN2at6native6is_negERKNS_6TensorE") &&
                 find(torch.is_conj, "_ZN2at6native7is_conjERKNS_6TensorE") &&
                 find(torch.bump_version, "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE") &&
                 find(torch.device, "aoti_torch_get_device_type") && find(torch.layout, "aoti_torch_get_layout") &&
                 find(torch.dtype, "aoti_torch_get_dtype") && find(torch.dim, "aoti_torch_get_dim") &&
                 find(torch.storage_size, "aoti_torch_get_storage_size") &&
                 find(torch.storage_offset, "aoti_torch_get_storage_offset") &&
                 find(torch.sizes, "aoti_torch_get_sizes") && find(torch.strides, "aoti_torch_get_strides") &&
                 find(torch.data, "aoti_torch_get_data_ptr") && find_number(torch.cpu, "device_type_cpu") &&
                 find_number(torch.strided, "layout_strided");
    for (std::size_t dtype = 0; found && dtype < dtype_count; ++dtype)
        found = find_number(torch.dtypes[dtype], "dtype_" + std::string(dtype_names[dtype]));
    return found;
}

// What C says of a tensor is what Python says, or all tensors take the long way.
bool agrees(const Torch& torch, const nb::object& tensor) {
    const auto* inner = tensor_in(tensor);
    const nb::object of_tensor = tensor.attr("untyped_storage")();
    if (nb::cast<std::uintptr_t>(tensor.attr("_cdata")) != std::uintptr_t(*static_cast<void* const*>(inner)))
        return false;
    void* data = nullptr;
    std::int64_t size = -1, offset = -1;
    return torch.on_host(inner) && torch.data(inner, &data) == 0 && torch.storage_size(inner, &size) == 0 &&
           torch.storage_offset(inner, &offset) == 0 && torch.dtype_of(inner) == DType::float32 &&
           nb::cast<std::uintptr_t>(tensor.attr("data_ptr")()) == std::uintptr_t(data) &&
           nb::cast<std::int64_t>(of_tensor.attr("nbytes")()) == size &&
           nb::cast<std::int64_t>(tensor.attr("storage_offset")()) == offset;
}

Torch found_in(nb::handle module, nb::handle type) {
    Torch torch;
    torch.type = reinterpret_cast<PyTypeObject*>(type.ptr());
    try {
        const nb::object inner = module.attr("_C");
        torch.untyped_storage = Question(type, "untyped_storage");
        torch.increment_version = nb::object(inner.attr("_increment_version")).release();
        torch.transform_level = nb::object(inner.attr("_functorch").attr("maybe_current_level")).release();
        if (torch.type->tp_basicsize < Py_ssize_t(sizeof(Object)) || !find_all(torch)) return torch;
        const nb::object some = module.attr("arange")(4, nb::arg("dtype") = module.attr("float32"),
                                                      nb::arg("device") = "cpu");
        torch.known = agrees(torch, some[nb::slice(1, 3, 1)]);
    } catch (const std::exception&) {
        torch.known = false;  // of another torch
    }
    return torch;
}

// The torch that a type is the plain tensor of, if it is. Under the interpreter lock.
const Torch* torch_of(PyTypeObject* type) {
    static Torch torch;
    if (torch.type == nullptr) [[unlikely]] {
        const char* dot = std::strrchr(type->tp_name, '.');
        if (std::strcmp(dot == nullptr ? type->tp_name : dot + 1, "Tensor") != 0) return nullptr;
        PyObject* module = PyDict_GetItemString(PyImport_GetModuleDict(), "torch");
        if (module == nullptr) return nullptr;
        const nb::object tensor = nb::getattr(module, "Tensor", nb::none());
        if (tensor.ptr() != reinterpret_cast<PyObject*>(type)) return nullptr;
        torch = found_in(module, nb::object(tensor).release());
    }
    return type == torch.type && torch.known ? &torch : nullptr;
}

}  // namespace

bool TensorReader::somebody_looks_on(const void* found) {
    const auto& torch = *static_cast<const Torch*>(found);
    if (!asked_) {
        asked_ = true;
        looks_on_ = torch.function_modes() != 0 || torch.dispatch_modes() != 0 ||
                    steal(PyObject_CallNoArgs(torch.transform_level.ptr())).ptr() != Py_None;
    }
    return looks_on_;
}

std::optional<TensorMemory> TensorReader::read(nb::handle object) {
    const Torch* torch = torch_of(Py_TYPE(object.ptr()));
    if (torch == nullptr || somebody_looks_on(torch)) return std::nullopt;
    const Torch::Tensor* inner = tensor_in(object);
    const void* impl = *static_cast<void* const*>(inner);
    if (impl == nullptr || torch->requires_grad(impl) || !torch->on_host(inner) || !torch->has_storage(impl))
        return std::nullopt;
    const auto dtype = torch->dtype_of(inner);
    const auto shape = torch->shape(inner, true);
    if (!dtype || !shape) return std::nullopt;
    std::size_t count = 1;
    for (const std::int64_t length : *shape) count *= std::size_t(length);
    if (count == 0) return std::nullopt;
    std::int64_t held = 0, offset = 0;
    if (torch->storage_size(inner, &held) != 0 || torch->storage_offset(inner, &offset) != 0 ||
        held < 0 || offset < 0 || (std::size_t(offset) + count) * itemsize(*dtype) > std::size_t(held))
        return std::nullopt;
    const bool complex = *dtype == DType::complex64 || *dtype == DType::complex128;
    if (torch->is_neg(inner) || (complex && torch->is_conj(inner))) return std::nullopt;
    void* data = nullptr;
    if (torch->data(inner, &data) != 0 || data == nullptr) return std::nullopt;
    return TensorMemory{static_cast<std::byte*>(data), count, *dtype,
                        {reinterpret_cast<const Py_ssize_t*>(shape->data()), shape->size()}};
}

nb::object storage_of(nb::handle tensor) {
    const Torch* torch = torch_of(Py_TYPE(tensor.ptr()));
    return torch == nullptr ? nb::object() : torch->untyped_storage(tensor);
}

nb::object tensor_shape(nb::handle object) {
    const Torch* torch = torch_of(Py_TYPE(object.ptr()));
    if (torch == nullptr || !torch->on_host(tensor_in(object))) return nb::none();
    const auto lengths = torch->shape(tensor_in(object), false);
    if (!lengths) return nb::none();
    nb::object shape = nb::steal(PyTuple_New(Py_ssize_t(lengths->size())));
    if (!shape.is_valid()) throw nb::python_error();
    for (std::size_t dim = 0; dim < lengths->size(); ++dim)
        PyTuple_SET_ITEM(shape.ptr(), Py_ssize_t(dim), PyLong_FromLongLong((*lengths)[dim]));
    return shape;
}

void bump_version(nb::handle tensor) {
    const Torch* torch = torch_of(Py_TYPE(tensor.ptr()));
    if (torch == nullptr) return;
    try {
        torch->bump_version(tensor_in(tensor));
    } catch (const std::exception&) {
        // Of a tensor that may not be written now: torch says it once more, to Python.
        (void)nb::steal(PyObject_CallOneArg(torch->increment_version.ptr(), nb::make_tuple(tensor).ptr()));
        if (PyErr_Occurred() != nullptr) throw nb::python_error();
    }
}

}  // namespace roundelay
