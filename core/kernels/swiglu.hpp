// core/kernels/swiglu.hpp: the gate of the MLP.
#pragma once

#include <ATen/core/Tensor.h>

namespace sf {

/// silu(gate) * up, same shapes.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

}  // namespace sf
