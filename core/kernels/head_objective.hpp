// core/kernels/head_objective.hpp: a loss over a frozen head in row chunks, forward and gradient in one pass.
#pragma once

#include <ATen/core/Tensor.h>

#include "sf/ops.hpp"

namespace sf {

/// See HeadObjective in sf/ops.hpp. Scalar float32.
at::Tensor head_objective(const HeadObjective& objective, const RowLoss& loss);

}  // namespace sf
