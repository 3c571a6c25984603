// Folds for Python: what tests and benchmarks call; engines fold from C++.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string_view.h>

#include <string>
#include <vector>

#include "lock_py.hpp"
#include "reduce.hpp"

namespace nb = nanobind;

namespace roundelay {

namespace {

// The bytes of an object that speaks the buffer protocol, for as long as this lives.
class Bytes {
public:
    Bytes(nb::handle object, bool writable) {
        const int flags = writable ? PyBUF_WRITABLE : PyBUF_SIMPLE;
        if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nb::python_error();
    }
    Bytes(Bytes&& other) noexcept : view_(other.view_) { other.view_.obj = nullptr; }
    Bytes(const Bytes&) = delete;
    Bytes& operator=(const Bytes&) = delete;
    Bytes& operator=(Bytes&&) = delete;
    ~Bytes() { PyBuffer_Release(&view_); }

    void* data() const { return view_.buf; }
    std::size_t size() const { return static_cast<std::size_t>(view_.len); }

private:
    Py_buffer view_;
};

[[noreturn]] void refuse(const std::string& message) { throw nb::value_error(message.c_str()); }

std::string quoted(std::string_view name) { return "'" + std::string(name) + "'"; }

// Hold the buffers of a list for the length of a call.
std::vector<Bytes> hold(const char* what, nb::list objects, bool writable) {
    std::vector<Bytes> held;
    for (nb::handle object : objects) held.emplace_back(object, writable);
    if (held.empty()) refuse(std::string("fold needs at least one of ") + what + ".");
    return held;
}

void fold_buffers(std::string_view op_name, std::string_view dtype_name, nb::list dsts,
                  nb::list srcs, int divide_by) {
    const auto op = op_named(op_name);
    if (!op) refuse("fold knows no reduction " + quoted(op_name) + ".");
    const auto dtype = dtype_named(dtype_name);
    if (!dtype) refuse("fold knows no dtype " + quoted(dtype_name) + ".");
    if (!supports(*op, *dtype)) {
        refuse(std::string(op_name) + " does not take " + quoted(dtype_name) + ".");
    }
    if (divide_by != 0 && (*op != Op::avg || divide_by < 0)) {
        refuse("divide_by is a positive number, for avg only; it is " + std::to_string(divide_by) +
               ".");
    }
    const std::vector<Bytes> writable = hold("dsts", dsts, true);
    const std::vector<Bytes> readable = hold("srcs", srcs, false);
    const std::size_t bytes = readable[0].size();
    const std::size_t record = record_size(*op, *dtype);
    if (bytes % record != 0) {
        refuse(std::to_string(bytes) + " bytes are no whole number of elements of " +
               std::to_string(record) + " bytes.");
    }
    std::vector<void*> to;
    std::vector<const void*> from;
    for (const Bytes& dst : writable) {
        if (dst.size() != bytes) refuse("All buffers must have the length of the first source.");
        to.push_back(dst.data());
    }
    for (const Bytes& src : readable) {
        if (src.size() != bytes) refuse("All buffers must have the length of the first source.");
        from.push_back(src.data());
    }
    const Unlocked unlocked;
    fold(*op, *dtype, to.data(), static_cast<int>(to.size()), from.data(),
         static_cast<int>(from.size()), bytes / record, divide_by);
}

bool copy_checked_buffers(nb::handle dst, nb::handle src, std::string_view dtype_name) {
    const auto dtype = dtype_named(dtype_name);
    if (!dtype || *dtype == DType::complex64 || *dtype == DType::complex128) {
        refuse("copy_checked copies no " + quoted(dtype_name) + ".");
    }
    const Bytes to(dst, true), from(src, false);
    if (to.size() != from.size() || from.size() % itemsize(*dtype) != 0) {
        refuse("copy_checked needs two buffers of one length, in whole elements.");
    }
    const auto* begin = static_cast<const char*>(from.data());
    const auto* target = static_cast<const char*>(to.data());
    if (begin < target + to.size() && target < begin + from.size()) {
        refuse("copy_checked needs two buffers that do not overlap.");
    }
    const Unlocked unlocked;
    return copy_checked(*dtype, to.data(), from.data(), from.size() / itemsize(*dtype));
}

// Hand two buffers to a conversion between float32 and bfloat16, once they fit.
template <void (*Convert)(void*, const void*, std::size_t), std::size_t To, std::size_t From>
void convert_buffers(nb::handle dst, nb::handle src) {
    const Bytes to(dst, true), from(src, false);
    const std::size_t count = from.size() / From;
    const auto* begin = static_cast<const char*>(from.data());
    const auto* target = static_cast<const char*>(to.data());
    if (from.size() % From != 0 || to.size() != count * To) {
        refuse("A conversion needs two buffers of as many elements: one of float32, one of bfloat16.");
    }
    if (begin < target + to.size() && target < begin + from.size()) {
        refuse("A conversion needs two buffers that do not overlap.");
    }
    const Unlocked unlocked;
    Convert(to.data(), from.data(), count);
}

bool supports_named(std::string_view op_name, std::string_view dtype_name) {
    const auto op = op_named(op_name);
    const auto dtype = dtype_named(dtype_name);
    return op && dtype && supports(*op, *dtype);
}

void choose_instruction_set(std::string_view name) {
    if (!use_instruction_set(name)) {
        refuse("This CPU has no kernels for " + quoted(name) +
               "; instruction_sets() names those it has.");
    }
}

}  // namespace

void register_reduce(nb::module_& module) {
    module.def("fold", &fold_buffers, nb::arg("op"), nb::arg("dtype"), nb::arg("dsts"),
               nb::arg("srcs"), nb::arg("divide_by") = 0,
               "Fold contiguous source buffers from left to right into every destination.");
    module.def("copy_checked", &copy_checked_buffers, nb::arg("dst"), nb::arg("src"),
               nb::arg("dtype"), "Copy elements, and tell whether all of them are finite.");
    module.def("to_bfloat16", &convert_buffers<&to_bfloat16, 2, 4>, nb::arg("dst"), nb::arg("src"),
               "Round float32 to bfloat16, to nearest even.");
    module.def("from_bfloat16", &convert_buffers<&from_bfloat16, 4, 2>, nb::arg("dst"),
               nb::arg("src"), "Widen bfloat16 to float32, exactly.");
    module.def("supports", &supports_named, nb::arg("op"), nb::arg("dtype"),
               "Say whether there is a kernel for this reduction and dtype.");
    module.def("instruction_set", &instruction_set, "Name the instruction set whose kernels run.");
    module.def("use_instruction_set", &choose_instruction_set, nb::arg("name"),
               "Run the kernels of this instruction set from now on.");
}

}  // namespace roundelay
