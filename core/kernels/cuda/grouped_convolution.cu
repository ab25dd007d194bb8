// Depthwise convolution inside blocks of rows, coefficients base + delta. A thread owns N channels and walks the rows of a block with the last (forward) or
// next (backward) rows in registers, so that every element is read once. Formulas: spec DFlash2 7.1.
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

// Two taps where a block's threads fill whole rows: rows travel through shared memory, some batches ahead, each thread copying what it alone reads, so that registers do not bound what
// is in flight. A block takes every gridDim.y-th block of rows, in batches of kBatch rows, forward from the first row, backward from the last.
constexpr int kBatch = 2;
template <bool kBackward>
constexpr int kStages = kBackward ? 4 : 5;
constexpr int kForwardBlocks = 7;  // of a multiprocessor

template <class T, int N, bool kBackward>
struct Rows {
  Vector<T, N> at[kStages<kBackward>][kBatch][kBackward ? 2 : 1][kThreads];
};

template <bool kBackward>
struct Batch {
  int64_t block;
  int first;  // row of the block, the batch's others follow it in the direction of the walk

  __device__ static Batch of_block(int64_t block, int j) { return {block, kBackward ? j - 1 : 0}; }
  __device__ int row(int k) const { return kBackward ? first - k : first + k; }
  __device__ bool has(int k, int j) const { return kBackward ? first - k >= 0 : first + k < j; }
  __device__ void go_on(int j) {
    first = row(kBatch);
    if (!has(0, j)) {
      *this = of_block(block + gridDim.y, j);
    }
  }
};

template <class T, int N>
__global__ void __launch_bounds__(kThreads, kForwardBlocks) two_tap_forward_kernel(GroupedConvolution a) {
  constexpr int kDeep = kStages<false>;
  extern __shared__ float memory[];
  auto& rows = reinterpret_cast<Rows<T, N, false>*>(memory)->at;
  const int h = static_cast<int>(a.h), j = static_cast<int>(a.block_size), groups = static_cast<int>(a.groups);
  const int c = static_cast<int>(blockIdx.x * kThreads + threadIdx.x) * N;
  const T* const x = static_cast<const T*>(a.x_rh) + c;
  const T* const delta = static_cast<const T*>(a.delta_rtc) + c / (h / groups);
  T* const y = static_cast<T*>(a.y_rh) + c;
  const int64_t blocks = a.rows / j;
  const auto fetch = [&](const Batch<false>& at, int stage) {
    if (at.block < blocks) {
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (at.has(k, j)) {
          copy_async<sizeof(Vector<T, N>)>(shared_address(&rows[stage][k][0][threadIdx.x]), x + (at.block * j + at.row(k)) * h, true);
        }
      }
    }
    copies_commit();
  };
  T coefficients[kBatch][2];
  const auto read_coefficients = [&](const Batch<false>& at) {
    if (at.block < blocks) {
      const T* const from = delta + (at.block * j + at.first) * a.delta_row_stride;
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (at.has(k, j)) {
          coefficients[k][0] = from[k * a.delta_row_stride];
          coefficients[k][1] = from[k * a.delta_row_stride + groups];
        }
      }
    }
  };
  Batch<false> at = Batch<false>::of_block(blockIdx.y, j), coming = at;
#pragma unroll
  for (int i = 0; i < kDeep - 1; ++i) {
    fetch(coming, i);
    coming.go_on(j);
  }
  float base[2][N], before[N];
  load(base[0], static_cast<const T*>(a.base_th) + c);
  load(base[1], static_cast<const T*>(a.base_th) + h + c);
  read_coefficients(at);
  uint32_t most = 0;
  for (int stage = 0; at.block < blocks; stage = stage + 1 == kDeep ? 0 : stage + 1) {
    fetch(coming, stage == 0 ? kDeep - 1 : stage - 1);
    coming.go_on(j);
    float tap[kBatch][2];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      tap[k][0] = to_float(coefficients[k][0]);
      tap[k][1] = to_float(coefficients[k][1]);
    }
    const Batch<false> here = at;
    at.go_on(j);
    read_coefficients(at);
    copies_wait<kDeep - 1>();
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (!here.has(k, j)) {
        break;
      }
      const bool is_first = here.row(k) == 0;
      float value[N], sum[N];
      load(value, &rows[stage][k][0][threadIdx.x].at[0]);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        sum[n] = (base[0][n] + tap[k][0]) * value[n] + (is_first ? 0.0f : (base[1][n] + tap[k][1]) * before[n]);
        before[n] = value[n];
      }
      store(y + (here.block * j + here.row(k)) * h, sum);
      if (a.amax != nullptr) {
        note(most, sum);
      }
    }
  }
  copies_wait<0>();
  warp_amax_of<T>(most, a.amax);
}

