// How callers from Python wait: without the interpreter lock, and with an ear for signals.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <cstdint>

#include "group.hpp"

namespace roundelay {

namespace nb = nanobind;

constexpr std::int64_t slow_ns = 5'000'000'000;

// Waits without the interpreter lock, lets signals through, and tells once when it takes long.
class PyWaiter : public Waiter {
   public:
    explicit PyWaiter(nb::handle on_slow) : on_slow_(on_slow) {}
    ~PyWaiter() override {
        if (saved_ != nullptr) PyEval_RestoreThread(saved_);
    }
    void blocks() override {
        if (saved_ == nullptr) saved_ = PyEval_SaveThread();
    }
    // False when one raised: the exception waits in the interpreter.
    bool lets_signals_in() {
        if (saved_ != nullptr) PyEval_RestoreThread(saved_);
        saved_ = nullptr;
        if (PyErr_CheckSignals() != 0) return false;
        saved_ = PyEval_SaveThread();
        return true;
    }
    bool goes_on(int rank, std::int64_t waited) override {
        PyEval_RestoreThread(saved_);
        saved_ = nullptr;
        if (PyErr_CheckSignals() != 0) return false;  // the exception waits in the interpreter
        if (waited > slow_ns && !told_) {
            told_ = true;
            try {
                on_slow_(rank, double(waited) / 1e9);
            } catch (nb::python_error& error) {
                error.restore();
                return false;
            }
        }
        saved_ = PyEval_SaveThread();
        return true;
    }

   private:
    nb::handle on_slow_;
    PyThreadState* saved_ = nullptr;
    bool told_ = false;
};

// For threads that hold no interpreter lock, and work while their rank computes: they spin only once
// somebody waits for what they do.
class BackgroundWaiter : public Waiter {
   public:
    BackgroundWaiter(nb::handle on_slow, const std::atomic<int>& wanted)
        : on_slow_(on_slow), wanted_(wanted) {}
    bool may_spin() override { return wanted_.load(std::memory_order_relaxed) > 0; }
    bool goes_on(int rank, std::int64_t waited) override {
        if (waited > slow_ns && !told_ && Py_IsInitialized() != 0) {
            told_ = true;
            const nb::gil_scoped_acquire lock;
            try {
                on_slow_(rank, double(waited) / 1e9);
            } catch (nb::python_error& error) {
                error.discard_as_unraisable("roundelay");
            }
        }
        return true;
    }

   private:
    nb::handle on_slow_;
    const std::atomic<int>& wanted_;
    bool told_ = false;
};

// Run `work` with a waiter; an exception that a signal left in the interpreter comes first.
template <class Work>
void with_waiter(nb::handle on_slow, Work work) {
    bool broken = false;
    {
        PyWaiter waiter(on_slow);
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
