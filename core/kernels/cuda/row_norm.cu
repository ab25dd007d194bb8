// RMS norm of rows, alone or after a residual sum. Forward reads and writes each row once (the second look at a row hits the cache); backward reads
// row and gradient once where a row fits a block, twice where not. The weight's gradient is summed per block, then over blocks.
#include "core/kernels/cuda/device.cuh"

namespace sf::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int64_t kStepRows = 256;       // up to which a norm is as short as a decoding step's, and its start counts
constexpr int64_t kForwardBlocks = 396;  // three for each multiprocessor of the cards this is tuned for

template <class T, int N>
__global__ void __launch_bounds__(kThreads) forward_kernel(RmsNormForward a) {
  __shared__ float scratch[32];
  const int64_t row = blockIdx.x;
  const T* x = static_cast<const T*>(a.x_rh) + row * a.h;
  const T* residual = static_cast<const T*>(a.residual_rh);
  T* y = static_cast<T*>(a.y_rh) + row * a.h;
  const T* source = x;
  if (residual != nullptr) {
    residual += row * a.h;
    source = static_cast<T*>(a.sum_rh) + row * a.h;
  }
  const uint32_t before = amax_before(a.amax);
  float squares = 0;
  for (int64_t c = threadIdx.x * N; c < a.h; c += blockDim.x * N) {
    float v[N];
    load(v, x + c);
    if (residual != nullptr) {
      float w[N];
      load(w, residual + c);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        v[i] = to_float(from_float<T>(v[i] + w[i]));
      }
      store(static_cast<T*>(a.sum_rh) + row * a.h + c, v);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      squares += v[i] * v[i];
    }
  }
  const float inverse = rsqrtf(block_sum(squares, scratch) / static_cast<float>(a.h) + static_cast<float>(a.eps));
  if (threadIdx.x == 0) {
    a.inverse_r[row] = inverse;
  }
  uint32_t most = 0;
  for (int64_t c = threadIdx.x * N; c < a.h; c += blockDim.x * N) {
    float v[N], w[N];
    load(v, source + c);
    load(w, static_cast<const T*>(a.weight_h) + c);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      v[i] = v[i] * inverse * w[i];
    }
    store(y + c, v);
    note(most, v);
  }
  block_amax_of<T>(most, before, a.amax);
}

// The same where a row fits the block: a block takes many rows, the weight stays in registers, and the next row is on its way while this one is summed.
template <class T, int N, bool kResidual>
__global__ void __launch_bounds__(kThreads, 3) one_round_forward_kernel(RmsNormForward a) {
  using Numbers = Vector<T, N>;
  __shared__ float scratch[32];
  const int64_t c = static_cast<int64_t>(threadIdx.x) * N;
  const bool inside = c < a.h;
  let_next_come();
  wait_for_before();
  Numbers weight{}, next_x{}, next_residual{};
  if (inside) {
    weight = *reinterpret_cast<const Numbers*>(static_cast<const T*>(a.weight_h) + c);
  }
  const auto fetch = [&](int64_t row) {
    if (row < a.r && inside) {
      next_x = *reinterpret_cast<const Numbers*>(static_cast<const T*>(a.x_rh) + row * a.h + c);
      if (kResidual) {
        next_residual = *reinterpret_cast<const Numbers*>(static_cast<const T*>(a.residual_rh) + row * a.h + c);
      }
    }
  };
  fetch(blockIdx.x);
  uint32_t most = 0;
  for (int64_t row = blockIdx.x; row < a.r; row += gridDim.x) {
    float v[N], squares = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      v[i] = to_float(next_x.at[i]);
      if (kResidual) {
        v[i] = to_float(from_float<T>(v[i] + to_float(next_residual.at[i])));
      }
      squares += v[i] * v[i];
    }
    fetch(row + gridDim.x);
    if (kResidual && inside) {
      store(static_cast<T*>(a.sum_rh) + row * a.h + c, v);
    }
    const float inverse = rsqrtf(block_sum(squares, scratch) / static_cast<float>(a.h) + static_cast<float>(a.eps));
    if (threadIdx.x == 0) {
      a.inverse_r[row] = inverse;
    }
    if (inside) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        v[i] = v[i] * inverse * to_float(weight.at[i]);
      }
      store(static_cast<T*>(a.y_rh) + row * a.h + c, v);
      note(most, v);
    }
  }
  block_amax_of<T>(most, 0, a.amax);
}

