// Typed folds of several sources into several destinations, at memory speed.
//
// The meaning of every reduction is that of reductions.py, bit for bit, NaN payloads aside: a left
// fold in the accumulator (float32 for half types), rounded once. It depends neither on the
// instruction set nor on alignment or count.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "dtype.hpp"

namespace roundelay {

enum class Op : std::uint8_t {
    sum,
    prod,
    min,
    max,
    avg,
    land,
    lor,
    lxor,
    band,
    bor,
    bxor,
    maxloc,
    minloc,
};

inline constexpr std::size_t op_count = 13;

inline constexpr std::array<std::string_view, op_count> op_names = {
    "sum", "prod", "min", "max",  "avg",    "land",   "lor",
    "lxor", "band", "bor", "bxor", "maxloc", "minloc",
};

static_assert(op_names[std::size_t(Op::land)] == "land" &&
              op_names[std::size_t(Op::minloc)] == op_names.back());

// The reduction of that name, if there is one.
constexpr std::optional<Op> op_named(std::string_view name) {
    for (std::size_t index = 0; index < op_count; ++index) {
        if (op_names[index] == name) return static_cast<Op>(index);
    }
    return std::nullopt;
}

// Whether the reduction has a meaning for the dtype; for maxloc and minloc, the value's dtype.
bool supports(Op op, DType dtype);

// Bytes of one element. For maxloc and minloc that is a record {value, int64 location}, packed as
// numpy packs the structured dtype [("value", dtype), ("location", int64)].
constexpr std::size_t record_size(Op op, DType dtype) {
    const bool located = op == Op::maxloc || op == Op::minloc;
    return itemsize(dtype) + (located ? sizeof(std::int64_t) : 0);
}

// Fold `count` elements of all sources, from left to right, into every destination.
//
// There is at least one of each; one source is a copy. A destination may be the memory of a source
// exactly, never partly: element i of all sources is read before element i of any destination is
// written. Pointers need no alignment. `avg` divides the accumulator by `divide_by` where that is
// positive, and is a sum where it is 0; other reductions ignore it. The reduction must support the
// dtype.
//
// Sources in another core's cache come slowly, and meanwhile memory idles: with `ahead`, as many
// bytes from there are fetched into the cache on the way. They are only a hint; nothing is read.
void fold(Op op, DType dtype, void* const* dsts, int dst_count, const void* const* srcs,
          int src_count, std::size_t count, int divide_by, const void* ahead = nullptr);

// Copy to every destination.
void move(void* const* dsts, int dst_count, const void* src, std::size_t bytes);

// Copy past the caches: what this core will not read soon, or others have in theirs. Nobody may be told
// before `settle`. Where a CPU has no such stores it is a copy like any other.
void stream(void* dst, const void* src, std::size_t bytes);
void settle();
bool can_stream();

// Copy `count` elements and tell whether all are finite; the two must not overlap.
bool copy_checked(DType dtype, void* dst, const void* src, std::size_t count);

// Round `count` elements of float32 to bfloat16, to nearest even; NaN stays NaN, and what is too
// large becomes infinity. The two must not overlap.
void to_bfloat16(void* dst, const void* src, std::size_t count);

// Widen `count` elements of bfloat16 to float32, exactly; the two must not overlap.
void from_bfloat16(void* dst, const void* src, std::size_t count);

// The instruction set whose kernels run, at first the newest of this CPU.
const char* instruction_set();

// Run the kernels of the named instruction set from now on; false if there are none for this CPU.
bool use_instruction_set(std::string_view name);

}  // namespace roundelay
