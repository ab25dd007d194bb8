#include "core/data/dtype.hpp"

namespace sf {

namespace {

struct DtypeRow {
  Dtype dtype;
  const char* name;
  int64_t bytes;
  bool floating;
};

constexpr DtypeRow kDtypes[] = {
    {Dtype::kBool, "BOOL", 1, false},     {Dtype::kU8, "U8", 1, false},
    {Dtype::kI8, "I8", 1, false},         {Dtype::kF8E4M3, "F8_E4M3", 1, true},
    {Dtype::kF8E5M2, "F8_E5M2", 1, true}, {Dtype::kU16, "U16", 2, false},
    {Dtype::kI16, "I16", 2, false},       {Dtype::kF16, "F16", 2, true},
    {Dtype::kBF16, "BF16", 2, true},      {Dtype::kU32, "U32", 4, false},
    {Dtype::kI32, "I32", 4, false},       {Dtype::kF32, "F32", 4, true},
    {Dtype::kU64, "U64", 8, false},       {Dtype::kI64, "I64", 8, false},
    {Dtype::kF64, "F64", 8, true},
};

const DtypeRow& row_of(Dtype dtype) {
  return kDtypes[static_cast<size_t>(dtype)];
}

}  // namespace

const char* dtype_name(Dtype dtype) {
  return row_of(dtype).name;
}

std::optional<Dtype> dtype_from_name(std::string_view name) {
  for (const DtypeRow& row : kDtypes) {
    if (name == row.name) return row.dtype;
  }
  return std::nullopt;
}

int64_t bytes_of(Dtype dtype) {
  return row_of(dtype).bytes;
}

bool is_floating(Dtype dtype) {
  return row_of(dtype).floating;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

std::optional<int64_t> element_count(const std::vector<int64_t>& shape) {
  constexpr int64_t kMax = int64_t{1} << 62;
  int64_t count = 1;
  for (const int64_t extent : shape) {
    if (extent < 0 || __builtin_mul_overflow(count, extent, &count) || count > kMax) return std::nullopt;
  }
  return count;
}

}  // namespace sf
