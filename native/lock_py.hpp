// The interpreter lock: let go of while waiting, and taken back unless the interpreter ends.
#pragma once

#include <nanobind/nanobind.h>

namespace roundelay {

namespace nb = nanobind;

// A thread that needs the lock when the interpreter has ended would be ended too, by unwinding its
// stack; C++ takes that for an error and aborts the process. So every stay with the interpreter in
// the middle of native code is counted. At exit, when only daemon threads are left, no stay begins
// any more (who comes stays outside for good), and exit goes on when those begun are over.
class Stay {
   public:
    Stay();                                // with the lock, which is kept
    explicit Stay(PyThreadState*& saved);  // takes the lock back
    ~Stay();
    Stay(const Stay&) = delete;
    Stay& operator=(const Stay&) = delete;
};

// Without the lock, for as long as it exists.
class Unlocked {
   public:
    Unlocked() : saved_(PyEval_SaveThread()) {}
    ~Unlocked() { const Stay back(saved_); }
    Unlocked(const Unlocked&) = delete;
    Unlocked& operator=(const Unlocked&) = delete;

   private:
    PyThreadState* saved_;
};

void register_lock(nb::module_& module);

}  // namespace roundelay
