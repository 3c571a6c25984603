// The Python face of worlds, their memory, and buffers.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <system_error>

#include "peer_memory.hpp"
#include "group.hpp"
#include "inside_py.hpp"
#include "lock_py.hpp"
#include "memory.hpp"
#include "sites_py.hpp"
#include "tensor_py.hpp"
#include "view_py.hpp"

namespace roundelay {

namespace {

// What a rank has said, cut where its room ended: perhaps in the middle of a character.
nb::object as_str(const char* text) {
    return nb::steal(PyUnicode_DecodeUTF8(text, Py_ssize_t(std::strlen(text)), "replace"));
}

nb::object trouble_of(World& world) {
    if (!world.troubled()) return nb::none();
    const Header& header = world.header();
    static const char* const kinds[] = {"none", "mismatch", "lost", "timeout", "failed", "interrupted"};
    return nb::make_tuple(kinds[int(header.trouble.load())], header.culprit, header.finder,
                          header.group, header.call, as_str(header.text.data()));
}

nb::tuple told(World& world, int world_rank, const CallRecord& record) {
    return nb::make_tuple(record.call, record.collective, record.algorithm, record.dtype, record.op,
                          record.count, record.root, world.site(world_rank, record.site).data());
}

// Who is in the group that lies there: each one's rank in the world, its record of a call, and of the
// latest; before that the number of the group and the line that made it.
nb::tuple calls_of(World& world, std::uint64_t at, std::uint64_t call) {
    const bool whole = at == world.header().group_at;
    if (!world.holds(at, sizeof(RankArea))) throw std::out_of_range("no group lies there");
    const RankArea* areas = world.at<RankArea>(at);
    const int size = whole ? world.size() : int(areas->size.load());
    if (size > world.size() || !world.holds(at, sizeof(RankArea) * std::size_t(size)))
        throw std::out_of_range("no group lies there");
    nb::list every;
    std::string made;
    std::uint64_t serial = 0;
    for (int rank = 0; rank < size; ++rank) {
        const RankArea& area = areas[rank];
        const int world_rank = whole ? rank : int(area.world_rank.load());
        if (world_rank < 0 || world_rank >= world.size()) throw std::out_of_range("no such rank");
        if (area.serial.load() != 0 && serial == 0) {
            serial = area.serial.load();
            made = world.site(world_rank, area.made.load()).data();
        }
        every.append(nb::make_tuple(world_rank, told(world, world_rank, area.record(call)),
                                    told(world, world_rank, area.latest())));
    }
    return nb::make_tuple(serial, made, every);
}

// What the threads of a rank wait for: kind, group, call, the other rank, tag, line, since when.
nb::list waits_of(World& world, int rank) {
    nb::list found;
    for (const auto& place : world.rank(rank).waits) {
        const Wait wait = place.get();
        if (wait.since != 0)
            found.append(nb::make_tuple(int(wait.kind), wait.group, wait.call, wait.other, wait.tag,
                                        world.site(rank, wait.site).data(), wait.since));
    }
    return found;
}

// The group in which a rank began a call last, the number of that call, whether it is over, and the
// bytes of all its calls.
nb::tuple now_of(World& world, int rank) {
    const RankInfo& info = world.rank(rank);
    const std::uint64_t at = info.group_now.load();
    std::uint64_t number = 0, finished = 0;
    if (at != 0 && world.holds(at, sizeof(RankArea) * std::size_t(world.size()))) {
        const RankArea* areas = world.at<RankArea>(at);
        const bool whole = at == world.header().group_at;
        const auto size = whole ? std::uint32_t(world.size())
                                : std::min(areas->size.load(), std::uint32_t(world.size()));
        for (std::uint32_t member = 0; member < size; ++member) {
            const RankArea& area = areas[member];
            if (int(whole ? member : area.world_rank.load()) != rank) continue;
            finished = area.finished.load();
            number = area.latest().call;
        }
    }
    return nb::make_tuple(at, number, finished >= number, info.moved.load());
}

// Python gives no way to change the exit code at its end; this does, unless it tells of a failure already.
void fail_at_exit() {
    on_exit(
        [](int code, void*) {
            if (code != 0) return;
            std::fflush(nullptr);
            _exit(1);
        },
        nullptr);
}

}  // namespace

void register_world(nb::module_& module) {
    module.def("peer_proof", [] {
        const Proof proof = kept_proof();
        return nb::make_tuple(proof.words[0], proof.words[1]);
    });
    nb::exception<Broken>(module, "Broken");
    nb::exception<OutOfMemory>(module, "OutOfMemory", PyExc_MemoryError);
    nb::exception<OtherVersion>(module, "OtherVersion", PyExc_RuntimeError);
    register_lock(module);
    module.def("on_nested", &Inside::set_refusal);
    // What the kernel refuses, a descriptor or a thread, is an OSError with its number.
    nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
        try {
            std::rethrow_exception(thrown);
        } catch (const std::system_error& error) {
            PyErr_SetObject(PyExc_OSError,
                            nb::make_tuple(error.code().value(), error.what()).ptr());
        }
    });
    module.def("set_package", &Sites::set_package);
    module.def("skip_package", &Sites::skip_package);
    module.def("caller", &Sites::caller);
    module.def("work_for", &Sites::work_for, nb::arg("place").none());
    module.def("fail_at_exit", &fail_at_exit);
    module.def("available_cores", &available_cores);
    module.def("available_memory", &available_memory, nb::arg("root") = "");

    nb::class_<World>(module, "World")
        .def_static(
            "create",
            [](int size, std::size_t arena, std::size_t slot_bytes) {
                return World::create(size, Group::bytes_for(size, slot_bytes), Group::bytes_for(size, 0),
                                     arena);
            },
            nb::arg("size"), nb::arg("arena") = std::size_t(1) << 36,
            nb::arg("slot_bytes") = default_slot_bytes)
        .def_static("bytes_for",
                    [](int size) {
                        return World::parts(size, Group::bytes_for(size, default_slot_bytes)).bytes;
                    })
        .def_static("attach",
                    [](int fd, nb::bytes token) {
                        const auto* start = reinterpret_cast<const std::uint8_t*>(token.c_str());
                        return World::attach(fd, {start, token.size()});
                    })
        .def_static("look_on", &World::look_on)
        .def_prop_ro("size", &World::size)
        .def_prop_ro("fd", &World::fd)
        .def_prop_ro("used", &World::used)
        .def_prop_ro("foreign", &World::foreign)
        .def("holds",
             [](World& world, std::uintptr_t address) {
                 return world.offset_of(reinterpret_cast<const void*>(address)) != World::nowhere;
             })
        .def_prop_ro("token",
                     [](World& world) {
                         const auto token = world.token();
                         return nb::bytes(reinterpret_cast<const char*>(token.data()), token.size());
                     })
        .def("enter", &World::enter)
        .def("leave", &World::leave)
        .def("watch", &World::watch, nb::arg("pipes"), nb::arg("own"))
        .def_prop_ro("trouble", &trouble_of)
        .def("fail",
             [](World& world, const std::string& kind, int culprit, const std::string& text) {
                 const auto what = kind == "interrupted" ? Trouble::interrupted : Trouble::failed;
                 world.fail(what, culprit, culprit, 0, 0, text);
             })
        .def("spare", [](World& world, int rank, int loss) { world.rank(rank).loss = Loss(loss); })
        .def("spared", [](World& world, int rank) { return int(world.rank(rank).loss.load()); })
        .def_prop_ro("losses", [](World& world) { return world.header().losses.load(); })
        .def("why", [](World& world, int rank) { return as_str(world.rank(rank).why.data()); })
        .def("set_raised", &World::set_raised)
        .def("set_step",
             [](World& world, int rank, std::uint64_t step) { world.rank(rank).step = step; })
        .def("step", [](World& world, int rank) { return world.rank(rank).step.load(); })
        .def("life", [](World& world, int rank) { return int(world.rank(rank).life.load()); })
        .def("pid", [](World& world, int rank) { return world.rank(rank).pid.load(); })
        .def("heartbeat", [](World& world, int rank) { return world.rank(rank).heartbeat.load(); })
        .def("stood_still",
             [](World& world, int rank) { return world.rank(rank).stood_still.load(); })
        .def_prop_ro("group_at", [](World& world) { return world.header().group_at; })
        .def("calls", &calls_of, nb::arg("at"), nb::arg("call") = 0)
        .def("waits", &waits_of)
        .def("now", &now_of)
        .def("next_serial", [](World& world) { return ++world.header().serial; })
        .def_prop_ro("troubled", &World::troubled)
        .def("allocate", &World::allocate, nb::call_guard<Unlocked>())
        .def("release", &World::release)
        .def("make_block", &Block::reserve, nb::call_guard<Unlocked>());

    module.def("tensor_shape", &tensor_shape, nb::arg("x").none());
    nb::class_<View>(module, "View")
        .def("__init__", [](View* self, nb::object object) { new (self) View(object.ptr()); })
        .def_ro("count", &View::count)
        .def_prop_ro("dtype", [](const View& view) { return int(view.dtype); })
        .def_prop_ro("bytes", &View::bytes)
        .def_ro("writable", &View::writable)
        .def_ro("contiguous", &View::contiguous);

    nb::class_<Block>(module, "Block")
        // By a shared pointer of C++'s own: groups keep theirs without Python.
        .def(nb::new_([](std::shared_ptr<World> world, std::uint64_t at, std::size_t bytes) {
            return std::make_shared<Block>(std::move(world), at, bytes);
        }))
        .def_prop_ro("at", &Block::at)
        .def("bytes", [](nb::handle self, std::size_t from, std::size_t count) {
            std::byte* data = nb::cast<Block&>(self).data(from);
            return nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(
                reinterpret_cast<std::uint8_t*>(data), {count}, self);
        });
}

}  // namespace roundelay
