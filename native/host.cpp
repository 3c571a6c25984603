#include "host.hpp"

namespace roundelay {

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
