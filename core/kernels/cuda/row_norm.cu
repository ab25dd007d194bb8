// RMS norm of rows, alone or after a residual sum. Where a row fits the registers of a block (8192 bfloat16, 4096 float32), a block takes many rows, each is read and written once, and
// the next rows are on their way into shared memory meanwhile; longer rows are looked at twice. The weight's gradient is summed per block, then over blocks.
#include "core/kernels/cuda/device.cuh"

namespace sf::cuda {
namespace {

constexpr int kThreads = 512;
// Rows in shared memory: the one that is worked on and those on their way.
template <bool kResidual>
constexpr int kForwardStages = kResidual ? 3 : 4;
constexpr int64_t kStepRows = 256;       // up to which a norm is as short as a decoding step's, and its start counts

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

// Pieces of coming rows in shared memory, [stage, operand, v, thread]. A thread copies what it alone reads, so nobody waits for another.
template <class T, int N, int V>
struct Pieces {
  Vector<T, N>* begin;
  int operands;

  __device__ Vector<T, N>* at(int stage, int operand, int v) const { return begin + ((stage * operands + operand) * V + v) * static_cast<int>(blockDim.x) + threadIdx.x; }
  __device__ void fetch(int stage, int operand, int v, const void* from, int64_t place) const {
    copy_async<sizeof(Vector<T, N>)>(shared_address(at(stage, operand, v)), static_cast<const T*>(from) + place, true);
  }
  __device__ void read(float (&out)[N], int stage, int operand, int v) const { load(out, &at(stage, operand, v)->at[0]); }
};

// The sum over the block, in every thread, behind one barrier: calls take turns with the halves of `scratch`.
__device__ inline float block_sum_in_turn(float x, float (&scratch)[2][32], int turn) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = static_cast<int>(blockDim.x) / 32;
  x = warp_sum(x);
  if (lane == 0) {
    scratch[turn & 1][warp] = x;
  }
  __syncthreads();
  return warp_sum(lane < warps ? scratch[turn & 1][lane] : 0.0f);
}

// The same where a row fits the block, V vectors a thread.
template <class T, int N, int V, bool kResidual>
__global__ void __launch_bounds__(kThreads, 2) staged_forward_kernel(RmsNormForward a) {
  constexpr int kStages = kForwardStages<kResidual>;
  extern __shared__ float memory[];
  __shared__ float scratch[2][32];
  const Pieces<T, N, V> pieces{reinterpret_cast<Vector<T, N>*>(memory), kResidual ? 2 : 1};
  const auto column = [&](int v) { return static_cast<int64_t>(v * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * N; };
  let_next_come();
  wait_for_before();
  const auto fetch = [&](int64_t row, int stage) {
    if (row < a.r) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (column(v) < a.h) {
          pieces.fetch(stage, 0, v, a.x_rh, row * a.h + column(v));
          if (kResidual) {
            pieces.fetch(stage, 1, v, a.residual_rh, row * a.h + column(v));
          }
        }
      }
    }
    copies_commit();
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    fetch(blockIdx.x + static_cast<int64_t>(i) * gridDim.x, i);
  }
  Vector<T, N> weight[V] = {};
#pragma unroll
  for (int v = 0; v < V; ++v) {
    if (column(v) < a.h) {
      weight[v] = *reinterpret_cast<const Vector<T, N>*>(static_cast<const T*>(a.weight_h) + column(v));
    }
  }
  uint32_t most = 0;
  int stage = 0, turn = 0;
  for (int64_t row = blockIdx.x; row < a.r; row += gridDim.x, ++turn) {
    fetch(row + static_cast<int64_t>(kStages - 1) * gridDim.x, stage == 0 ? kStages - 1 : stage - 1);
    copies_wait<kStages - 1>();
    float x[V][N], squares = 0;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (column(v) < a.h) {
        pieces.read(x[v], stage, 0, v);
        if (kResidual) {
          float other[N];
          pieces.read(other, stage, 1, v);
#pragma unroll
          for (int n = 0; n < N; ++n) {
            x[v][n] = to_float(from_float<T>(x[v][n] + other[n]));
          }
          store(static_cast<T*>(a.sum_rh) + row * a.h + column(v), x[v]);
        }
#pragma unroll
        for (int n = 0; n < N; ++n) {
          squares += x[v][n] * x[v][n];
        }
      }
    }
    const float inverse = rsqrtf(block_sum_in_turn(squares, scratch, turn) / static_cast<float>(a.h) + static_cast<float>(a.eps));
    if (threadIdx.x == 0) {
      a.inverse_r[row] = inverse;
    }
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (column(v) < a.h) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
          x[v][n] *= inverse * to_float(weight[v].at[n]);
        }
        store(static_cast<T*>(a.y_rh) + row * a.h + column(v), x[v]);
        if (a.amax != nullptr) {
          note(most, x[v]);
        }
      }
    }
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  copies_wait<0>();
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

