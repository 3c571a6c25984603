#include "host.hpp"

#include <algorithm>
#include <cstdlib>

namespace roundelay {

namespace {

const char* const limit_name = "ROUNDELAY_MAX_ISA";

std::string_view limit() {
    const char* given = std::getenv(limit_name);
    return given == nullptr ? "" : given;
}

}  // namespace

std::string limit_problem() {
    const std::string_view known[] = {"", "sse2", "neon", "portable", "avx2", "avx512"};
    if (std::find(std::begin(known), std::end(known), limit()) != std::end(known)) return "";
    return std::string(limit_name) + "=" + std::string(limit().substr(0, 60)) +
           " is no instruction set that kernels are built for, so it limits nothing; "
           "take sse2, avx2 or avx512.";
}

std::vector<std::string> instruction_sets() {
#if defined(__x86_64__) || defined(_M_X64)
    std::vector<std::string> found = {"sse2"};
#elif defined(__aarch64__)
    std::vector<std::string> found = {"neon"};
#else
    std::vector<std::string> found = {"portable"};
#endif
#if defined(ROUNDELAY_X86_KERNELS)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) found.push_back("avx2");
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        found.push_back("avx512");
    }
#endif
    const auto last = std::find(found.begin(), found.end(), limit());
    if (last != found.end()) found.erase(last + 1, found.end());
    return found;
}

std::string compiler() {
#if defined(__VERSION__) && defined(__clang__)
    return __VERSION__;
#elif defined(__VERSION__)
    return std::string("gcc ") + __VERSION__;
#elif defined(_MSC_VER)
    return "msvc " + std::to_string(_MSC_VER);
#else
    return "unknown";
#endif
}

}  // namespace roundelay
