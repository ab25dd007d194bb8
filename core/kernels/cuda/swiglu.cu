// silu(gate) * up and its gradients: one pass over memory each.
#include "core/kernels/cuda/device.cuh"

namespace sf::cuda {
namespace {

constexpr int kThreads = 256;
// Blocks for each multiprocessor, of which the cards this is tuned for have 132: a block that stays raises its magnitudes once.
template <bool kBackward>
constexpr int kResident = kBackward ? 5 : 6;

template <class T, int N, bool kBackward>
__global__ void __launch_bounds__(kThreads, kResident<kBackward>) swiglu_kernel(Swiglu a) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads * N;
  uint32_t most = 0, most_up = 0;
  for (int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * N; at < a.count; at += step) {
    float gate[N], up[N], g[N];
    load(gate, static_cast<const T*>(a.gate) + at);
    load(up, static_cast<const T*>(a.up) + at);
    if (kBackward) {
      load(g, static_cast<const T*>(a.grad_y) + at);
    }
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
  const int64_t per_block = static_cast<int64_t>(kThreads) * N, blocks = (a.count + per_block - 1) / per_block, most = 132 * kResident<kBackward>;
  swiglu_kernel<T, N, kBackward><<<static_cast<unsigned>(blocks < most ? blocks : most), kThreads, 0, stream>>>(a);
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
