// core/kernels/lookup.hpp: rows of a trainable table by token.
#pragma once

#include <ATen/core/Tensor.h>

namespace sf {

/// table_vx[ids], [..., x]. The gradient is summed per token in the order of the ids: the same bits every run.
at::Tensor lookup(const at::Tensor& table_vx, const at::Tensor& ids);

/// table[ids[i]] += rows[i] in the order of i for each token: the same bits every run. table [v, x] wide, ids [r] int64, rows [r, x].
void add_by_token(at::Tensor& table_vx, const at::Tensor& ids_r, const at::Tensor& rows_rx);

}  // namespace sf
