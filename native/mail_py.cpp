// The Python face of mail.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <iterator>

#include "mail.hpp"
#include "view_py.hpp"
#include "waiter_py.hpp"

namespace roundelay {

namespace {

// Keeps the buffers of letters under way, even if nobody keeps the letters.
class PyMailbox : public Mailbox {
    using Kept = std::vector<std::pair<std::shared_ptr<Letter>, nb::object>>;

   public:
    using Mailbox::Mailbox;
    ~PyMailbox() { stop(); }

    std::shared_ptr<Letter> send_or_receive(bool sends, int other, std::uint64_t group,
                                            std::int64_t tag, View& view, int dtype, bool background) {
        if (world().troubled() || world().foreign()) throw Broken{};
        auto letter = std::make_shared<Letter>();
        letter->sends = sends;
        letter->other = other;
        letter->envelope = {group, tag, view.bytes(), std::uint64_t(dtype)};
        letter->data = view.data;
        // Letting go of a buffer may run Python, and so another thread of this rank in here: what
        // is done leaves the list first.
        const auto done = std::stable_partition(under_way_.begin(), under_way_.end(),
                                                [](const auto& old) { return !old.first->done; });
        const Kept finished(std::make_move_iterator(done),
                            std::make_move_iterator(under_way_.end()));
        under_way_.erase(done, under_way_.end());
        under_way_.emplace_back(letter, nb::find(view));
        post(letter);
        pump();
        if (background && !letter->done) run_in_background();
        return letter;
    }

   private:
    Kept under_way_;
};

}  // namespace

void register_mail(nb::module_& module) {
    module.attr("ANY_TAG") = any_tag;
    module.def("set_kill_point", &set_kill_point, nb::arg("points"), nb::arg("by") = SIGKILL);

    nb::class_<Letter>(module, "Letter")
        .def_prop_ro("done", [](const Letter& letter) { return letter.done.load(); })
        .def_prop_ro("found", [](const Letter& letter) {
            return nb::make_tuple(letter.other.load(), letter.found.tag, letter.found.bytes,
                                  letter.found.dtype);
        });

    nb::class_<PyMailbox>(module, "Mailbox")
        .def(nb::init<std::shared_ptr<World>, int>())
        .def("post", &PyMailbox::send_or_receive)
        .def("wait", [](PyMailbox& self, Letter& letter, double seconds, nb::object on_slow) {
            if (self.world().foreign()) throw Broken{};
            with_waiter(on_slow, [&](PyWaiter& waiter) {
                self.wait(letter, std::int64_t(std::min(seconds, 1e9) * 1e9), waiter);
            });
        });
}

}  // namespace roundelay
