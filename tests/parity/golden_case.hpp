// One golden case: a safetensors file as tensors, and the folder it comes from.
#pragma once

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "core/data/safetensors.hpp"

namespace sf::testing {

/// SF_GOLDEN_DIR when it is set, else the copies beside this file.
inline std::filesystem::path golden_dir() {
  const char* set = std::getenv("SF_GOLDEN_DIR");
  return set != nullptr && *set != 0 ? std::filesystem::path(set) : std::filesystem::path(SF_TEST_DATA) / "parity" / "golden";
}

inline at::ScalarType scalar_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBool: return at::kBool;
    case Dtype::kI32: return at::kInt;
    case Dtype::kI64: return at::kLong;
    case Dtype::kBF16: return at::kBFloat16;
    case Dtype::kF32: return at::kFloat;
    case Dtype::kF64: return at::kDouble;
    default: throw std::runtime_error(std::string("golden case has a tensor of type ") + dtype_name(dtype));
  }
}

class GoldenCase {
 public:
  explicit GoldenCase(const std::string& name) : file_(SafetensorsFile::open(golden_dir() / (name + ".safetensors"))) {}

  bool has(const std::string& name) const { return file_.find(name) != nullptr; }
  at::Tensor at(const std::string& name) const {
    const TensorView& view = file_.at(name);
    return at::from_blob(const_cast<std::byte*>(view.bytes.data()), view.shape, scalar_type(view.dtype)).clone();
  }
  double number(const std::string& name) const { return at(name).to(at::kDouble).item<double>(); }
  const std::string& text(const std::string& name) const { return file_.metadata().at(name); }
  const SafetensorsFile& file() const { return file_; }

 private:
  SafetensorsFile file_;
};

/// |found - expected| / |expected| in the Euclidean norm; the absolute norm when nothing is expected.
inline double relative_error(const at::Tensor& found, const at::Tensor& expected) {
  const at::Tensor f = found.to(at::kDouble), e = expected.to(at::kDouble);
  const double scale = e.norm().item<double>();
  const double error = (f - e).norm().item<double>();
  return scale > 0 ? error / scale : error;
}

}  // namespace sf::testing
