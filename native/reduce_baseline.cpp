// Kernels for every CPU of this architecture.
#define ROUNDELAY_VECTOR_BYTES 16
#include "reduce_kernels.inc"

namespace roundelay {

#if defined(__x86_64__) || defined(_M_X64)
extern const KernelTable baseline_kernels = make_table("sse2");
#elif defined(__aarch64__)
extern const KernelTable baseline_kernels = make_table("neon");
#else
extern const KernelTable baseline_kernels = make_table("portable");
#endif

}  // namespace roundelay
