// The element types of buffers, by the names numpy gives them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace roundelay {

enum class DType : std::uint8_t {
    boolean,
    int8,
    int16,
    int32,
    int64,
    uint8,
    uint16,
    uint32,
    uint64,
    float16,
    bfloat16,
    float32,
    float64,
    complex64,
    complex128,
};

inline constexpr std::size_t dtype_count = 15;

inline constexpr std::array<std::string_view, dtype_count> dtype_names = {
    "bool",    "int8",    "int16",    "int32",   "int64",   "uint8",     "uint16",     "uint32",
    "uint64",  "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
};

static_assert(dtype_names[std::size_t(DType::float16)] == "float16" &&
              dtype_names[std::size_t(DType::complex128)] == dtype_names.back());

inline constexpr std::array<std::uint8_t, dtype_count> dtype_sizes = {
    1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8, 8, 16,
};

constexpr std::size_t itemsize(DType dtype) { return dtype_sizes[static_cast<std::size_t>(dtype)]; }

// The dtype of that name, if there is one.
constexpr std::optional<DType> dtype_named(std::string_view name) {
    for (std::size_t index = 0; index < dtype_count; ++index) {
        if (dtype_names[index] == name) return static_cast<DType>(index);
    }
    return std::nullopt;
}

}  // namespace roundelay
