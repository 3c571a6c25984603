#include "host.hpp"

namespace roundelay {

std::vector<std::string> instruction_sets() {
    std::vector<std::string> found;
#if (defined(__x86_64__) || defined(__i386__)) && defined(__GNUC__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("sse2")) found.emplace_back("sse2");
    if (__builtin_cpu_supports("avx2")) found.emplace_back("avx2");
    if (__builtin_cpu_supports("avx512f")) found.emplace_back("avx512f");
#elif defined(__aarch64__)
    found.emplace_back("neon");
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
