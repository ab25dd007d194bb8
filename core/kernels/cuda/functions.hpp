// core/kernels/cuda/functions.hpp: the launchers by name, for the table in library.cpp. What each does is said at its arguments in launchers.hpp.
#pragma once

#include "core/kernels/cuda/launchers.hpp"

namespace sf::cuda {

Error rms_norm_forward(const RmsNormForward&, void* stream);
Error rms_norm_backward(const RmsNormBackward&, void* stream);
Error head_norm_rope_forward(const HeadNormRope&, void* stream);
Error head_norm_rope_backward(const HeadNormRope&, void* stream);
Error swiglu_forward(const Swiglu&, void* stream);
Error swiglu_backward(const Swiglu&, void* stream);
Error grouped_convolution_forward(const GroupedConvolution&, void* stream);
Error grouped_convolution_backward(const GroupedConvolution&, void* stream);
Error block_attention_forward(const BlockAttention&, void* stream);
Error block_attention_backward(const BlockAttention&, void* stream);
Error head_rows_forward(const HeadRowsForward&, void* stream);
Error head_rows_backward(const HeadRowsBackward&, void* stream);
Error head_distance(const HeadDistance&, void* stream);
Error distill_rows_forward(const DistillRows&, void* stream);
Error distill_rows_backward(const DistillRows&, void* stream);
Error segment_sum(const SegmentSum&, void* stream);
Error adamw(const Adamw&, void* stream);
Error accumulate_product(const AccumulateProduct&, void* stream);
Error float8_amax(const Float8Amax&, void* stream);
Error float8_encode(const Float8Encode&, void* stream);
Error float8_transpose(const Float8Transpose&, void* stream);
Error float8_product(const Float8Product&, void* stream);

}  // namespace sf::cuda
