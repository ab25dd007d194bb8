// core/data/dtype.hpp
//
// Element types of tensors in files, under the names that safetensors uses. This folder: reads and writes
// tensor files, token files and features; in: paths; out: views of mapped bytes, or an sf::Error with file,
// key, found, expected. Nothing in it needs LibTorch.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace sf {

enum class Dtype {
  kBool,
  kU8,
  kI8,
  kF8E4M3,
  kF8E5M2,
  kU16,
  kI16,
  kF16,
  kBF16,
  kU32,
  kI32,
  kF32,
  kU64,
  kI64,
  kF64
};

/// "BF16", "F32", "I64" ...
[[nodiscard]] const char* dtype_name(Dtype dtype);
[[nodiscard]] std::optional<Dtype> dtype_from_name(std::string_view name);
[[nodiscard]] int64_t bytes_of(Dtype dtype);
[[nodiscard]] bool is_floating(Dtype dtype);

/// "[2, 48, 64]", "[]" for a scalar.
[[nodiscard]] std::string shape_text(const std::vector<int64_t>& shape);
/// Product of the extents, or nothing when it is negative or beyond 2^62.
[[nodiscard]] std::optional<int64_t> element_count(const std::vector<int64_t>& shape);

}  // namespace sf
