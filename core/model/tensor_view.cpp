#include "core/model/tensor_view.hpp"

#include "core/base/error.hpp"

#include <ATen/ATen.h>

#include <utility>

namespace sf {

namespace {

constexpr std::pair<Dtype, at::ScalarType> kTypes[] = {
    {Dtype::kBool, at::kBool},
    {Dtype::kU8, at::kByte},
    {Dtype::kI8, at::kChar},
    {Dtype::kF8E4M3, at::kFloat8_e4m3fn},
    {Dtype::kF8E5M2, at::kFloat8_e5m2},
    {Dtype::kU16, at::kUInt16},
    {Dtype::kI16, at::kShort},
    {Dtype::kF16, at::kHalf},
    {Dtype::kBF16, at::kBFloat16},
    {Dtype::kU32, at::kUInt32},
    {Dtype::kI32, at::kInt},
    {Dtype::kF32, at::kFloat},
    {Dtype::kU64, at::kUInt64},
    {Dtype::kI64, at::kLong},
    {Dtype::kF64, at::kDouble},
};

}  // namespace

at::ScalarType scalar_type_of(Dtype dtype) {
  for (const auto& [file_type, type] : kTypes) {
    if (file_type == dtype) return type;
  }
  SF_CHECK(false, "type {} has no tensor type", dtype_name(dtype));
}

Dtype dtype_of(at::ScalarType type) {
  for (const auto& [file_type, tensor_type] : kTypes) {
    if (tensor_type == type) return file_type;
  }
  SF_CHECK(false, "tensor type {} has no name in files", c10::toString(type));
}

at::Tensor as_tensor(const TensorView& view) {
  auto* bytes = const_cast<std::byte*>(view.bytes.data());
  return at::from_blob(
      bytes, view.shape, [owner = view.owner](void*) mutable { owner.reset(); },
      at::TensorOptions().dtype(scalar_type_of(view.dtype)));
}

TensorView as_view(const std::string& name, const at::Tensor& tensor) {
  SF_CHECK(tensor.is_contiguous() && tensor.device().is_cpu(), "'{}' is not a contiguous CPU tensor", name);
  TensorView view;
  view.name = name;
  view.dtype = dtype_of(tensor.scalar_type());
  view.shape = tensor.sizes().vec();
  view.bytes = {static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()};
  view.owner = std::make_shared<const at::Tensor>(tensor);
  return view;
}

}  // namespace sf