// The two sums over a group share their shuffles.
template <class T, int N>
__global__ void __launch_bounds__(kThreads, 4) two_tap_backward_kernel(GroupedConvolution a) {
  constexpr int kDeep = kStages<true>;
  extern __shared__ float memory[];
  auto& rows = reinterpret_cast<Rows<T, N, true>*>(memory)->at;
  const int h = static_cast<int>(a.h), j = static_cast<int>(a.block_size), groups = static_cast<int>(a.groups);
  const int c = static_cast<int>(blockIdx.x * kThreads + threadIdx.x) * N;
  const int group_size = h / groups, lanes = group_size / N, group = c / group_size, in_group = c % group_size / N;
  const T* const x = static_cast<const T*>(a.x_rh) + c;
  const T* const g = static_cast<const T*>(a.grad_y_rh) + c;
  const T* const delta = static_cast<const T*>(a.delta_rtc) + group;
  T* const grad_x = static_cast<T*>(a.grad_x_rh) + c;
  T* const grad_delta = static_cast<T*>(a.grad_delta_rtc) + group;
  const int64_t blocks = a.rows / j;
  const auto fetch = [&](const Batch<true>& at, int stage) {
    if (at.block < blocks) {
      const int64_t from = (at.block * j + at.first) * h;
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (at.has(k, j)) {
          copy_async<sizeof(Vector<T, N>)>(shared_address(&rows[stage][k][0][threadIdx.x]), x + from - static_cast<int64_t>(k) * h, true);
          copy_async<sizeof(Vector<T, N>)>(shared_address(&rows[stage][k][1][threadIdx.x]), g + from - static_cast<int64_t>(k) * h, true);
        }
      }
    }
    copies_commit();
  };
  T coefficients[kBatch][2];  // of row i for tap 0, of row i + 1 for tap 1
  const auto read_coefficients = [&](const Batch<true>& at) {
    if (at.block < blocks) {
      const T* const from = delta + (at.block * j + at.first) * a.delta_row_stride;
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (at.has(k, j)) {
          coefficients[k][0] = from[-k * a.delta_row_stride];
          if (at.row(k) + 1 < j) {
            coefficients[k][1] = from[(1 - k) * a.delta_row_stride + groups];
          }
        }
      }
    }
  };
  Batch<true> at = Batch<true>::of_block(blockIdx.y, j), coming = at;
#pragma unroll
  for (int i = 0; i < kDeep - 1; ++i) {
    fetch(coming, i);
    coming.go_on(j);
  }
  float base[2][N], base_sum[2][N] = {}, ahead[N] = {};
  load(base[0], static_cast<const T*>(a.base_th) + c);
  load(base[1], static_cast<const T*>(a.base_th) + h + c);
  read_coefficients(at);
  uint32_t most = 0;
  for (int stage = 0; at.block < blocks; stage = stage + 1 == kDeep ? 0 : stage + 1) {
    fetch(coming, stage == 0 ? kDeep - 1 : stage - 1);
    coming.go_on(j);
    float tap[kBatch][2];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      tap[k][0] = to_float(coefficients[k][0]);
      tap[k][1] = to_float(coefficients[k][1]);
    }
    const Batch<true> here = at;
    at.go_on(j);
    read_coefficients(at);
    copies_wait<kDeep - 1>();
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (!here.has(k, j)) {
        break;
      }
      const int i = here.row(k);
      const int64_t row = here.block * j + i;
      const bool is_last = i + 1 == j;
      float value[N], gradient[N], sum[N], dots[2] = {};
      load(value, &rows[stage][k][0][threadIdx.x].at[0]);
      load(gradient, &rows[stage][k][1][threadIdx.x].at[0]);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float behind = is_last ? 0.0f : ahead[n];
        dots[0] += gradient[n] * value[n];
        dots[1] += behind * value[n];
        base_sum[0][n] += gradient[n] * value[n];
        base_sum[1][n] += behind * value[n];
        sum[n] = (base[0][n] + tap[k][0]) * gradient[n] + (is_last ? 0.0f : (base[1][n] + tap[k][1]) * behind);
        ahead[n] = gradient[n];
      }
      store(grad_x + row * h, sum);
      if (a.amax != nullptr) {
        note(most, sum);
      }
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
#pragma unroll
  for (int t = 0; t < 2; ++t) {
#pragma unroll
    for (int n = 0; n < N; n += 4) {
      const float four[4] = {base_sum[t][n], base_sum[t][n + 1], base_sum[t][n + 2], base_sum[t][n + 3]};
      store(partial + t * h + n, four);
    }
  }
}