// The same where a row fits the block, V vectors a thread. With u = g inverse: what the row adds to the weight's gradient is u x, to x's u w - x inverse^2 mean(u w x).
template <class T, int N, int V, int kStages>
__global__ void __launch_bounds__(kThreads) staged_backward_kernel(RmsNormBackward a) {
  extern __shared__ float memory[];
  __shared__ float scratch[2][32];
  const bool has_other = a.other_grad_y_rh != nullptr, adds = a.grad_sum_rh != nullptr;
  const int other = 2, added = has_other ? 3 : 2;
  const Pieces<T, N, V> pieces{reinterpret_cast<Vector<T, N>*>(memory), 2 + (has_other ? 1 : 0) + (adds ? 1 : 0)};
  const auto column = [&](int v) { return static_cast<int64_t>(v * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * N; };
  float coming_inverse = 0;
  const auto fetch = [&](int64_t row, int stage) {
    if (row < a.r) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const int64_t place = row * a.h + column(v);
        if (column(v) < a.h) {
          pieces.fetch(stage, 0, v, a.x_rh, place);
          pieces.fetch(stage, 1, v, a.grad_y_rh, place);
          if (has_other) {
            pieces.fetch(stage, other, v, a.other_grad_y_rh, place);
          }
          if (adds) {
            pieces.fetch(stage, added, v, a.grad_sum_rh, place);
          }
        }
      }
    }
    copies_commit();
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    fetch(blockIdx.x + static_cast<int64_t>(i) * gridDim.x, i);
  }
  float weight_sum[V][N] = {};
  Vector<T, N> weight[V] = {};
#pragma unroll
  for (int v = 0; v < V; ++v) {
    if (column(v) < a.h) {
      weight[v] = *reinterpret_cast<const Vector<T, N>*>(static_cast<const T*>(a.weight_h) + column(v));
    }
  }
  if (blockIdx.x < a.r) {
    coming_inverse = a.inverse_r[blockIdx.x];
  }
  uint32_t most = 0;
  int stage = 0, turn = 0;
  for (int64_t row = blockIdx.x; row < a.r; row += gridDim.x, ++turn) {
    fetch(row + static_cast<int64_t>(kStages - 1) * gridDim.x, stage == 0 ? kStages - 1 : stage - 1);
    const float inverse = coming_inverse;
    if (row + gridDim.x < a.r) {
      coming_inverse = a.inverse_r[row + gridDim.x];
    }
    copies_wait<kStages - 1>();
    float gradient[V][N], along = 0;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (column(v) < a.h) {
        float x[N];
        pieces.read(x, stage, 0, v);
        pieces.read(gradient[v], stage, 1, v);
        if (has_other) {
          float part[N];
          pieces.read(part, stage, other, v);
#pragma unroll
          for (int n = 0; n < N; ++n) {
            gradient[v][n] += part[n];
          }
        }
#pragma unroll
        for (int n = 0; n < N; ++n) {
          gradient[v][n] *= inverse;
          weight_sum[v][n] += gradient[v][n] * x[n];
          gradient[v][n] *= to_float(weight[v].at[n]);
          along += gradient[v][n] * x[n];
        }
      }
    }
    const float back = block_sum_in_turn(along, scratch, turn) / static_cast<float>(a.h) * inverse * inverse;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (column(v) < a.h) {
        float x[N];
        pieces.read(x, stage, 0, v);
#pragma unroll
        for (int n = 0; n < N; ++n) {
          gradient[v][n] -= x[n] * back;
        }
        if (adds) {
          pieces.read(x, stage, added, v);
#pragma unroll
          for (int n = 0; n < N; ++n) {
            gradient[v][n] += x[n];
          }
        }
        store(static_cast<T*>(a.grad_x_rh) + row * a.h + column(v), gradient[v]);
        if (a.amax != nullptr) {
          note(most, gradient[v]);
        }
      }
    }
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  copies_wait<0>();
  block_amax_of<T>(most, 0, a.amax);
  if (a.grad_weight_h != nullptr) {
    float* const partial = a.partial_ph + static_cast<int64_t>(blockIdx.x) * a.h;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (column(v) < a.h) {
#pragma unroll
        for (int n = 0; n < N; n += 4) {
          const float four[4] = {weight_sum[v][n], weight_sum[v][n + 1], weight_sum[v][n + 2], weight_sum[v][n + 3]};
          store(partial + column(v) + n, four);
        }
      }
    }
  }
}

// A block takes 32 columns; 32 threads share the partial rows of one, eight loads of each in flight, and a warp adds up what they found.
constexpr int kColumns = 32;

template <class T>
__global__ void __launch_bounds__(kColumns * kColumns) sum_partials_kernel(const float* partial_pc, int64_t p, int64_t c, T* out_c) {
  __shared__ float parts[kColumns][kColumns + 1];
  const int x = threadIdx.x % kColumns, y = threadIdx.x / kColumns;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns + x;
  float sum = 0;
  if (column < c) {
#pragma unroll 8
    for (int64_t i = y; i < p; i += kColumns) {
      sum += partial_pc[i * c + column];
    }
  }
  parts[y][x] = sum;
  __syncthreads();
  const float total = warp_sum(parts[x][y]);
  if (x == 0 && column + y < c) {
    out_c[column + y] = from_float<T>(total);
  }
}

