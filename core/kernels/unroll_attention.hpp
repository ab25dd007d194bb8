// core/kernels/unroll_attention.hpp: attention of a draft that is unrolled over its own output (EAGLE3); contract in sf/ops.hpp.
#pragma once

#include "sf/ops.hpp"

namespace sf {

at::Tensor unroll_attention(const UnrollAttention& attention);

}  // namespace sf
