// Methods of communicators that run in here: a plain call enters no Python on its way.
//
// A method has the Python function that it stands for, which takes what is not plain. Its parameters say by
// their names what they are.
#include <nanobind/nanobind.h>
#include <structmember.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <exception>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "group_py.hpp"
#include "world.hpp"

namespace roundelay {

namespace {

namespace nb = nanobind;

// The fast path of one communicator: that of its group, with a label on each call, or none.
class FastPath {
   public:
    FastPath(nb::object group, std::vector<int> labels)
        : held_(std::move(group)), group_(py_group(held_)), core_(group_of(held_)),
          labels_(std::move(labels)) {}

    bool run(int collective, nb::handle given, nb::handle result, int op, int root) const {
        const int label = labels_.empty() ? 0 : labels_[std::size_t(collective)];
        return fast_path(group_, collective, given, result, op, root, label);
    }
    int rank() const { return core_.rank(); }
    int size() const { return core_.size(); }

   private:
    nb::object held_;
    PyGroup& group_;
    const Group& core_;
    std::vector<int> labels_;  // by collective
};

// What a parameter is. The rest is left out, or None, in plain calls.
enum class Role { x, op, root, out, axis, rest };
constexpr std::array<std::string_view, 5> role_names = {"x", "op", "root", "out", "axis"};

struct Method {
    int collective = 0;
    int op = 0;                      // of calls that name none
    bool in_place = false;           // without out=, x is what comes out
    bool given_at_root = false;      // others give nothing
    bool result_at_root = false;     // others get nothing
    int axis_bit = 0;                // in the word of a call along axis 0
    std::size_t positional = 0;
    std::vector<PyObject*> names;    // of parameters after self, interned; they live as long as the function
    std::vector<Role> roles;
};

struct FastMethod {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject* function;
    PyObject* ops;      // numbers of the reductions that it takes, by name; or null
    PyObject* nothing;  // what goes in and comes out of one that has no x; or null
    PyObject* dict;
    Method* method;
};

using Values = std::array<PyObject*, role_names.size()>;  // borrowed; null where nothing was given

PyObject* value(const Values& values, Role role) { return values[std::size_t(role)]; }

// False for what has names or values that a plain call does not have; the function says what is wrong.
bool sort_out(const Method& method, PyObject* const* args, std::size_t count, PyObject* names, Values& values) {
    const auto take = [&](std::size_t at, PyObject* given) {
        const Role role = method.roles[at];
        if (given == Py_None) return role != Role::op && role != Role::root;
        if (role == Role::rest) return false;
        values[std::size_t(role)] = given;
        return true;
    };
    if (count > method.positional) return false;
    for (std::size_t at = 0; at < count; ++at)
        if (!take(at, args[at])) return false;
    const std::size_t named = names == nullptr ? 0 : std::size_t(PyTuple_GET_SIZE(names));
    for (std::size_t number = 0; number < named; ++number) {
        const auto found = std::ranges::find(method.names, PyTuple_GET_ITEM(names, Py_ssize_t(number)));
        const auto at = std::size_t(found - method.names.begin());
        if (found == method.names.end() || at < count || !take(at, args[count + number])) return false;
    }
    return true;
}

// A whole number of Python's own kind, from 0 to `most`; else -1.
int small_number(PyObject* object, int most) {
    if (!PyLong_CheckExact(object)) return -1;
    int overflow = 0;
    const long found = PyLong_AsLongAndOverflow(object, &overflow);
    return overflow != 0 || found < 0 || found > most ? -1 : int(found);
}

// What a communicator has for its plain calls: a path in here, or any callable.
struct Path {
    nb::handle comm, object;
    const FastPath* native;