int threads_for(int64_t h, int n) {
  const int64_t wanted = ((h + n - 1) / n + 31) / 32 * 32;
  return static_cast<int>(wanted < kThreads ? wanted : kThreads);
}

// Vectors of a thread where a row fits a block that way; 0: it does not.
template <class T, int N>
int vectors_for(int64_t h) {
  return sizeof(Vector<T, N>) != 16 || h > kThreads * N * 2 ? 0 : h > kThreads / 2 * N ? 2 : 1;
}

// Blocks that stay: about as many threads as the multiprocessors of the cards this is tuned for (132) hold of such kernels.
int64_t blocks_for(int64_t rows, int threads) {
  const int64_t most = 132 * (1280 / threads);
  return rows < most ? rows : most;
}

template <class T, int N, int V>
Error staged_forward(const RmsNormForward& a, cudaStream_t stream) {
  const int threads = threads_for((a.h + V - 1) / V, N);
  const bool has_residual = a.residual_rh != nullptr;
  const auto kernel = has_residual ? staged_forward_kernel<T, N, V, true> : staged_forward_kernel<T, N, V, false>;
  const size_t bytes = static_cast<size_t>(has_residual ? kForwardStages<true> * 2 : kForwardStages<false>) * V * threads * sizeof(Vector<T, N>);
  if (Error error = allow_shared(kernel, bytes)) {
    return error;
  }
  const auto grid = static_cast<unsigned>(blocks_for(a.r, threads));
  if (a.r <= kStepRows) {
    return launch_early_with_shared(kernel, dim3(grid), dim3(threads), 1, bytes, stream, a);
  }
  kernel<<<grid, threads, bytes, stream>>>(a);
  return last_error();
}

template <class T, int N>
Error forward(const RmsNormForward& a, cudaStream_t stream) {
  if constexpr (sizeof(Vector<T, N>) == 16) {
    switch (vectors_for<T, N>(a.h)) {
      case 1: return staged_forward<T, N, 1>(a, stream);
      case 2: return staged_forward<T, N, 2>(a, stream);
      default: break;
    }
  }
  forward_kernel<T, N><<<static_cast<unsigned>(a.r), threads_for(a.h, N), 0, stream>>>(a);
  return last_error();
}

template <class T, int N>
Error longer_backward(const RmsNormBackward& a, unsigned grid, cudaStream_t stream) {
  const int threads = threads_for(a.h, N);
  if (a.grad_weight_h == nullptr) {
    backward_kernel<T, N, false><<<static_cast<unsigned>(a.r), threads, 0, stream>>>(a);
  } else {
    const size_t bytes = static_cast<size_t>((a.h + threads * N - 1) / (threads * N)) * N * threads * sizeof(float);
    if (Error error = allow_shared(backward_kernel<T, N, true>, bytes)) {
      return error;
    }
    backward_kernel<T, N, true><<<grid, threads, bytes, stream>>>(a);
  }
  return last_error();
}

// As many stages as shared memory has room for; the bits don't depend on it.
template <class T, int N, int V, int kStages = 4>
Error staged_backward(const RmsNormBackward& a, unsigned grid, cudaStream_t stream) {
  if constexpr (kStages < 2) {
    return longer_backward<T, N>(a, grid, stream);
  } else {
    const int threads = threads_for((a.h + V - 1) / V, N), operands = 2 + (a.other_grad_y_rh != nullptr ? 1 : 0) + (a.grad_sum_rh != nullptr ? 1 : 0);
    const size_t bytes = static_cast<size_t>(kStages * operands * V) * threads * sizeof(Vector<T, N>);
    if (bytes + 1024 > static_cast<size_t>(shared_most())) {
      return staged_backward<T, N, V, kStages - 1>(a, grid, stream);
    }
    if (Error error = allow_shared(staged_backward_kernel<T, N, V, kStages>, bytes)) {
      return error;
    }
    staged_backward_kernel<T, N, V, kStages><<<grid, threads, bytes, stream>>>(a);
    return last_error();
  }
}

template <class T, int N>
Error backward(const RmsNormBackward& a, cudaStream_t stream) {
  const auto grid = static_cast<unsigned>(rms_norm_partials(a.r, a.h));
  Error error = nullptr;
  if constexpr (sizeof(Vector<T, N>) == 16) {
    switch (vectors_for<T, N>(a.h)) {
      case 1: error = staged_backward<T, N, 1>(a, grid, stream); break;
      case 2: error = staged_backward<T, N, 2>(a, grid, stream); break;
      default: error = longer_backward<T, N>(a, grid, stream);
    }
  } else {
    error = longer_backward<T, N>(a, grid, stream);
  }
  return error != nullptr || a.grad_weight_h == nullptr ? error : sum_partials(a.type, a.partial_ph, grid, a.h, a.grad_weight_h, stream);
}

}  // namespace

Error sum_partials(Type type, const float* partial_pc, int64_t p, int64_t c, void* out_c, cudaStream_t stream) {
  constexpr int threads = kColumns * kColumns;
  const auto grid = static_cast<unsigned>((c + kColumns - 1) / kColumns);
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
