// Depthwise convolution inside blocks of rows, coefficients base + delta. A thread owns N channels and walks the rows of a block with the last (forward) or
// next (backward) rows in registers, so that every element is read once. Four channels a thread: with eight the registers leave too few warps. Formulas: spec DFlash2 7.1.
#include "core/kernels/cuda/device.cuh"

namespace sf::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kMostTaps = static_cast<int>(kConvolutionTaps);
constexpr int kAtOnce = 4;  // rows whose loads are in flight together

template <class T, int N, int kTaps>
__global__ void __launch_bounds__(kThreads) forward_kernel(GroupedConvolution a) {
  const int64_t c = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * N;
  if (c - threadIdx.x % 32 * N >= a.h) {
    return;  // a warp as a whole: its lanes meet at the end
  }
  const bool inside = c < a.h;
  const int taps = static_cast<int>(a.taps), j = static_cast<int>(a.block_size);
  const int64_t row = static_cast<int64_t>(blockIdx.y) * j;
  const T* x = static_cast<const T*>(a.x_rh) + row * a.h + c;
  const T* delta = static_cast<const T*>(a.delta_rtc) + row * a.delta_row_stride + c / (a.h / a.groups);
  T* y = static_cast<T*>(a.y_rh) + row * a.h + c;
  float base[kTaps][N], past[kTaps][N];
#pragma unroll
  for (int t = 0; t < kTaps; ++t) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      past[t][n] = base[t][n] = 0;
    }
    if (t < taps && inside) {
      load(base[t], static_cast<const T*>(a.base_th) + t * a.h + c);
    }
  }
  uint32_t most = 0;
  for (int begin = 0; begin < j && inside; begin += kAtOnce) {
    Vector<T, N> rows[kAtOnce];
    T coefficients[kAtOnce][kTaps];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (begin + k < j) {
        rows[k] = *reinterpret_cast<const Vector<T, N>*>(x + (begin + k) * a.h);
#pragma unroll
        for (int t = 0; t < kTaps; ++t) {
          if (t < taps) {
            coefficients[k][t] = delta[(begin + k) * a.delta_row_stride + t * a.groups];
          }
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int i = begin + k;
      if (i < j) {
#pragma unroll
        for (int t = kTaps - 1; t > 0; --t) {
#pragma unroll
          for (int n = 0; n < N; ++n) {
            past[t][n] = past[t - 1][n];
          }
        }
        float sum[N];
#pragma unroll
        for (int n = 0; n < N; ++n) {
          past[0][n] = to_float(rows[k].at[n]);
          sum[n] = 0;
        }
#pragma unroll
        for (int t = 0; t < kTaps; ++t) {
          if (t < taps) {  // what lies before the block is zero in `past`
            const float d = to_float(coefficients[k][t]);
#pragma unroll
            for (int n = 0; n < N; ++n) {
              sum[n] += (base[t][n] + d) * past[t][n];
            }
          }
        }
        store(y + i * a.h, sum);
        note(most, sum);
      }
    }
  }
  warp_amax_of<T>(most, a.amax);
}

// Lanes of a group are neighbours; `lanes` is a power of two.
__device__ inline float group_sum(float x, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, step);
  }
  return x;
}