template <class T, int N, bool kBackward>
Error run_two_taps(const GroupedConvolution& a, int64_t blocks, cudaStream_t stream) {
  constexpr size_t bytes = sizeof(Rows<T, N, kBackward>);
  const auto kernel = kBackward ? two_tap_backward_kernel<T, N> : two_tap_forward_kernel<T, N>;
  if (Error error = allow_shared(kernel, bytes)) {
    return error;
  }
  const dim3 grid(static_cast<unsigned>(a.h / (kThreads * N)), static_cast<unsigned>(blocks));
  kernel<<<grid, kThreads, bytes, stream>>>(a);
  return last_error();
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
  const int64_t columns = (a.h / N + kThreads - 1) / kThreads;
  const dim3 grid(static_cast<unsigned>(columns), static_cast<unsigned>(convolution_partials(a.rows / a.block_size, a.h)));
  if (a.taps <= 2) {
    backward_kernel<T, N, 2><<<grid, kThreads, 0, stream>>>(a);
  } else {
    backward_kernel<T, N, kMostTaps><<<grid, kThreads, 0, stream>>>(a);
  }
  return last_error();
}

bool takes(const GroupedConvolution& a, int n) {
  return a.h / a.groups % n == 0 && are_aligned(a.x_rh, a.base_th, a.y_rh, a.grad_y_rh, a.grad_x_rh) && a.h % n == 0;
}
// The kernels of two taps.
bool takes_whole_rows(const GroupedConvolution& a, int n) { return takes(a, n) && a.taps == 2 && a.h % (kThreads * n) == 0; }

template <class T, int N>
Error two_tap_forward(const GroupedConvolution& a, cudaStream_t stream) {
  const int64_t blocks = a.rows / a.block_size, columns = a.h / (kThreads * N), most = (132 * kForwardBlocks + columns - 1) / columns, rounds = (blocks + most - 1) / most;
  return run_two_taps<T, N, false>(a, (blocks + rounds - 1) / rounds, stream);  // all blocks have about as much to do
}

template <class T>
Error forward_of(const GroupedConvolution& a, cudaStream_t stream) {
  constexpr int N = 16 / sizeof(T);
  return takes_whole_rows(a, N)   ? two_tap_forward<T, N>(a, stream)
         : takes_whole_rows(a, 4) ? two_tap_forward<T, 4>(a, stream)
         : takes(a, 4)            ? forward<T, 4>(a, stream)
                                  : forward<T, 1>(a, stream);
}

template <class T>
Error backward_of(const GroupedConvolution& a, cudaStream_t stream) {
  constexpr int N = 16 / sizeof(T);
  const int64_t partials = convolution_partials(a.rows / a.block_size, a.h);
  const Error error = takes_whole_rows(a, N)   ? run_two_taps<T, N, true>(a, partials, stream)
                      : takes_whole_rows(a, 4) ? run_two_taps<T, 4, true>(a, partials, stream)
                      : takes(a, 4)            ? backward<T, 4>(a, stream)
                                               : backward<T, 1>(a, stream);
  return error != nullptr ? error : sum_partials(a.type, a.partial_pth, partials, a.taps * a.h, a.grad_base_th, stream);
}

}  // namespace

Error grouped_convolution_forward(const GroupedConvolution& a, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  return a.type == Type::bfloat16 ? forward_of<bf16>(a, on) : forward_of<float>(a, on);
}

Error grouped_convolution_backward(const GroupedConvolution& a, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  return a.type == Type::bfloat16 ? backward_of<bf16>(a, on) : backward_of<float>(a, on);
}

}  // namespace sf::cuda
