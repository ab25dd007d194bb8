// AdamW over many tensors in one pass: clip, moments, master, rounded copy. 30 bytes a parameter: gradient, master and moments read, all but the gradient
// and the copy written.
#include "core/kernels/cuda/device.cuh"

namespace sf::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVectors = 4;                              // of 4 elements, for each thread
constexpr int64_t kElements = kThreads * kVectors * 4;   // for each block
constexpr int kTensors = 32;                             // for each launch

struct Launch {
  AdamwTensor tensors[kTensors];
  int64_t blocks_before[kTensors + 1];
  int tensors_count;
  Adamw options;
};

__device__ inline bool is_update(const Adamw& a) {
  const float norm = *a.norm, denominator = *a.denominator;
  return isfinite(norm) && isfinite(denominator) && denominator > 0;
}

__global__ void __launch_bounds__(kThreads) adamw_kernel(const __grid_constant__ Launch launch) {
  const Adamw& a = launch.options;
  int which = 0;
  while (which + 1 < launch.tensors_count && static_cast<int64_t>(blockIdx.x) >= launch.blocks_before[which + 1]) {
    ++which;
  }
  const AdamwTensor& tensor = launch.tensors[which];
  const int64_t begin = (static_cast<int64_t>(blockIdx.x) - launch.blocks_before[which]) * kElements;
  if (!is_update(a)) {  // weights may have lent their memory within the window
    for (int64_t i = begin + threadIdx.x; tensor.weight != nullptr && i < begin + kElements && i < tensor.count; i += kThreads) {
      static_cast<bf16*>(tensor.weight)[i] = __float2bfloat16_rn(tensor.master[i]);
    }
    return;
  }
  const float steps = *tensor.steps + 1.0f;  // counted by count_kernel afterwards
  const float bound = static_cast<float>(a.max_norm) / (*a.norm + 1e-6f);
  const float clip = bound < 1.0f ? bound : 1.0f;
  // What is near 1 or 0 is formed in double: 1 - 0.999 in float is off by 1e-5.
  const float decay = static_cast<float>(1.0 - a.learning_rate * a.weight_decay), eps = static_cast<float>(a.eps);
  const float keep1 = static_cast<float>(a.beta1), add1 = static_cast<float>(1.0 - a.beta1);
  const float keep2 = static_cast<float>(a.beta2), add2 = static_cast<float>(1.0 - a.beta2);
  const float step_size = static_cast<float>(a.learning_rate / (1.0 - pow(a.beta1, static_cast<double>(steps))));
  const float root = static_cast<float>(sqrt(1.0 - pow(a.beta2, static_cast<double>(steps))));
  const auto update = [&](float& p, float g, float& m, float& v) {
    g *= clip;
    p *= decay;
    m = keep1 * m + add1 * g;
    v = keep2 * v + add2 * g * g;
    p -= step_size * m / (sqrtf(v) / root + eps);
  };
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int64_t i = begin + (static_cast<int64_t>(k) * kThreads + threadIdx.x) * 4;
    if (i + 4 <= tensor.count) {
      float p[4], g[4], m[4], v[4];
      load(p, tensor.master + i);
      load(g, tensor.gradient + i);
      load(m, tensor.exp_avg + i);
      load(v, tensor.exp_avg_sq + i);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        update(p[n], g[n], m[n], v[n]);
      }
      store(tensor.master + i, p);
      store(tensor.exp_avg + i, m);
      store(tensor.exp_avg_sq + i, v);
      if (tensor.weight != nullptr) {
        store(static_cast<bf16*>(tensor.weight) + i, p);
      }
    } else {
      for (int64_t n = i; n < tensor.count; ++n) {
        update(tensor.master[n], tensor.gradient[n], tensor.exp_avg[n], tensor.exp_avg_sq[n]);
        if (tensor.weight != nullptr) {
          static_cast<bf16*>(tensor.weight)[n] = __float2bfloat16_rn(tensor.master[n]);
        }
      }
    }
  }
}

__global__ void count_kernel(const __grid_constant__ Launch launch) {
  if (is_update(launch.options) && threadIdx.x < launch.tensors_count) {
    *launch.tensors[threadIdx.x].steps += 1.0f;
  }
}

}  // namespace

Error adamw(const Adamw& a, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  for (int64_t begin = 0; begin < a.tensors_count; begin += kTensors) {
    Launch launch;
    launch.options = a;
    launch.options.tensors = nullptr;
    launch.tensors_count = static_cast<int>(a.tensors_count - begin < kTensors ? a.tensors_count - begin : kTensors);
    launch.blocks_before[0] = 0;
    for (int i = 0; i < launch.tensors_count; ++i) {
      launch.tensors[i] = a.tensors[begin + i];
      launch.blocks_before[i + 1] = launch.blocks_before[i] + (launch.tensors[i].count + kElements - 1) / kElements;
    }
    const auto blocks = static_cast<unsigned>(launch.blocks_before[launch.tensors_count]);
    if (blocks > 0) {
      adamw_kernel<<<blocks, kThreads, 0, on>>>(launch);
      count_kernel<<<1, kTensors, 0, on>>>(launch);
    }
    if (Error error = last_error()) {
      return error;
    }
  }
  return nullptr;
}

}  // namespace sf::cuda