// gradient of w * x * inverse: with u = x * inverse, (g w - u mean(g w u)) * inverse.
template <class T, int N, bool kWeight>
__global__ void __launch_bounds__(kThreads) backward_kernel(RmsNormBackward a) {
  extern __shared__ float sums[];  // [N * ceil(h / (threads * N)), threads]: each thread's own columns
  __shared__ float scratch[32];
  const int rounds = static_cast<int>((a.h + blockDim.x * N - 1) / (blockDim.x * N));
  if (kWeight) {
    for (int i = 0; i < rounds * N; ++i) {
      sums[i * blockDim.x + threadIdx.x] = 0;
    }
  }
  const T* weight = static_cast<const T*>(a.weight_h);
  uint32_t most = 0;
  for (int64_t row = blockIdx.x; row < a.r; row += gridDim.x) {
    const T* x = static_cast<const T*>(a.x_rh) + row * a.h;
    const T* g = static_cast<const T*>(a.grad_y_rh) + row * a.h;
    const float inverse = a.inverse_r[row];
    float along = 0;
    float vx[N], vg[N], vw[N], vs[N];
    const auto read = [&](int64_t c) {
      load(vx, x + c);
      load(vg, g + c);
      load(vw, weight + c);
      if (a.other_grad_y_rh != nullptr) {
        load(vs, static_cast<const T*>(a.other_grad_y_rh) + row * a.h + c);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          vg[i] += vs[i];
        }
      }
    };
    const auto column = [&](int k) { return (static_cast<int64_t>(k) * blockDim.x + threadIdx.x) * N; };
    for (int k = 0; k < rounds; ++k) {
      if (column(k) < a.h) {
        read(column(k));
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const float unit = vx[i] * inverse;
          along += vg[i] * vw[i] * unit;
          if (kWeight) {
            sums[(k * N + i) * blockDim.x + threadIdx.x] += vg[i] * unit;
          }
        }
      }
    }
    along = block_sum(along, scratch) / static_cast<float>(a.h);
    for (int k = 0; k < rounds; ++k) {
      const int64_t c = column(k);
      if (c < a.h) {
        read(c);
        if (a.grad_sum_rh != nullptr) {
          load(vs, static_cast<const T*>(a.grad_sum_rh) + row * a.h + c);
        }
#pragma unroll
        for (int i = 0; i < N; ++i) {
          vg[i] = (vg[i] * vw[i] - vx[i] * inverse * along) * inverse;
          if (a.grad_sum_rh != nullptr) {
            vg[i] += vs[i];
          }
        }
        store(static_cast<T*>(a.grad_x_rh) + row * a.h + c, vg);
        note(most, vg);
      }
    }
  }
  warp_amax_of<T>(most, a.amax);
  if (kWeight) {
    float* partial = a.partial_ph + static_cast<int64_t>(blockIdx.x) * a.h;
    for (int k = 0; k < rounds; ++k) {
      const int64_t c = (static_cast<int64_t>(k) * blockDim.x + threadIdx.x) * N;
      if (c < a.h) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          partial[c + i] = sums[(k * N + i) * blockDim.x + threadIdx.x];
        }
      }
    }
  }
}

// The same where a row fits the block: a thread keeps its columns' weights and sums in registers, and the next row is on its way while this one is summed.
template <class T, int N, bool kWeight, bool kOther>
__global__ void __launch_bounds__(kThreads, 2) one_round_backward_kernel(RmsNormBackward a) {
  __shared__ float scratch[32];
  const int64_t c = static_cast<int64_t>(threadIdx.x) * N;
  const bool inside = c < a.h, adds = a.grad_sum_rh != nullptr;
  float weight_sum[N] = {};
  Vector<T, N> weight{};
  if (inside) {
    weight = *reinterpret_cast<const Vector<T, N>*>(static_cast<const T*>(a.weight_h) + c);
  }
  Vector<T, N> next_x{}, next_g{}, next_o{};
  float next_inverse = 0;
  const auto fetch = [&](int64_t row) {
    if (row < a.r) {
      next_inverse = a.inverse_r[row];
      if (inside) {
        const int64_t from = row * a.h + c;
        next_x = *reinterpret_cast<const Vector<T, N>*>(static_cast<const T*>(a.x_rh) + from);
        next_g = *reinterpret_cast<const Vector<T, N>*>(static_cast<const T*>(a.grad_y_rh) + from);
        if (kOther) {
          next_o = *reinterpret_cast<const Vector<T, N>*>(static_cast<const T*>(a.other_grad_y_rh) + from);
        }
      }
    }
  };
  fetch(blockIdx.x);
  uint32_t most = 0;
  for (int64_t row = blockIdx.x; row < a.r; row += gridDim.x) {
    const float inverse = next_inverse;
    Vector<T, N> added{};
    if (adds && inside) {
      added = *reinterpret_cast<const Vector<T, N>*>(static_cast<const T*>(a.grad_sum_rh) + row * a.h + c);
    }
    const Vector<T, N> x = next_x;
    const auto unit = [&](int i) { return to_float(x.at[i]) * inverse; };  // formed twice: registers are few
    float gradient[N], along = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      gradient[i] = kOther ? to_float(next_g.at[i]) + to_float(next_o.at[i]) : to_float(next_g.at[i]);
    }
    fetch(row + gridDim.x);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (kWeight) {
        weight_sum[i] += gradient[i] * unit(i);
      }
      gradient[i] *= to_float(weight.at[i]);
      along += gradient[i] * unit(i);
    }
    along = block_sum(along, scratch) / static_cast<float>(a.h);
    if (inside) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        gradient[i] = (gradient[i] - unit(i) * along) * inverse;
        gradient[i] += to_float(added.at[i]);  // zeros where nothing is added
      }
      store(static_cast<T*>(a.grad_x_rh) + row * a.h + c, gradient);
      note(most, gradient);
    }
  }
  warp_amax_of<T>(most, a.amax);
  if (kWeight && inside) {
    float* partial = a.partial_ph + static_cast<int64_t>(blockIdx.x) * a.h + c;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      partial[i] = weight_sum[i];
    }
  }
}

