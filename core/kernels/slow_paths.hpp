// core/kernels/slow_paths.hpp: which shapes the CUDA kernels take. Others run as compositions of LibTorch operations, right and slower; the plan names
// them, and the log when they first run. Each function gives the reason, null when the kernel takes the shape.
#pragma once

#include <cstdint>

namespace sf {

[[nodiscard]] const char* slow_attention(bool is_bfloat16, int64_t head_size);
[[nodiscard]] const char* slow_head_norm_rope(int64_t head_size, int64_t pairs);
[[nodiscard]] const char* slow_grouped_convolution(int64_t taps, int64_t group_size);
[[nodiscard]] const char* slow_head_objective(int64_t candidates);

}  // namespace sf
