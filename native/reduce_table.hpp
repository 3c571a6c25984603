// Where kernels compiled for different instruction sets meet: one table for each.
#pragma once

#include <cstddef>

#include "reduce.hpp"

namespace roundelay {

using Kernel = void (*)(void* const* dsts, int dst_count, const void* const* srcs, int src_count,
                        std::size_t count, int divide_by, const void* ahead);

using Move = void (*)(void* dst, const void* src, std::size_t bytes);

using CheckedCopy = bool (*)(void* dst, const void* src, std::size_t count);

using Conversion = void (*)(void* dst, const void* src, std::size_t count);

// Kernels by reduction and dtype; null where a reduction has no meaning for a dtype.
struct KernelTable {
    const char* name;
    Kernel kernels[op_count][dtype_count];
    CheckedCopy checked_copies[dtype_count];  // null for dtypes that are always finite
    Move stream;                              // a copy past the caches, which `settle` ends; null where there is none
    Conversion to_bfloat16;  // of float32, and back
    Conversion from_bfloat16;
};

// What every CPU of this architecture runs.
extern const KernelTable baseline_kernels;

#if defined(ROUNDELAY_X86_KERNELS)
extern const KernelTable avx2_kernels;
extern const KernelTable avx512_kernels;
#endif

}  // namespace roundelay