// 32 columns and 8 partial rows at a time; the eight are added in order at the end.
template <class T>
__global__ void sum_partials_kernel(const float* partial_pc, int64_t p, int64_t c, T* out_c) {
  __shared__ float parts[8][33];
  const int64_t column = static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x;
  float sum = 0;
  if (column < c) {
    for (int64_t i = threadIdx.y; i < p; i += 8) {
      sum += partial_pc[i * c + column];
    }
  }
  parts[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y == 0 && column < c) {
    float total = 0;
    for (int i = 0; i < 8; ++i) {
      total += parts[i][threadIdx.x];
    }
    out_c[column] = from_float<T>(total);
  }
}

int threads_for(int64_t h, int n) {
  const int64_t wanted = ((h + n - 1) / n + 31) / 32 * 32;
  return static_cast<int>(wanted < kThreads ? wanted : kThreads);
}

template <class T, int N>
Error forward(const RmsNormForward& a, cudaStream_t stream) {
  const int threads = threads_for(a.h, N);
  if (a.h <= static_cast<int64_t>(threads) * N) {
    const auto grid = static_cast<unsigned>(a.r < kForwardBlocks ? a.r : kForwardBlocks);
    const auto kernel = a.residual_rh != nullptr ? one_round_forward_kernel<T, N, true> : one_round_forward_kernel<T, N, false>;
    if (a.r <= kStepRows) {
      return launch_early(kernel, dim3(grid), dim3(threads), 1, stream, a);
    }
    kernel<<<grid, threads, 0, stream>>>(a);
  } else {
    forward_kernel<T, N><<<static_cast<unsigned>(a.r), threads, 0, stream>>>(a);
  }
  return last_error();
}

template <class T, int N>
Error backward(const RmsNormBackward& a, cudaStream_t stream) {
  const int threads = threads_for(a.h, N);
  const auto grid = static_cast<unsigned>(rms_norm_partials(a.r));
  const bool wants_weight = a.grad_weight_h != nullptr;
  if (a.h <= static_cast<int64_t>(threads) * N) {
    const auto kernel = a.other_grad_y_rh != nullptr ? (wants_weight ? one_round_backward_kernel<T, N, true, true> : one_round_backward_kernel<T, N, false, true>)
                                                     : (wants_weight ? one_round_backward_kernel<T, N, true, false> : one_round_backward_kernel<T, N, false, false>);
    kernel<<<grid, threads, 0, stream>>>(a);
  } else if (!wants_weight) {
    backward_kernel<T, N, false><<<static_cast<unsigned>(a.r), threads, 0, stream>>>(a);
  } else {
    const size_t bytes = static_cast<size_t>((a.h + threads * N - 1) / (threads * N)) * N * threads * sizeof(float);
    if (Error error = allow_shared(backward_kernel<T, N, true>, bytes)) {
      return error;
    }
    backward_kernel<T, N, true><<<grid, threads, bytes, stream>>>(a);
  }
  if (Error error = last_error()) {
    return error;
  }
  if (!wants_weight) {
    return nullptr;
  }
  return sum_partials(a.type, a.partial_ph, grid, a.h, a.grad_weight_h, stream);
}

}  // namespace

Error sum_partials(Type type, const float* partial_pc, int64_t p, int64_t c, void* out_c, cudaStream_t stream) {
  const dim3 threads(32, 8);
  const auto grid = static_cast<unsigned>((c + 31) / 32);
  if (type == Type::bfloat16) {
    sum_partials_kernel<<<grid, threads, 0, stream>>>(partial_pc, p, c, static_cast<bf16*>(out_c));
  } else {
    sum_partials_kernel<<<grid, threads, 0, stream>>>(partial_pc, p, c, static_cast<float*>(out_c));
  }
  return last_error();
}

Error rms_norm_forward(const RmsNormForward& a, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  const bool aligned = are_aligned(a.x_rh, a.residual_rh, a.weight_h, a.sum_rh, a.y_rh);
  if (a.type == Type::bfloat16) {
    return aligned && a.h % 8 == 0 ? forward<bf16, 8>(a, on) : forward<bf16, 1>(a, on);
  }
  return aligned && a.h % 4 == 0 ? forward<float, 4>(a, on) : forward<float, 1>(a, on);
}

Error rms_norm_backward(const RmsNormBackward& a, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  const bool aligned = are_aligned(a.x_rh, a.weight_h, a.grad_y_rh, a.other_grad_y_rh, a.grad_sum_rh, a.grad_x_rh);
  if (a.type == Type::bfloat16) {
    return aligned && a.h % 8 == 0 ? backward<bf16, 8>(a, on) : backward<bf16, 1>(a, on);
  }
  return aligned && a.h % 4 == 0 ? backward<float, 4>(a, on) : backward<float, 1>(a, on);
}

}  // namespace sf::cuda
