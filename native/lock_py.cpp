#include "lock_py.hpp"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <utility>

namespace roundelay {

namespace {

std::atomic<bool> ending = false;
std::atomic<int> stays = 0;
thread_local int own_stays = 0;
std::atomic<pthread_t> ender;

// Whether a stay may begin.
bool begin() {
    ++stays;
    ++own_stays;
    if (!ending.load() || pthread_equal(ender.load(), pthread_self()) != 0) return true;
    --stays;
    return false;
}

[[noreturn]] void stay_outside() {
    while (true) pause();
}

void end_stays() {
    ender = pthread_self();
    ending = true;
    PyThreadState* const saved = PyEval_SaveThread();
    while (stays.load() > own_stays) sched_yield();
    PyEval_RestoreThread(saved);
}

}  // namespace

Stay::Stay() {
    if (begin()) return;
    PyEval_SaveThread();
    stay_outside();
}

Stay::Stay(PyThreadState*& saved) {
    if (!begin()) stay_outside();
    PyEval_RestoreThread(std::exchange(saved, nullptr));
}

Stay::~Stay() {
    --stays;
    --own_stays;
}

void register_lock(nb::module_& module) {
    // A forked child has one thread, which has asked for the fork.
    pthread_atfork(nullptr, nullptr, [] { stays = own_stays; });
    module.def("end_stays", &end_stays);
    nb::module_::import_("atexit").attr("register")(module.attr("end_stays"));
}

}  // namespace roundelay
