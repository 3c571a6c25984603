// How callers from Python wait: without the interpreter lock, and with an ear for signals.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>

#include "group.hpp"
#include "lock_py.hpp"
#include "call_queue.hpp"
#include "view_py.hpp"

namespace roundelay {

namespace nb = nanobind;

constexpr std::int64_t slow_ns = 5'000'000'000;

// Waits without the interpreter lock, lets signals through, and tells once when it takes long.
class PyWaiter : public Waiter {
   public:
    // What is in `views` is held before the lock is let go of.
    explicit PyWaiter(nb::handle on_slow, std::array<View*, 2> views = {}) : on_slow_(on_slow), views_(views) {}
    ~PyWaiter() override {
        if (saved_ != nullptr) const Stay back(saved_);
    }
    void blocks() override {
        if (saved_ != nullptr) return;
        for (View* view : views_)
            if (view != nullptr) view->hold();
        saved_ = PyEval_SaveThread();
    }
    bool goes_on(int rank, std::int64_t waited) override {
        blocks();
        const Stay here(saved_);
        if (PyErr_CheckSignals() != 0) return false;  // the exception waits in the interpreter
        if (waited > slow_ns && !told_ && on_slow_.is_valid()) {
            told_ = true;
            try {
                on_slow_(rank, double(waited) / 1e9);
            } catch (nb::python_error& error) {
                error.restore();
                return false;
            }
        }
        blocks();
        return true;
    }
    // The same while others have their turn in a queue; a forked child throws.
    bool goes_on(CallQueue& queue, const World& world) {
        const auto [rank, waited] = queue.take_slow();
        const bool on = goes_on(rank, waited);
        if (world.foreign()) throw Broken{};
        return on;
    }

   private:
    nb::handle on_slow_;
    std::array<View*, 2> views_;
    PyThreadState* saved_ = nullptr;
    bool told_ = false;
};

// For the thread of a queue, which knows nothing of Python and works while its rank computes: it spins
// only once somebody waits for what it does, and leaves it to them to say that it takes long.
class BackgroundWaiter : public Waiter {
   public:
    explicit BackgroundWaiter(CallQueue& queue) : queue_(queue) {}
    bool may_spin() override { return queue_.wanted().load(std::memory_order_relaxed) > 0; }
    bool goes_on(int rank, std::int64_t waited) override {
        if (waited > slow_ns && !noted_) {
            noted_ = true;
            queue_.note_slow(rank, waited);
        }
        return true;
    }

   private:
    CallQueue& queue_;
    bool noted_ = false;
};

// Run `work` with a waiter; an exception that a signal left in the interpreter comes first.
template <class Work>
void with_waiter(nb::handle on_slow, Work work, std::array<View*, 2> views = {}) {
    bool broken = false;
    {
        PyWaiter waiter(on_slow, views);
        try {
            work(waiter);
        } catch (const Broken&) {
            broken = true;
        }
    }
    if (!broken) return;
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    throw Broken{};
}

}  // namespace roundelay
