// Python objects that calls under way need, whoever else lets go of them.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

namespace roundelay {

namespace nb = nanobind;

// Only used under the interpreter lock.
class KeptAlive {
    using Kept = std::vector<std::pair<std::shared_ptr<const std::atomic<bool>>, nb::object>>;

   public:
    KeptAlive() { (void)taken_out(orphans()); }
    KeptAlive(const KeptAlive&) = delete;
    KeptAlive& operator=(const KeptAlive&) = delete;
    // What is still needed is kept for the calls, which outlive us.
    ~KeptAlive() {
        const Kept finished = taken_out(kept_);
        std::ranges::move(kept_, std::back_inserter(orphans()));
    }

    // Let go of what calls needed that are done.
    void sweep() { const Kept finished = taken_out(kept_), others = taken_out(orphans()); }

    // Keep objects until `call` is done.
    template <class Call>
    void keep(const std::shared_ptr<Call>& call, nb::object objects) {
        sweep();
        kept_.emplace_back(std::shared_ptr<const std::atomic<bool>>(call, &call->done),
                           std::move(objects));
    }

   private:
    // Letting go of an object may run Python, and so another thread in here: what is done leaves the
    // list first, and is let go of by the caller.
    static Kept taken_out(Kept& kept) {
        const auto done = std::stable_partition(kept.begin(), kept.end(),
                                                [](const auto& one) { return !*one.first; });
        Kept finished(std::make_move_iterator(done), std::make_move_iterator(kept.end()));
        kept.erase(done, kept.end());
        return finished;
    }
    // Of owners that are gone. Never destroyed: at exit there is no lock to do so under.
    static Kept& orphans() {
        static Kept& list = *new Kept;
        return list;
    }

    Kept kept_;
};

}  // namespace roundelay