    int rank() const { return native != nullptr ? native->rank() : nb::cast<int>(comm.attr("rank")); }
    int size() const { return native != nullptr ? native->size() : nb::cast<int>(comm.attr("size")); }
    bool run(int collective, nb::handle given, nb::handle result, int op, int word) const {
        if (native != nullptr) return native->run(collective, given, result, op, word);
        return nb::cast<bool>(object(collective, given, result, op, word));
    }
};

// What the caller gets, borrowed; null if this is no plain call, or with an error set.
PyObject* run_plain(const FastMethod& self, const Path& path, const Values& values) {
    const Method& method = *self.method;
    int root = 0, op = method.op, word = 0;
    if (PyObject* given = value(values, Role::root); given != nullptr) {
        root = small_number(given, path.size() - 1);
        if (root < 0) return nullptr;
    }
    if (PyObject* given = value(values, Role::op); given != nullptr) {
        PyObject* found = PyUnicode_CheckExact(given) ? PyDict_GetItemWithError(self.ops, given) : nullptr;
        if (found == nullptr) return nullptr;
        op = int(PyLong_AsLong(found));
    }
    if (PyObject* given = value(values, Role::axis); given != nullptr) {
        if (small_number(given, 0) != 0) return nullptr;
        word = method.axis_bit;
    }
    const bool everywhere = !method.given_at_root && !method.result_at_root;
    const bool at_root = everywhere || path.rank() == root;
    PyObject* x = self.nothing != nullptr ? self.nothing : value(values, Role::x);
    if (method.given_at_root && !at_root) x = Py_None;
    PyObject* result = value(values, Role::out);
    if (result == nullptr && method.in_place) result = x;
    if (method.result_at_root && !at_root) result = Py_None;
    if (x == nullptr || result == nullptr) return nullptr;
    if (!path.run(method.collective, x, result, op, root | word)) return nullptr;
    return self.nothing != nullptr ? Py_None : result;
}

PyObject* call_method(PyObject* callable, PyObject* const* args, std::size_t flags, PyObject* names) {
    static PyObject* const attribute = PyUnicode_InternFromString("_fast_path");
    static PyTypeObject* const native = reinterpret_cast<PyTypeObject*>(nb::type<FastPath>().ptr());
    const auto& self = *reinterpret_cast<FastMethod*>(callable);
    const auto count = std::size_t(PyVectorcall_NARGS(flags));
    Values values{};
    if (count > 0 && sort_out(*self.method, args + 1, count - 1, names, values)) try {
        // Held, since a signal's handler may close the communicator meanwhile.
        const nb::object found = nb::steal(PyObject_GetAttr(args[0], attribute));
        if (!found.is_valid()) throw nb::python_error();
        const bool here = Py_TYPE(found.ptr()) == native;
        const Path path{args[0], found, here ? nb::inst_ptr<FastPath>(found) : nullptr};
        if (PyObject* result = run_plain(self, path, values); result != nullptr) return Py_NewRef(result);
        if (PyErr_Occurred() != nullptr) return nullptr;
    } catch (nb::python_error& error) {
        error.restore();
        return nullptr;
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
        return nullptr;
    }
    return PyObject_Vectorcall(self.function, args, flags, names);
}

PyObject* bind_method(PyObject* self, PyObject* object, PyObject*) {
    return object == nullptr || object == Py_None ? Py_NewRef(self) : PyMethod_New(self, object);
}

PyObject* repr_method(PyObject* object) {
    return PyObject_Repr(reinterpret_cast<FastMethod*>(object)->function);
}

int visit_method(PyObject* object, visitproc visit, void* arg) {
    auto& self = *reinterpret_cast<FastMethod*>(object);
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self.function);
    Py_VISIT(self.ops);
    Py_VISIT(self.nothing);
    Py_VISIT(self.dict);
    return 0;
}

int clear_method(PyObject* object) {
    auto& self = *reinterpret_cast<FastMethod*>(object);
    Py_CLEAR(self.function);
    Py_CLEAR(self.ops);
    Py_CLEAR(self.nothing);
    Py_CLEAR(self.dict);
    return 0;
}

void drop_method(PyObject* object) {
    PyTypeObject* type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    clear_method(object);
    delete reinterpret_cast<FastMethod*>(object)->method;
    type->tp_free(object);
    Py_DECREF(type);
}

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(FastMethod, call), READONLY, nullptr},
    {"__dictoffset__", T_PYSSIZET, offsetof(FastMethod, dict), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
PyGetSetDef attributes[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};
PyType_Slot slots[] = {
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_repr, reinterpret_cast<void*>(repr_method)},
    {Py_tp_descr_get, reinterpret_cast<void*>(bind_method)},
    {Py_tp_traverse, reinterpret_cast<void*>(visit_method)},
    {Py_tp_clear, reinterpret_cast<void*>(clear_method)},
    {Py_tp_dealloc, reinterpret_cast<void*>(drop_method)},
    {Py_tp_members, members},
    {Py_tp_getset, attributes},
    {0, nullptr},
};
PyType_Spec spec = {"roundelay._core.FastMethod", sizeof(FastMethod), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
                        Py_TPFLAGS_METHOD_DESCRIPTOR,
                    slots};

// Parameters after self, from what Python knows of its function.
Method described(nb::handle function, int collective) {
    Method method;
    method.collective = collective;
    const nb::object code = function.attr("__code__");
    method.positional = nb::cast<std::size_t>(code.attr("co_argcount")) - 1;
    const std::size_t all = method.positional + nb::cast<std::size_t>(code.attr("co_kwonlyargcount"));
    const auto names = nb::cast<nb::tuple>(code.attr("co_varnames"));
    for (std::size_t at = 0; at < all; ++at) {
        const nb::object name = names[at + 1];
        const auto text = nb::cast<std::string>(name);
        method.names.push_back(name.ptr());
        method.roles.push_back(Role(std::ranges::find(role_names, text) - role_names.begin()));
    }
    return method;
}

nb::object fast_method(nb::handle function, int collective, nb::handle ops, int op, bool in_place,
                       bool given_at_root, bool result_at_root, int axis_bit, nb::handle nothing) {
    static PyObject* const type = PyType_FromSpec(&spec);
    if (type == nullptr) throw nb::python_error();
    Method method = described(function, collective);
    method.op = op;
    method.in_place = in_place;
    method.given_at_root = given_at_root;
    method.result_at_root = result_at_root;
    method.axis_bit = axis_bit;
    PyObject* made = PyType_GenericAlloc(reinterpret_cast<PyTypeObject*>(type), 0);
    if (made == nullptr) throw nb::python_error();
    auto& self = *reinterpret_cast<FastMethod*>(made);
    self.call = call_method;
    self.function = Py_NewRef(function.ptr());
    self.ops = ops.is_none() ? nullptr : Py_NewRef(ops.ptr());
    self.nothing = nothing.is_none() ? nullptr : Py_NewRef(nothing.ptr());
    self.method = new Method(std::move(method));
    return nb::steal(made);
}

}  // namespace

void register_fast_method(nb::module_& module) {
    nb::class_<FastPath>(module, "FastPath")
        .def(nb::init<nb::object, std::vector<int>>(), nb::arg("group"),
             nb::arg("labels") = std::vector<int>())
        .def("__call__", &FastPath::run, nb::arg("collective"), nb::arg("given").none(),
             nb::arg("result").none(), nb::arg("op"), nb::arg("root"));
    module.def("fast_method", &fast_method, nb::arg("function"), nb::arg("collective"), nb::kw_only(),
               nb::arg("ops").none() = nb::none(), nb::arg("op") = 0, nb::arg("in_place") = false,
               nb::arg("given_at_root") = false, nb::arg("result_at_root") = false,
               nb::arg("axis_bit") = 0, nb::arg("nothing").none() = nb::none());
}

}  // namespace roundelay
