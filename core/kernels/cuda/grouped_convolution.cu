// Depthwise convolution inside blocks of rows, coefficients base + delta. A thread owns N channels and walks the rows of a block with the last (forward) or
// next (backward) rows in registers, so that every element is read once. Four channels a thread: with eight the registers leave too few warps. Formulas: spec DFlash2 7.1.
#include "core/kernels/cuda/device.cuh"

namespace sf::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kMostTaps = static_cast<int>(kConvolutionTaps);
constexpr int kAtOnce = 4;  // rows whose loads are in flight together

template <class T, int N, int kTaps>
__global__ void __launch_bounds__(kThreads, kTaps <= 2 ? 9 : 4) forward_kernel(GroupedConvolution a) {
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

// Backward of two taps where a block's threads fill whole rows: rows travel through shared memory, three batches deep, each thread copying what it alone reads, so that registers do
// not bound what is in flight. The two sums over a group share their shuffles.
template <class T, int N>
__global__ void __launch_bounds__(kThreads) two_tap_backward_kernel(GroupedConvolution a) {
  constexpr int kStages = 3;
  __shared__ Vector<T, N> rows[kStages][kAtOnce][2][kThreads];
  const int h = static_cast<int>(a.h), j = static_cast<int>(a.block_size), groups = static_cast<int>(a.groups);
  const int c = static_cast<int>(blockIdx.x * kThreads + threadIdx.x) * N;
  const int group_size = h / groups, lanes = group_size / N, group = c / group_size, in_group = c % group_size / N;
  const T* x = static_cast<const T*>(a.x_rh) + c;
  const T* g = static_cast<const T*>(a.grad_y_rh) + c;
  const T* delta = static_cast<const T*>(a.delta_rtc) + group;
  T* grad_x = static_cast<T*>(a.grad_x_rh) + c;
  T* grad_delta = static_cast<T*>(a.grad_delta_rtc) + group;
  const int64_t blocks = a.rows / j;
  const int batches = (j + kAtOnce - 1) / kAtOnce;

  struct Place {  // of a batch: rows last, last - 1, ... of a block
    int64_t block;
    int last;
  };
  const auto next = [&](Place& at) {
    at.last -= kAtOnce;
    if (at.last < 0) {
      at = {at.block + gridDim.y, j - 1};
    }
  };
  const auto fetch = [&](const Place& at, int stage) {
    if (at.block < blocks) {
      const int64_t from = (at.block * j + at.last) * h;
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (at.last - k >= 0) {
          copy_async<sizeof(Vector<T, N>)>(shared_address(&rows[stage][k][0][threadIdx.x]), x + from - static_cast<int64_t>(k) * h, true);
          copy_async<sizeof(Vector<T, N>)>(shared_address(&rows[stage][k][1][threadIdx.x]), g + from - static_cast<int64_t>(k) * h, true);
        }
      }
    }
    copies_commit();
  };
  T coefficients[kAtOnce][2];  // of row i for tap 0, of row i + 1 for tap 1
  const auto read_coefficients = [&](const Place& at) {
    if (at.block < blocks) {
      const T* from = delta + (at.block * j + at.last) * a.delta_row_stride;
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (at.last - k >= 0) {
          coefficients[k][0] = from[-k * a.delta_row_stride];
          if (at.last - k + 1 < j) {
            coefficients[k][1] = from[(1 - k) * a.delta_row_stride + groups];
          }
        }
      }
    }
  };

  float base[2][N], base_sum[2][N] = {}, ahead[N] = {};
  load(base[0], static_cast<const T*>(a.base_th) + c);
  load(base[1], static_cast<const T*>(a.base_th) + h + c);
  uint32_t most = 0;
  Place at{blockIdx.y, j - 1}, coming = at;
  for (int i = 0; i < kStages - 1; ++i) {
    fetch(coming, i);
    next(coming);
  }
  read_coefficients(at);
  const int mine = blockIdx.y < blocks ? static_cast<int>((blocks - 1 - blockIdx.y) / gridDim.y + 1) * batches : 0;
  for (int batch = 0, stage = 0; batch < mine; ++batch, stage = stage + 1 == kStages ? 0 : stage + 1) {
    fetch(coming, stage == 0 ? kStages - 1 : stage - 1);
    next(coming);
    float tap[kAtOnce][2];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      tap[k][0] = to_float(coefficients[k][0]);
      tap[k][1] = to_float(coefficients[k][1]);
    }
    const Place here = at;
    next(at);
    read_coefficients(at);
    copies_wait<kStages - 1>();
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int i = here.last - k;
      if (i < 0) {
        break;
      }
      const int64_t row = here.block * j + i;
      const bool is_last = i + 1 == j;
      float value[N], gradient[N], sum[N], dots[2] = {};
      load(value, &rows[stage][k][0][threadIdx.x].at[0]);
      load(gradient, &rows[stage][k][1][threadIdx.x].at[0]);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float behind = is_last ? 0.0f : ahead[n];
        const float first = gradient[n] * value[n], second = behind * value[n];
        dots[0] += first;
        dots[1] += second;
        base_sum[0][n] += first;
        base_sum[1][n] += second;
        sum[n] = (base[0][n] + tap[k][0]) * gradient[n] + (is_last ? 0.0f : (base[1][n] + tap[k][1]) * behind);
        ahead[n] = gradient[n];
      }
      store(grad_x + row * h, sum);
      note(most, sum);
      T* const to = grad_delta + row * 2 * groups;  // this row's tap 0; the next row's tap 1 lies 3 * groups behind
      if (lanes == 1) {
        to[0] = from_float<T>(dots[0]);
        if (!is_last) {
          to[3 * groups] = from_float<T>(dots[1]);
        }
      } else {  // even lanes go on with the first sum, odd ones with the second
        const bool is_odd = threadIdx.x % 2 != 0;
        float dot = (is_odd ? dots[1] : dots[0]) + __shfl_xor_sync(0xffffffffu, is_odd ? dots[0] : dots[1], 1);
        for (int step = 2; step < lanes; step *= 2) {
          dot += __shfl_xor_sync(0xffffffffu, dot, step);
        }
        if (in_group == 0) {
          to[0] = from_float<T>(dot);
        } else if (in_group == 1 && !is_last) {
          to[3 * groups] = from_float<T>(dot);
        }
      }
      if (i == 0 && in_group == 0) {
        to[groups] = from_float<T>(0.0f);  // the tap lies before the block
      }
    }
  }
  copies_wait<0>();
  warp_amax_of<T>(most, a.amax);
  float* const partial = a.partial_pth + static_cast<int64_t>(blockIdx.y) * 2 * h + c;
  store(partial, base_sum[0]);
  store(partial + h, base_sum[1]);
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
auto backward_kernel_for(const GroupedConvolution& a) -> void (*)(GroupedConvolution) {
  if constexpr (N > 1) {
    if (a.taps == 2 && a.h % (kThreads * N) == 0) {
      return two_tap_backward_kernel<T, N>;
    }
  }
  return a.taps <= 2 ? backward_kernel<T, N, 2> : backward_kernel<T, N, kMostTaps>;
}

template <class T, int N>
Error backward(const GroupedConvolution& a, cudaStream_t stream) {
  const int64_t columns = (a.h / N + kThreads - 1) / kThreads, partials = convolution_partials(a.rows / a.block_size);
  const dim3 grid(static_cast<unsigned>(columns), static_cast<unsigned>(partials));
  backward_kernel_for<T, N>(a)<<<grid, kThreads, 0, stream>>>(a);
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
