#include "core/kernels/cuda/decode_launchers.hpp"
#include "core/kernels/cuda/functions.hpp"

namespace sf::cuda {
const DecodeLaunchers* decode_launchers();  // decode.cu
}

extern "C" __attribute__((visibility("default"))) const sf::cuda::Launchers* sf_cuda_launchers_v1() {
#ifdef SF_WITH_KERNELS
  using namespace sf::cuda;
  static const Launchers launchers = {
      .rms_norm_forward = rms_norm_forward,
      .rms_norm_backward = rms_norm_backward,
      .head_norm_rope_forward = head_norm_rope_forward,
      .head_norm_rope_backward = head_norm_rope_backward,
      .swiglu_forward = swiglu_forward,
      .swiglu_backward = swiglu_backward,
      .grouped_convolution_forward = grouped_convolution_forward,
      .grouped_convolution_backward = grouped_convolution_backward,
      .block_attention_forward = block_attention_forward,
      .block_attention_backward = block_attention_backward,
      .head_rows_forward = head_rows_forward,
      .head_rows_backward = head_rows_backward,
      .head_distance = head_distance,
      .distill_rows_forward = distill_rows_forward,
      .distill_rows_backward = distill_rows_backward,
      .segment_sum = segment_sum,
      .adamw = adamw,
      .accumulate_product = accumulate_product,
      .float8_amax = float8_amax,
      .float8_encode = float8_encode,
      .float8_transpose = float8_transpose,
      .float8_product = float8_product,
  };
  return &launchers;
#else
  return nullptr;
#endif
}

extern "C" __attribute__((visibility("default"))) const sf::cuda::DecodeLaunchers* sf_cuda_decode_launchers_v1() {
#ifdef SF_WITH_KERNELS
  return sf::cuda::decode_launchers();
#else
  return nullptr;
#endif
}
