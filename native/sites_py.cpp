#include "sites_py.hpp"

#include <cstdio>

namespace roundelay {

namespace {
std::string package;
}

void Sites::set_package(const std::string& folder) { package = folder; }

bool Sites::ours(PyCodeObject* code) {
    const auto known = ours_.find(code);
    if (known != ours_.end()) return known->second.second;
    const char* file = PyUnicode_AsUTF8(code->co_filename);
    if (file == nullptr) PyErr_Clear();
    const bool inside = file != nullptr && !package.empty() &&
                        std::string_view(file).substr(0, package.size()) == package;
    ours_.emplace(code, std::pair(nb::borrow(reinterpret_cast<PyObject*>(code)), inside));
    return inside;
}

std::uint32_t Sites::here() {
    PyFrameObject* frame = PyEval_GetFrame();
    Py_XINCREF(frame);
    while (frame != nullptr) {
        PyCodeObject* code = PyFrame_GetCode(frame);
        if (!ours(code)) {
            const Key key{code, PyFrame_GetLasti(frame)};
            const auto known = numbers_.find(key);
            std::uint32_t number = 0;
            if (known != numbers_.end()) {
                number = known->second;
            } else {
                // Places beyond the table share its first entry, which says nothing.
                number = numbers_.size() + 1 < site_count ? std::uint32_t(numbers_.size() + 1) : 0;
                if (number != 0) {
                    const char* file = PyUnicode_AsUTF8(code->co_filename);
                    if (file == nullptr) PyErr_Clear();
                    const std::string_view path = file == nullptr ? "?" : file;
                    // The end of a long path tells more than its beginning.
                    const std::size_t most = site_length - 16;
                    const auto shown = path.size() > most ? path.substr(path.size() - most) : path;
                    std::snprintf(world_->site(world_rank_, number).data(), site_length, "%.*s:%d",
                                  int(shown.size()), shown.data(), PyFrame_GetLineNumber(frame));
                    numbers_.emplace(key, number);
                }
            }
            Py_DECREF(code);
            Py_DECREF(frame);
            return number;
        }
        Py_DECREF(code);
        PyFrameObject* back = PyFrame_GetBack(frame);
        Py_DECREF(frame);
        frame = back;
    }
    return 0;
}

}  // namespace roundelay
