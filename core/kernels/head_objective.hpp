// core/kernels/head_objective.hpp: a loss over a frozen head in row chunks, forward and gradient in one pass.
#pragma once

#include <ATen/core/Tensor.h>

#include "sf/ops.hpp"

#include <cstdint>
#include <utility>

namespace sf {

/// See HeadObjective in sf/ops.hpp. Scalar float32.
at::Tensor head_objective(const HeadObjective& objective, const RowLoss& loss);

/// The k largest of each row, descending, and where they are: {values [r, k], columns int64 [r, k]}. Equal to topk, but it looks at the whole row
/// once (maxima of groups of columns) and sorts only what can be among the k.
std::pair<at::Tensor, at::Tensor> largest_of_rows(const at::Tensor& rows_rv, int64_t k);

/// Value and lowest column of each row's largest element: {[r], int64 [r]}.
std::pair<at::Tensor, at::Tensor> maximum_of_rows(const at::Tensor& rows_rv);

}  // namespace sf
