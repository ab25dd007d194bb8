// core/kernels/cuda/decode.cuh: what the kernels of a decoding step share.
#pragma once

#include "core/kernels/cuda/device.cuh"

#include "core/kernels/cuda/decode_launchers.hpp"

namespace sf::cuda {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;

#ifdef __CUDACC__  // tests/kernels/fibers.hpp has its own
__device__ inline void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// A float at the same place of another block's shared memory.
__device__ inline float of_block(const float* mine, int rank) {
#if __CUDA_ARCH__ >= 900
  uint32_t address;
  float value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(mine)), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
#else
  return *mine;
#endif
}
#endif

template <class T>
__device__ inline float rounded(float x) { return to_float(from_float<T>(x)); }

// A head of the new token: normed and turned, each operation rounded to T, as float in `head`. All lanes of a warp.
template <class T>
__device__ void make_head(float* head, const T* from, const T* weight, const float* cos, const float* sin, int e, int f, float eps, int lane) {
  float squares = 0;
  for (int i = lane; i < e; i += 32) {
    const float x = to_float(from[i]);
    head[i] = x;
    squares += x * x;
  }
  if (weight != nullptr) {
    const float inverse = rsqrtf(warp_sum(squares) / static_cast<float>(e) + eps);
    for (int i = lane; i < e; i += 32) {
      head[i] = rounded<T>(rounded<T>(head[i] * inverse) * to_float(weight[i]));
    }
  }
  __syncwarp();
  if (cos != nullptr) {
    for (int i = lane; i < f; i += 32) {
      const float x = head[i], y = head[i + f], c = cos[i], s = sin[i];
      head[i] = rounded<T>(rounded<T>(x * c) + rounded<T>(-y * s));
      head[i + f] = rounded<T>(rounded<T>(y * c) + rounded<T>(x * s));
    }
  }
  __syncwarp();
}

/// Attention of a step: in registers, of any type, and in bfloat16 on tensor cores.
Error decode_attention_in_registers(const DecodeAttention& a, cudaStream_t stream);
Error decode_attention_on_tensor_cores(const DecodeAttention& a, cudaStream_t stream);

}  // namespace sf::cuda
