// core/model/tensor_view.hpp
//
// core/model: the target model: its tables and its forward pass, and capture, which runs it over
// conversations. In: a model folder and tokens; out: hidden states. This header: bytes of files as tensors
// and back.
#pragma once

#include <ATen/core/Tensor.h>

#include "core/data/safetensors.hpp"

namespace sf {

[[nodiscard]] at::ScalarType scalar_type_of(Dtype dtype);
[[nodiscard]] Dtype dtype_of(at::ScalarType type);

/// A tensor on the view's own memory, which it keeps. Read only: mapped files can't be written to.
[[nodiscard]] at::Tensor as_tensor(const TensorView& view);

/// A view of a contiguous CPU tensor, which it keeps.
[[nodiscard]] TensorView as_view(const std::string& name, const at::Tensor& tensor);

}  // namespace sf
