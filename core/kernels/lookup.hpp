// core/kernels/lookup.hpp: rows of a trainable table by token.
#pragma once

#include <ATen/core/Tensor.h>

namespace sf {

/// table_vx[ids], [..., x]. The gradient is summed per token in the order of the ids: the same bits every run.
at::Tensor lookup(const at::Tensor& table_vx, const at::Tensor& ids);

}  // namespace sf
