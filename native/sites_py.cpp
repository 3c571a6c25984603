#include "sites_py.hpp"

#include <algorithm>
#include <cstdio>
#include <vector>

namespace roundelay {

namespace {
std::string package;
std::vector<std::string> others;         // packages whose lines say nothing to the user either
thread_local nb::object* borrowed = nullptr;  // the place that this thread works for, if another's

bool begins(const char* file, const std::string& folder) {
    return !folder.empty() && std::string_view(file).substr(0, folder.size()) == folder;
}

bool inside(PyCodeObject* code) {
    const char* file = PyUnicode_AsUTF8(code->co_filename);
    if (file == nullptr) {
        PyErr_Clear();
        return false;
    }
    if (begins(file, package)) return true;
    for (const std::string& folder : others) {
        if (begins(file, folder)) return true;
    }
    return false;
}

// The innermost frame whose code is not `ours`, as a new reference; null when there is none.
template <class Ours>
PyFrameObject* outside(Ours ours) {
    PyFrameObject* frame = PyEval_GetFrame();
    Py_XINCREF(frame);
    while (frame != nullptr) {
        PyCodeObject* code = PyFrame_GetCode(frame);
        const bool skip = ours(code);
        Py_DECREF(code);
        if (!skip) return frame;
        PyFrameObject* back = PyFrame_GetBack(frame);
        Py_DECREF(frame);
        frame = back;
    }
    return nullptr;
}
}  // namespace

void Sites::set_package(const std::string& folder) { package = folder; }

void Sites::skip_package(const std::string& folder) {
    if (std::find(others.begin(), others.end(), folder) == others.end()) others.push_back(folder);
}

nb::object Sites::caller() {
    if (borrowed != nullptr) return *borrowed;
    PyFrameObject* frame = outside(inside);
    if (frame == nullptr) return nb::none();
    const nb::object held = nb::steal(reinterpret_cast<PyObject*>(frame));
    const nb::object code = nb::steal(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
    return nb::make_tuple(code, PyFrame_GetLasti(frame), PyFrame_GetLineNumber(frame));
}

void Sites::work_for(nb::object place) {
    delete borrowed;
    borrowed = place.is_none() ? nullptr : new nb::object(std::move(place));
}

bool Sites::ours(PyCodeObject* code) {
    const auto known = ours_.find(code);
    if (known != ours_.end()) return known->second.second;
    const bool found = inside(code);
    ours_.emplace(code, std::pair(nb::borrow(reinterpret_cast<PyObject*>(code)), found));
    return found;
}

std::uint32_t Sites::number(PyCodeObject* code, int offset, PyFrameObject* frame, int line) {
    const Key key{code, offset};
    const auto known = numbers_.find(key);
    if (known != numbers_.end()) return known->second;
    // Places beyond the table share its first entry, which says nothing.
    if (numbers_.size() + 1 >= site_count) return 0;
    const auto number = std::uint32_t(numbers_.size() + 1);
    const char* file = PyUnicode_AsUTF8(code->co_filename);
    if (file == nullptr) PyErr_Clear();
    const std::string_view path = file == nullptr ? "?" : file;
    // The end of a long path tells more than its beginning.
    const std::size_t most = site_length - 16;
    const auto shown = path.size() > most ? path.substr(path.size() - most) : path;
    std::snprintf(world_->site(world_rank_, number).data(), site_length, "%.*s:%d",
                  int(shown.size()), shown.data(),
                  frame == nullptr ? line : PyFrame_GetLineNumber(frame));
    numbers_.emplace(key, number);
    return number;
}

std::uint32_t Sites::here() {
    if (borrowed != nullptr) {
        const auto place = nb::cast<nb::tuple>(*borrowed);
        auto* code = reinterpret_cast<PyCodeObject*>(place[0].ptr());
        (void)ours(code);  // keeps it alive
        return number(code, nb::cast<int>(place[1]), nullptr, nb::cast<int>(place[2]));
    }
    PyFrameObject* innermost = PyEval_GetFrame();
    if (innermost == nullptr) return 0;
    PyCodeObject* code = PyFrame_GetCode(innermost);
    const Key seen{code, PyFrame_GetLasti(innermost)};
    Py_DECREF(code);  // the frame has it
    Recent& recent = recent_[(Hash()(seen) >> 4) % recent_.size()];
    if (recent.key == seen) return recent.number;
    PyFrameObject* frame = outside([this](PyCodeObject* one) { return ours(one); });
    if (frame == nullptr) return 0;
    code = PyFrame_GetCode(frame);
    const std::uint32_t found = number(code, PyFrame_GetLasti(frame), frame, 0);
    Py_DECREF(code);
    Py_DECREF(frame);
    if (frame == innermost) recent = {seen, found};
    return found;
}

}  // namespace roundelay
