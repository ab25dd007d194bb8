#include "core/kernels/slow_paths.hpp"

#include "core/kernels/cuda/launchers.hpp"

namespace sf {

const char* slow_attention(bool is_bfloat16, int64_t head_size) {
  return is_bfloat16 && (head_size == 64 || head_size == 128) ? nullptr : "its kernel takes bfloat16 and head sizes of 64 and 128";
}

// The elements of a head lie in a warp's registers.
const char* slow_head_norm_rope(int64_t head_size, int64_t pairs) {
  constexpr int64_t kHeadMost = 256, kPairsMost = 128;
  return head_size % 2 == 0 && pairs % 2 == 0 && head_size <= kHeadMost && pairs <= kPairsMost ? nullptr : "its kernel takes even head sizes up to 256";
}

// A group's channels lie in the registers of at most a warp, 16 bytes a lane, and its lanes are a power of two.
const char* slow_grouped_convolution(int64_t taps, int64_t group_size) {
  constexpr int64_t kGroupMost = 128;
  return taps <= cuda::kConvolutionTaps && (group_size & (group_size - 1)) == 0 && group_size <= kGroupMost
             ? nullptr
             : "its kernel takes up to 4 taps and groups of 1, 2, 4 .. 128 channels";
}

const char* slow_head_objective(int64_t candidates) { return candidates <= cuda::kHeadCandidates ? nullptr : "its kernel finds up to 32 candidates"; }

}  // namespace sf
