// The Python face of messages between two ranks.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include <algorithm>

#include "group_py.hpp"
#include "inside_py.hpp"
#include "kept_py.hpp"
#include "lock_py.hpp"
#include "point_to_point.hpp"
#include "view_py.hpp"
#include "waiter_py.hpp"

namespace roundelay {

namespace {

std::int64_t nanoseconds(double seconds) { return std::int64_t(std::min(seconds, 1e9) * 1e9); }

class PyPointToPoint {
   public:
    PyPointToPoint(std::shared_ptr<World> world, int rank)
        : messages_(std::make_shared<PointToPoint>(std::move(world), rank)) {}
    ~PyPointToPoint() {
        if (!messages_->world().foreign()) {
            messages_->forget(false);
            return;
        }
        // Locks that threads held stay locked in a forked child: it touches none.
        new std::shared_ptr<PointToPoint>(std::move(messages_));
    }

    std::shared_ptr<MessageRequest> post(bool sends, int other, std::uint64_t group, std::int64_t tag,
                                 View& view, int dtype, bool background, nb::handle of) {
        if (messages_->world().troubled() || messages_->world().foreign()) throw Broken{};
        auto request = std::make_shared<MessageRequest>();
        request->sends = sends;
        request->other = other;
        request->envelope = {group, tag, view.bytes(), std::uint64_t(dtype)};
        request->data = view.data;
        kept_.keep(request, nb::find(view));
        if (sends && !messages_->has_ring(other)) {
            const Unlocked unlocked;  // another rank may have the arena, and keep it for long
            messages_->open_ring(other);
        }
        messages_->post(request);
        messages_->pump();
        if (!request->done && !of.is_none()) request->site = site_of(of);
        if (background && !request->done) messages_->run_in_background();
        return request;
    }

    bool settled(MessageRequest& request, nb::handle group) {
        if (messages_->world().foreign()) throw Broken{};
        return messages_->settled(request, group_of(group));
    }

    void wait(MessageRequest& request, nb::handle group, double seconds, nb::handle on_slow,
              std::int64_t losses) {
        if (messages_->world().foreign()) throw Broken{};
        if (!request.done) {
            const Inside inside(messages_->world(), nullptr, 0, -1, 0, 0,
                                request.sends ? "send" : "recv");
            with_waiter(on_slow, [&](PyWaiter& waiter) {
                messages_->wait(request, group_of(group), nanoseconds(seconds), waiter, losses);
            });
        }
        kept_.sweep();
    }

    // Nothing of the group, or of all groups, is under way when it returns.
    void drain(nb::handle group, nb::handle number, double seconds, nb::handle on_slow) {
        const std::uint64_t serial =
            number.is_none() ? PointToPoint::every : nb::cast<std::uint64_t>(number);
        with_waiter(on_slow, [&](PyWaiter& waiter) {
            messages_->drain(group_of(group), serial, nanoseconds(seconds), waiter);
        });
    }

    nb::list left_over() {
        nb::list found;
        for (const auto& one : messages_->left_over())
            found.append(nb::make_tuple(one.sends, one.other, one.envelope.tag, one.envelope.bytes,
                                        one.envelope.dtype,
                                        messages_->world().site(messages_->rank(), one.site).data()));
        return found;
    }

    void forget() {
        if (messages_->world().foreign()) return;
        const Unlocked unlocked;
        messages_->forget(true);
    }

   private:
    std::shared_ptr<PointToPoint> messages_;
    KeptAlive kept_;
};

}  // namespace

void register_point_to_point(nb::module_& module) {
    module.attr("ANY_TAG") = any_tag;
    module.def("set_kill_point", &set_kill_point, nb::arg("points"), nb::arg("by") = SIGKILL);

    nb::class_<MessageRequest>(module, "MessageRequest")
        .def_prop_ro("done", [](const MessageRequest& request) { return request.done.load(); })
        .def_prop_ro("fate", [](const MessageRequest& request) { return int(request.fate.load()); })
        .def_prop_ro("status", [](const MessageRequest& request) {
            return nb::make_tuple(request.other.load(), request.found.tag, request.found.bytes,
                                  request.found.dtype);
        });

    nb::class_<PyPointToPoint>(module, "PointToPoint")
        .def(nb::init<std::shared_ptr<World>, int>())
        .def("post", &PyPointToPoint::post, nb::arg("sends"), nb::arg("other"), nb::arg("group"),
             nb::arg("tag"), nb::arg("view"), nb::arg("dtype"), nb::arg("background"),
             nb::arg("of").none() = nb::none())
        .def("left_over", &PyPointToPoint::left_over)
        .def("settled", &PyPointToPoint::settled)
        .def("wait", &PyPointToPoint::wait, nb::arg("request"), nb::arg("group"), nb::arg("seconds"),
             nb::arg("on_slow"), nb::arg("losses") = PointToPoint::deaf)
        .def("drain", &PyPointToPoint::drain, nb::arg("group"), nb::arg("number").none(),
             nb::arg("seconds"), nb::arg("on_slow"))
        .def("forget", &PyPointToPoint::forget);
}

}  // namespace roundelay
