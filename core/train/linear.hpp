// core/train/linear.hpp: the product behind UnitContext::linear. Its weight gradient is added to the gradient buffer inside the
// backward pass (beta = 1), so no gradient of the weight's size is ever made beside the buffer where the types allow it.
//
// Shapes: r rows · i input columns · o output columns
#pragma once

#include <ATen/core/Tensor.h>

namespace sf {

/// Where a parameter's gradient of the window is summed. `buffer` is allocated once; `touched` says that the window has added to it.
struct GradientSink {
  at::Tensor buffer;
  bool touched = false;
  bool ever_touched = false;

  void touch() { touched = ever_touched = true; }
};

/// x @ weight^T + bias. x [..., i], weight [o, i], bias [o] or undefined -> [..., o].
/// Sinks may be null (a frozen parameter). While gradients are recorded the sinks must outlive the graph.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight_oi, const at::Tensor& bias_o, GradientSink* weight_sink,
                  GradientSink* bias_sink);

}  // namespace sf