template <class T, int N, int kTaps>
__global__ void __launch_bounds__(kThreads) backward_kernel(GroupedConvolution a) {
  const int64_t c = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * N;
  const bool inside = c < a.h;  // all lanes of a warp stay for the sums over a group
  const int taps = static_cast<int>(a.taps), j = static_cast<int>(a.block_size);
  const int64_t group_size = a.h / a.groups;
  const int lanes = static_cast<int>(group_size / N);
  const int64_t group = inside ? c / group_size : 0;
  const bool writes = inside && c % group_size == 0;
  float base[kTaps][N], base_sum[kTaps][N];
#pragma unroll
  for (int t = 0; t < kTaps; ++t) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      base_sum[t][n] = base[t][n] = 0;
    }
    if (t < taps && inside) {
      load(base[t], static_cast<const T*>(a.base_th) + t * a.h + c);
    }
  }
  uint32_t most = 0;
  const int64_t blocks = a.rows / j;
  for (int64_t block = blockIdx.y; block < blocks; block += gridDim.y) {
    const int64_t row = block * j;
    const T* x = static_cast<const T*>(a.x_rh) + row * a.h + c;
    const T* g = static_cast<const T*>(a.grad_y_rh) + row * a.h + c;
    const T* delta = static_cast<const T*>(a.delta_rtc) + row * a.delta_row_stride + group;
    T* grad_x = static_cast<T*>(a.grad_x_rh) + row * a.h + c;
    T* grad_delta = static_cast<T*>(a.grad_delta_rtc) + row * a.taps * a.groups + group;
    float ahead[kTaps][N];  // gradients of rows i, i + 1, ...
#pragma unroll
    for (int t = 0; t < kTaps; ++t) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        ahead[t][n] = 0;
      }
    }
    for (int last = j - 1; last >= 0; last -= kAtOnce) {
      Vector<T, N> rows[kAtOnce], gradients[kAtOnce];
      T coefficients[kAtOnce][kTaps];  // of row i + t for tap t
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int i = last - k;
        if (i >= 0 && inside) {
          rows[k] = *reinterpret_cast<const Vector<T, N>*>(x + i * a.h);
          gradients[k] = *reinterpret_cast<const Vector<T, N>*>(g + i * a.h);
#pragma unroll
          for (int t = 0; t < kTaps; ++t) {
            if (t < taps && i + t < j) {
              coefficients[k][t] = delta[(i + t) * a.delta_row_stride + t * a.groups];
            }
          }
        }
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int i = last - k;
        if (i < 0) {
          break;
        }
#pragma unroll
        for (int t = kTaps - 1; t > 0; --t) {
#pragma unroll
          for (int n = 0; n < N; ++n) {
            ahead[t][n] = ahead[t - 1][n];
          }
        }
        float here[N], sum[N];
#pragma unroll
        for (int n = 0; n < N; ++n) {
          here[n] = inside ? to_float(rows[k].at[n]) : 0.0f;
          ahead[0][n] = inside ? to_float(gradients[k].at[n]) : 0.0f;
          sum[n] = 0;
        }
#pragma unroll
        for (int t = 0; t < kTaps; ++t) {
          if (t < taps && i + t < j) {
            const int64_t place = static_cast<int64_t>(i + t);
            const float d = inside ? to_float(coefficients[k][t]) : 0.0f;
            float dot = 0;
#pragma unroll
            for (int n = 0; n < N; ++n) {
              const float product = ahead[t][n] * here[n];
              dot += product;
              base_sum[t][n] += product;
              sum[n] += (base[t][n] + d) * ahead[t][n];
            }
            dot = group_sum(dot, lanes);
            if (writes) {
              grad_delta[(place * a.taps + t) * a.groups] = from_float<T>(dot);
            }
          }
          if (t < taps && i < t && writes) {
            grad_delta[(static_cast<int64_t>(i) * a.taps + t) * a.groups] = from_float<T>(0.0f);  // the tap lies before the block
          }
        }
        if (inside) {
          store(grad_x + i * a.h, sum);
          note(most, sum);
        }
      }
    }
  }
  warp_amax_of<T>(most, a.amax);
  if (inside) {
#pragma unroll
    for (int t = 0; t < kTaps; ++t) {
      if (t < taps) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
          a.partial_pth[(static_cast<int64_t>(blockIdx.y) * a.taps + t) * a.h + c + n] = base_sum[t][n];
        }
      }
    }
  }
}

template <class T, int N>
Error forward(const GroupedConvolution& a, cudaStream_t stream) {
  const int64_t columns = (a.h / N + kThreads - 1) / kThreads;
  // Blocks of rows stand on the grid's second axis, which holds 65535.
  constexpr int64_t kMost = 65535;
  const int64_t blocks = a.rows / a.block_size;
  for (int64_t begin = 0; begin < blocks; begin += kMost) {
    GroupedConvolution part = a;
    const int64_t row = begin * a.block_size;
    part.x_rh = static_cast<const T*>(a.x_rh) + row * a.h;
    part.delta_rtc = static_cast<const T*>(a.delta_rtc) + row * a.delta_row_stride;
    part.y_rh = static_cast<T*>(a.y_rh) + row * a.h;
    const int64_t count = blocks - begin < kMost ? blocks - begin : kMost;
    const dim3 grid(static_cast<unsigned>(columns), static_cast<unsigned>(count));
    if (a.taps <= 2) {
      forward_kernel<T, N, 2><<<grid, kThreads, 0, stream>>>(part);
    } else {
      forward_kernel<T, N, kMostTaps><<<grid, kThreads, 0, stream>>>(part);
    }
    if (Error error = last_error()) {
      return error;
    }
  }
  return nullptr;
}

template <class T, int N>
Error backward(const GroupedConvolution& a, cudaStream_t stream) {
  const int64_t columns = (a.h / N + kThreads - 1) / kThreads, partials = convolution_partials(a.rows / a.block_size);
  const dim3 grid(static_cast<unsigned>(columns), static_cast<unsigned>(partials));
  if (a.taps <= 2) {
    backward_kernel<T, N, 2><<<grid, kThreads, 0, stream>>>(a);
  } else {
    backward_kernel<T, N, kMostTaps><<<grid, kThreads, 0, stream>>>(a);
  }
  if (Error error = last_error()) {
    return error;
  }
  return sum_partials(a.type, a.partial_pth, partials, a.taps * a.h, a.grad_base_th, stream);
}

bool takes(const GroupedConvolution& a, int n) {
  return a.h / a.groups % n == 0 && are_aligned(a.x_rh, a.base_th, a.y_rh, a.grad_y_rh, a.grad_x_rh) && a.h % n == 0;
}

}  // namespace

Error grouped_convolution_forward(const GroupedConvolution& a, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  if (a.type == Type::bfloat16) {
    return takes(a, 4) ? forward<bf16, 4>(a, on) : forward<bf16, 1>(a, on);
  }
  return takes(a, 4) ? forward<float, 4>(a, on) : forward<float, 1>(a, on);
}

Error grouped_convolution_backward(const GroupedConvolution& a, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  if (a.type == Type::bfloat16) {
    return takes(a, 4) ? backward<bf16, 4>(a, on) : backward<bf16, 1>(a, on);
  }
  return takes(a, 4) ? backward<float, 4>(a, on) : backward<float, 1>(a, on);
}

}  // namespace sf::cuda
