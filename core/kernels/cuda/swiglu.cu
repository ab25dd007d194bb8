// silu(gate) * up and its gradients: one pass over memory each.
#include "core/kernels/cuda/device.cuh"

namespace sf::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kBlocks = 528;  // four for each multiprocessor of the cards this is tuned for: a block that stays raises its magnitudes once

// The next vectors are on their way while these are computed.
template <class T, int N, bool kBackward>
__global__ void __launch_bounds__(kThreads, 4) swiglu_kernel(Swiglu a) {
  using Numbers = Vector<T, N>;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads * N;
  Numbers next_gate{}, next_up{}, next_g{};
  const auto fetch = [&](int64_t at) {
    if (at < a.count) {
      next_gate = *reinterpret_cast<const Numbers*>(static_cast<const T*>(a.gate) + at);
      next_up = *reinterpret_cast<const Numbers*>(static_cast<const T*>(a.up) + at);
      if (kBackward) {
        next_g = *reinterpret_cast<const Numbers*>(static_cast<const T*>(a.grad_y) + at);
      }
    }
  };
  uint32_t most = 0, most_up = 0;
  int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * N;
  fetch(at);
  for (; at < a.count; at += step) {
    float gate[N], up[N], g[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      gate[i] = to_float(next_gate.at[i]);
      up[i] = to_float(next_up.at[i]);
      g[i] = to_float(next_g.at[i]);
    }
    fetch(at + step);
    if (!kBackward) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        up[i] *= gate[i] / (1.0f + __expf(-gate[i]));
      }
      store(static_cast<T*>(a.y) + at, up);
      note(most, up);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float sigmoid = 1.0f / (1.0f + __expf(-gate[i]));
        const float silu = gate[i] * sigmoid;
        const float slope = sigmoid * (1.0f + gate[i] * (1.0f - sigmoid));
        gate[i] = g[i] * up[i] * slope;
        up[i] = g[i] * silu;
      }
      store(static_cast<T*>(a.grad_gate) + at, gate);
      store(static_cast<T*>(a.grad_up) + at, up);
      note(most, gate);
      note(most_up, up);
    }
  }
  block_amax_of<T>(most, 0, a.amax);
  if (kBackward) {
    block_amax_of<T>(most_up, 0, a.amax_up);
  }
}

template <class T, int N, bool kBackward>
Error run(const Swiglu& a, cudaStream_t stream) {
  const int64_t per_block = static_cast<int64_t>(kThreads) * N, blocks = (a.count + per_block - 1) / per_block;
  swiglu_kernel<T, N, kBackward><<<static_cast<unsigned>(blocks < kBlocks ? blocks : kBlocks), kThreads, 0, stream>>>(a);
  return last_error();
}

template <bool kBackward>
Error by_type(const Swiglu& a, cudaStream_t stream) {
  const bool aligned = are_aligned(a.gate, a.up, a.y, a.grad_y, a.grad_gate, a.grad_up);
  if (a.type == Type::bfloat16) {
    return aligned && a.count % 8 == 0 ? run<bf16, 8, kBackward>(a, stream) : run<bf16, 1, kBackward>(a, stream);
  }
  return aligned && a.count % 4 == 0 ? run<float, 4, kBackward>(a, stream) : run<float, 1, kBackward>(a, stream);
}

}  // namespace

Error swiglu_forward(const Swiglu& a, void* stream) { return by_type<false>(a, static_cast<cudaStream_t>(stream)); }
Error swiglu_backward(const Swiglu& a, void* stream) { return by_type<true>(a, static_cast<cudaStream_t>(stream)); }

}  // namespace sf::cuda
