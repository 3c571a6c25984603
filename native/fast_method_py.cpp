// Methods of communicators that run in here: a plain call enters no Python on its way.
//
// A method has the Python function that it stands for, which takes what is not plain. Its parameters say by
// their names what they are. It is a method descriptor, as those of Python's own classes are, which all
// who look at classes know: torch.compile, inspect, the interpreter's own fast path for calls.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "group_py.hpp"

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
    int op = 0;                   // of calls that name none
    bool in_place = false;        // without out=, x is what comes out
    bool given_at_root = false;   // others give nothing
    bool result_at_root = false;  // others get nothing
    int axis_bit = 0;             // in the word of a call along axis 0
    std::size_t positional = 0;
    std::vector<PyObject*> names;  // of parameters after self, interned; they live as long as the function
    std::vector<Role> roles;
    nb::object function, ops, nothing;  // ops: numbers of reductions by name; nothing: in the place of x
    std::string name, doc;
    PyMethodDef definition{};
};

// One for each C function below, as long as the process lives: a method of C has nothing else to know
// itself by.
constexpr std::size_t most_methods = 16;
std::array<Method*, most_methods> methods{};

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
PyObject* run_plain(const Method& method, const Path& path, const Values& values) {
    int root = 0, op = method.op, word = 0;
    if (PyObject* given = value(values, Role::root); given != nullptr) {
        root = small_number(given, path.size() - 1);
        if (root < 0) return nullptr;
    }
    if (PyObject* given = value(values, Role::op); given != nullptr) {
        PyObject* found = PyUnicode_CheckExact(given) ? PyDict_GetItemWithError(method.ops.ptr(), given) : nullptr;
        if (found == nullptr) return nullptr;
        op = int(PyLong_AsLong(found));
    }
    if (PyObject* given = value(values, Role::axis); given != nullptr) {
        if (small_number(given, 0) != 0) return nullptr;
        word = method.axis_bit;
    }
    const bool everywhere = !method.given_at_root && !method.result_at_root;
    const bool at_root = everywhere || path.rank() == root;
    PyObject* x = method.nothing.is_valid() ? method.nothing.ptr() : value(values, Role::x);
    if (method.given_at_root && !at_root) x = Py_None;
    PyObject* result = value(values, Role::out);
    if (result == nullptr && method.in_place) result = x;
    if (method.result_at_root && !at_root) result = Py_None;
    if (x == nullptr || result == nullptr) return nullptr;
    if (!path.run(method.collective, x, result, op, root | word)) return nullptr;
    return method.nothing.is_valid() ? Py_None : result;
}

PyObject* call_method(const Method& method, PyObject* comm, PyObject* const* args, std::size_t count,
                      PyObject* names) {
    static PyObject* const attribute = PyUnicode_InternFromString("_fast_path");
    static PyTypeObject* const native = reinterpret_cast<PyTypeObject*>(nb::type<FastPath>().ptr());
    Values values{};
    if (sort_out(method, args, count, names, values)) try {
            // Held, since a signal's handler may close the communicator meanwhile.
            const nb::object found = nb::steal(PyObject_GetAttr(comm, attribute));
            if (!found.is_valid()) throw nb::python_error();
            const bool here = Py_TYPE(found.ptr()) == native;
            const Path path{comm, found, here ? nb::inst_ptr<FastPath>(found) : nullptr};
            if (PyObject* result = run_plain(method, path, values); result != nullptr) return Py_NewRef(result);
            if (PyErr_Occurred() != nullptr) return nullptr;
        } catch (nb::python_error& error) {
            error.restore();
            return nullptr;
        } catch (const std::exception& error) {
            PyErr_SetString(PyExc_RuntimeError, error.what());
            return nullptr;
        }
    const std::size_t named = names == nullptr ? 0 : std::size_t(PyTuple_GET_SIZE(names));
    std::vector<PyObject*> all{comm};
    all.insert(all.end(), args, args + count + named);
    return PyObject_Vectorcall(method.function.ptr(), all.data(), count + 1, names);
}

template <std::size_t number>
PyObject* entry(PyObject* comm, PyObject* const* args, Py_ssize_t count, PyObject* names) {
    return call_method(*methods[number], comm, args, std::size_t(count), names);
}

using Entry = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*);

template <std::size_t... numbers>
constexpr auto all_entries(std::index_sequence<numbers...>) {
    return std::array<Entry, sizeof...(numbers)>{entry<numbers>...};
}
constexpr auto entries = all_entries(std::make_index_sequence<most_methods>());

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

// A method of that class in the place of its function; the doc string begins with the signature.
nb::object fast_method(nb::handle owner, nb::handle function, const std::string& doc, int collective,
                       nb::handle ops, int op, bool in_place, bool given_at_root, bool result_at_root,
                       int axis_bit, nb::handle nothing) {
    const auto place = std::ranges::find(methods, nullptr);
    if (place == methods.end()) throw nb::index_error("no more methods");
    auto method = std::make_unique<Method>(described(function, collective));
    method->op = op;
    method->in_place = in_place;
    method->given_at_root = given_at_root;
    method->result_at_root = result_at_root;
    method->axis_bit = axis_bit;
    method->function = nb::borrow(function);
    if (!ops.is_none()) method->ops = nb::borrow(ops);
    if (!nothing.is_none()) method->nothing = nb::borrow(nothing);
    method->name = nb::cast<std::string>(function.attr("__name__"));
    method->doc = doc;
    const auto called = entries[std::size_t(place - methods.begin())];
    method->definition = {method->name.c_str(), reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(called)),
                          METH_FASTCALL | METH_KEYWORDS, method->doc.c_str()};
    PyObject* made = PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(owner.ptr()), &method->definition);
    if (made == nullptr) throw nb::python_error();
    *place = method.release();
    return nb::steal(made);
}

}  // namespace

void register_fast_method(nb::module_& module) {
    nb::class_<FastPath>(module, "FastPath")
        .def(nb::init<nb::object, std::vector<int>>(), nb::arg("group"),
             nb::arg("labels") = std::vector<int>())
        .def("__call__", &FastPath::run, nb::arg("collective"), nb::arg("given").none(),
             nb::arg("result").none(), nb::arg("op"), nb::arg("root"));
    module.def("fast_method", &fast_method, nb::arg("owner"), nb::arg("function"), nb::arg("doc"),
               nb::arg("collective"), nb::kw_only(),
               nb::arg("ops").none() = nb::none(), nb::arg("op") = 0, nb::arg("in_place") = false,
               nb::arg("given_at_root") = false, nb::arg("result_at_root") = false,
               nb::arg("axis_bit") = 0, nb::arg("nothing").none() = nb::none());
}

}  // namespace roundelay
