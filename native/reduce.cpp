#include "reduce.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "host.hpp"
#include "reduce_table.hpp"

namespace roundelay {

namespace {

const KernelTable* const tables[] = {
    &baseline_kernels,
#if defined(ROUNDELAY_X86_KERNELS)
    &avx2_kernels,
    &avx512_kernels,
#endif
};

// The newest table that this CPU runs, or the one of that name.
const KernelTable* find_table(std::string_view name) {
    const std::vector<std::string> runnable = instruction_sets();
    const KernelTable* found = nullptr;
    for (const KernelTable* table : tables) {
        const bool runs =
            std::find(runnable.begin(), runnable.end(), table->name) != runnable.end();
        if (runs && (name.empty() || name == table->name)) found = table;
    }
    return found;
}

std::atomic<const KernelTable*> active{find_table("")};

// A block stays in the first-level cache while it goes to several destinations.
constexpr std::size_t copy_block = 16384;

Kernel kernel_of(const KernelTable& table, Op op, DType dtype) {
    return table.kernels[static_cast<std::size_t>(op)][static_cast<std::size_t>(dtype)];
}

}  // namespace

bool supports(Op op, DType dtype) { return kernel_of(baseline_kernels, op, dtype) != nullptr; }

void move(void* const* dsts, int dst_count, const void* src, std::size_t bytes) {
    const std::size_t block = dst_count > 1 ? copy_block : bytes;
    for (std::size_t begin = 0; begin < bytes; begin += block) {
        const std::size_t length = std::min(block, bytes - begin);
        for (int dst = 0; dst < dst_count; ++dst) {
            if (dsts[dst] == src) continue;
            std::memcpy(static_cast<char*>(dsts[dst]) + begin,
                        static_cast<const char*>(src) + begin, length);
        }
    }
}

bool can_stream() { return active.load(std::memory_order_relaxed)->stream != nullptr; }

void stream(void* dst, const void* src, std::size_t bytes) {
    if (dst == src) return;
    const Move past = active.load(std::memory_order_relaxed)->stream;
    past != nullptr ? past(dst, src, bytes) : void(std::memcpy(dst, src, bytes));
}

void settle() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

void fold(Op op, DType dtype, void* const* dsts, int dst_count, const void* const* srcs,
          int src_count, std::size_t count, int divide_by, const void* ahead) {
    if (op == Op::avg && divide_by <= 0) op = Op::sum;
    const KernelTable& table = *active.load(std::memory_order_relaxed);
    if (src_count == 1 && op != Op::avg) {
        return move(dsts, dst_count, srcs[0], count * record_size(op, dtype));
    }
    kernel_of(table, op, dtype)(dsts, dst_count, srcs, src_count, count, divide_by, ahead);
}

bool copy_checked(DType dtype, void* dst, const void* src, std::size_t count) {
    const KernelTable& table = *active.load(std::memory_order_relaxed);
    const CheckedCopy checked = table.checked_copies[static_cast<std::size_t>(dtype)];
    if (checked != nullptr) return checked(dst, src, count);
    std::memcpy(dst, src, count * itemsize(dtype));
    return true;
}

void to_bfloat16(void* dst, const void* src, std::size_t count) {
    active.load(std::memory_order_relaxed)->to_bfloat16(dst, src, count);
}

void from_bfloat16(void* dst, const void* src, std::size_t count) {
    active.load(std::memory_order_relaxed)->from_bfloat16(dst, src, count);
}

const char* instruction_set() { return active.load(std::memory_order_relaxed)->name; }

bool use_instruction_set(std::string_view name) {
    const KernelTable* found = name.empty() ? nullptr : find_table(name);
    if (found != nullptr) active.store(found, std::memory_order_relaxed);
    return found != nullptr;
}

}  // namespace roundelay
