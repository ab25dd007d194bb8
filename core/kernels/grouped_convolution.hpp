// core/kernels/grouped_convolution.hpp: depthwise convolution along the rows of a block whose coefficients depend on the input.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace sf {

/// y[i, c] = sum over t <= min(i, taps - 1) of (base[t, c] + delta[i, t, group(c)]) * x[i - t, c], i the row's index in its block.
/// x [b, q, h], delta [b, q, t, g], base [t, h] -> [b, q, h]; group(c) = c / (h / g). Taps never cross a block's border.
at::Tensor grouped_convolution(const at::Tensor& x_bqh, const at::Tensor& delta_bqtg, const at::Tensor& base_th, int64_t block_size);

}  // namespace sf
