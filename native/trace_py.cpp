// The Python face of traces.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "trace.hpp"

namespace nb = nanobind;

namespace roundelay {

void register_trace(nb::module_& module) {
    nb::class_<Trace>(module, "Trace")
        .def(nb::new_([](const std::string& path, int rank, int size, nb::bytes job,
                         std::size_t events) {
                 const auto* first = reinterpret_cast<const std::uint8_t*>(job.c_str());
                 return std::make_shared<Trace>(path, rank, size, std::span(first, job.size()), events);
             }),
             nb::arg("path"), nb::arg("rank"), nb::arg("size"), nb::arg("job"),
             nb::arg("events") = trace_events)
        .def_prop_ro("path", &Trace::path)
        .def_prop_ro("begun", [](Trace& trace) { return trace.header().begun.load(); })
        .def("string", [](Trace& trace, const std::string& text) { return trace.string(text); })
        .def("describe",
             [](Trace& trace, const std::string& host, const std::string& program) {
                 trace.header().host = trace.string(host);
                 trace.header().program = trace.string(program);
             })
        // The names of collectives, algorithms, dtypes or reductions, by number.
        .def("set_table",
             [](Trace& trace, const std::string& table, const std::vector<std::string>& names) {
                 TraceHeader& header = trace.header();
                 TraceTable found{};
                 for (const std::string& name : names) {
                     // With its number: algorithms of several collectives have the same short name.
                     const auto text = table + " " + std::to_string(found.count) + ":" + name;
                     const std::uint32_t number = trace.string(text);
                     if (found.count++ == 0) found.first = number;
                 }
                 (table == "collective"  ? header.collectives
                  : table == "algorithm" ? header.algorithms
                  : table == "dtype"     ? header.dtypes
                                         : header.ops) = found;
             })
        .def("list_group", &Trace::list_group, nb::arg("serial"), nb::arg("rank"), nb::arg("size"))
        .def("align", &Trace::align)
        .def("name_next", &Trace::name_next, nb::arg("name"))
        .def(
            "begin",
            [](Trace& trace, int kind, std::uint32_t name, std::uint64_t number, std::uint64_t bytes) {
                return trace.begin({.number = 0, .asked_ns = 0, .began_ns = 0, .ended_ns = 0,
                                    .waited_ns = 0, .call = number, .bytes = bytes, .group = 0,
                                    .count = 0, .site = 0, .name = name, .thread = 0,
                                    .waits_for = -1, .kind = Traced(kind), .collective = 0xff,
                                    .algorithm = 0xff, .dtype = 0xff, .op = 0xff, .failed = 0,
                                    .way = 0, .unused = 0},
                                   0);
            },
            nb::arg("kind"), nb::arg("name") = 0, nb::arg("number") = 0, nb::arg("nbytes") = 0)
        .def(
            "begin_call",
            [](Trace& trace, std::uint64_t group, std::uint64_t call, int collective, int algorithm,
               int dtype, int op, std::uint64_t count, std::uint64_t bytes, const std::string& site) {
                return trace.begin(
                    {.number = 0, .asked_ns = 0, .began_ns = 0, .ended_ns = 0, .waited_ns = 0,
                     .call = call, .bytes = bytes, .group = group, .count = count,
                     .site = trace.string(site), .name = trace.take_name(), .thread = 0,
                     .waits_for = -1, .kind = Traced::call, .collective = std::uint8_t(collective),
                     .algorithm = std::uint8_t(algorithm), .dtype = std::uint8_t(dtype),
                     .op = std::uint8_t(op), .failed = 0, .way = 0, .unused = 0},
                    0);
            },
            nb::arg("group"), nb::arg("call"), nb::arg("collective"), nb::arg("algorithm"),
            nb::arg("dtype"), nb::arg("op"), nb::arg("count"), nb::arg("nbytes"), nb::arg("site"))
        .def(
            "end",
            [](Trace& trace, std::uint64_t number, bool failed) { trace.end(number, 0, -1, failed); },
            nb::arg("number"), nb::arg("failed") = false);
}

}  // namespace roundelay
