// core/train/linear.hpp: the product behind UnitContext::linear. Its weight gradient is added to the gradient buffer inside the
// backward pass (beta = 1), so no gradient of the weight's size is ever made beside the buffer where the types allow it.
//
// Shapes: r rows · i input columns · o output columns
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "sf/transform.hpp"

namespace sf {

/// x @ weight^T + bias for products that read the same x, as one node: x's gradient is one sum (beta = 1), not a tensor for each product. x [..., i],
/// weight [o, i], bias [o] or undefined -> [..., o] each. Sinks may be null (a frozen parameter). While gradients are recorded the sinks must outlive the graph.
std::vector<at::Tensor> linears(const std::vector<LinearProduct>& products, const at::Tensor& x);

/// One of them.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight_oi, const at::Tensor& bias_o, GradientSink* weight_sink,
                  GradientSink* bias_sink);

}  // namespace sf
