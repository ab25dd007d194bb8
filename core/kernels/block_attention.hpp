// core/kernels/block_attention.hpp: attention of draft blocks over the context before their anchors and over themselves.
#pragma once

#include <ATen/core/Tensor.h>

#include "sf/ops.hpp"

namespace sf {

/// See BlockAttention in sf/ops.hpp. [b, q, n, e] in the query's type; rows of dead blocks are zero and send no gradient.
/// Context and own block share one softmax. Scores exist for a few blocks at a time; backward makes
/// them again from the saved log-sum-exp.
at::Tensor block_attention(const BlockAttention& attention);

/// For tests: the same with another bound on the number of scores that exist at once.
at::Tensor block_attention(const BlockAttention& attention, int64_t scores_max);

}  // namespace sf
