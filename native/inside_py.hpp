// The calls that a thread is in the middle of: what it may not wait for in there.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>

#include "world.hpp"

namespace roundelay {

namespace nb = nanobind;

// A call, for the error that names it.
struct Named {
    int collective = -1;         // by its number, or
    const char* word = nullptr;  // what it is instead
    std::string site;
};

// While a thread waits in a call, a signal handler may run on it, or a finalizer, and make another
// call. That one works unless it would have to wait for the call around it, which can't go on before.
class Inside {
   public:
    Inside(const World& world, const void* queue, std::uint64_t number, int collective,
           std::uint32_t site, int world_rank, const char* word = nullptr)
        : world_(world), queue_(queue), number_(number), collective_(collective), site_(site),
          world_rank_(world_rank), word_(word), around_(innermost) {
        innermost = this;
    }
    ~Inside() { innermost = around_; }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

    // Raises if this thread is inside a call of that queue, made before `number`.
    static void refuse_behind(const void* queue, std::uint64_t number, const Named& wanted) {
        for (const Inside* one = innermost; one != nullptr; one = one->around_)
            if (one->queue_ == queue && one->number_ < number) one->refuse(wanted);
    }
    // Raises if this thread is inside any call of that world.
    static void refuse_within(const World& world, const Named& wanted) {
        for (const Inside* one = innermost; one != nullptr; one = one->around_)
            if (&one->world_ == &world) one->refuse(wanted);
    }
    static bool anything() { return innermost != nullptr; }
    // Whether this thread is inside a call of that queue.
    static bool within(const void* queue) {
        for (const Inside* one = innermost; one != nullptr; one = one->around_)
            if (one->queue_ == queue) return true;
        return false;
    }
    // What raises, given both calls.
    static void set_refusal(nb::object raises) { refusal = new nb::object(std::move(raises)); }

   private:
    [[noreturn]] void refuse(const Named& wanted) const {
        const auto name = [](int collective, const char* word) {
            return word != nullptr ? nb::object(nb::str(word)) : nb::object(nb::int_(collective));
        };
        const char* here =
            word_ != nullptr ? "" : const_cast<World&>(world_).site(world_rank_, site_).data();
        if (refusal != nullptr)
            (*refusal)(name(wanted.collective, wanted.word), wanted.site, name(collective_, word_),
                       here);
        throw std::runtime_error("a call inside another one of the same communicator");
    }

    static inline thread_local const Inside* innermost = nullptr;
    static inline nb::object* refusal = nullptr;

    const World& world_;
    const void* queue_;
    std::uint64_t number_;
    int collective_;
    std::uint32_t site_;
    int world_rank_;
    const char* word_;
    const Inside* around_;
};

}  // namespace roundelay
