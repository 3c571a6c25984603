// Kernels for CPUs with AVX2 and F16C; this file alone is compiled with both.
#define ROUNDELAY_VECTOR_BYTES 32
#include "reduce_kernels.inc"

namespace roundelay {

extern const KernelTable avx2_kernels = make_table("avx2");

}  // namespace roundelay
