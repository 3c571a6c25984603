// Kernels for CPUs with AVX-512 F, BW, DQ and VL; this file alone is compiled with them.
#define ROUNDELAY_VECTOR_BYTES 64
#include "reduce_kernels.inc"

namespace roundelay {

extern const KernelTable avx512_kernels = make_table("avx512");

}  // namespace roundelay
