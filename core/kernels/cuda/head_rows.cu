// Rows of logits: log-sum-exp, arg-max, the k largest and the label's loss in one read; then the gradient written over them in one read and one write.
//
// A block takes a row. Each thread keeps its largest element as a 64-bit key (value, then lower column first), so keys are distinct and any order of
// comparisons gives the same answer. The k largest elements of the row lie with the k threads whose largest are the largest: only those columns are read again.
#include "core/kernels/cuda/device.cuh"

namespace sf::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kFound = 1024;  // candidates that are ranked at once; more of them (many equal logits) take the slow way
constexpr int kMostCandidates = static_cast<int>(kHeadCandidates);
constexpr float kLog2E = 1.4426950408889634f;

using Key = unsigned long long;

// What would be denormal is 0.
__device__ inline float exp2_fast(float x) {
#ifdef __CUDA_ARCH__
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(x));
  return x;
#else
  return exp2f(x);
#endif
}

__device__ inline Key make_key(float value, int64_t column) {
  unsigned bits = __float_as_uint(value);
  bits ^= bits & 0x80000000u ? 0xffffffffu : 0x80000000u;
  return static_cast<Key>(bits) << 32 | (0xffffffffu - static_cast<unsigned>(column));
}
__device__ inline float key_value(Key key) {
  unsigned bits = static_cast<unsigned>(key >> 32);
  bits ^= bits & 0x80000000u ? 0x80000000u : 0xffffffffu;
  return __uint_as_float(bits);
}
__device__ inline int64_t key_column(Key key) { return 0xffffffffu - static_cast<unsigned>(key); }

__device__ inline float transform(float logit, float multiplier, float softcap) {
  const float u = logit * multiplier;
  return softcap > 0 ? softcap * tanhf(u / softcap) : u;
}
// Slope of the transform where it gave u.
__device__ inline float transform_slope(float u, float multiplier, float softcap) {
  return softcap > 0 ? multiplier * (1.0f - (u / softcap) * (u / softcap)) : multiplier;
}

__device__ inline Key warp_max(Key key) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const Key other = __shfl_xor_sync(0xffffffffu, key, step);
    key = other > key ? other : key;
  }
  return key;
}

__device__ inline Key block_max(Key key, Key* scratch) {
  key = warp_max(key);
  __syncthreads();
  if (threadIdx.x % 32 == 0) {
    scratch[threadIdx.x / 32] = key;
  }
  __syncthreads();
  Key most = 0;
  for (int i = 0; i < kThreads / 32; ++i) {
    most = scratch[i] > most ? scratch[i] : most;
  }
  return most;
}

struct Shared {
  Key keys[kThreads], found[kFound], scratch[kThreads / 32];
  float sums[32];
  int owners[kMostCandidates];
  int owners_count, found_count, contenders;
  Key threshold;
};

// Calls body(column, value) for the columns of all owners that are at least `least`, shared out over the block. A vector whose largest is less is done with at once.
template <class T, int N, class Body>
__device__ void each_owned(const Shared& shared, const HeadRowsForward& a, const T* row, float least, Body&& body) {
  const int rounds = static_cast<int>((a.v + kThreads * N - 1) / (kThreads * N)), count = shared.owners_count * rounds;
  constexpr int kTogether = 2;
  for (int begin = threadIdx.x; begin < count; begin += kTogether * kThreads) {
    Vector<T, N> pieces[kTogether];
    int64_t columns[kTogether];
#pragma unroll
    for (int together = 0; together < kTogether; ++together) {
      const int i = begin + together * kThreads;
      columns[together] = i < count ? (static_cast<int64_t>(i % rounds) * kThreads + shared.owners[i / rounds]) * N : a.v;
      if (columns[together] < a.v) {
        pieces[together] = *reinterpret_cast<const Vector<T, N>*>(row + columns[together]);
      }
    }
#pragma unroll
    for (int together = 0; together < kTogether; ++together) {
      if (columns[together] >= a.v) {
        continue;
      }
      float x[N], largest = -INFINITY;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        x[n] = transform(to_float(pieces[together].at[n]), a.multiplier, a.softcap);
        largest = fmaxf(largest, x[n]);
      }
      if (largest >= least) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
          if (x[n] >= least) {
            body(columns[together] + n, x[n]);
          }
        }
      }
    }
  }
}

template <class T, int N>
__device__ void find_top(Shared& shared, const HeadRowsForward& a, const T* row, Key own) {
  const int k = static_cast<int>(a.k);
  float* values = a.top_values_rk + static_cast<int64_t>(blockIdx.x) * k;
  int64_t* ids = a.top_ids_rk + static_cast<int64_t>(blockIdx.x) * k;
  if (threadIdx.x == 0) {
    shared.owners_count = 0;
    shared.found_count = 0;
    shared.contenders = 0;
    shared.threshold = 1;
  }
  // At least k threads reach the least of what is the warps' n-th largest, n warps of them making k; few others do, and only those are ranked.
  constexpr int kWarps = kThreads / 32;
  Key nth = own;
  for (int taken = kWarps; taken < k; taken += kWarps) {
    const Key largest = warp_max(nth);
    nth = nth == largest ? 0 : nth;  // keys are distinct, or 0
  }
  nth = warp_max(nth);
  if (threadIdx.x % 32 == 0) {
    shared.scratch[threadIdx.x / 32] = nth;
  }
  __syncthreads();
  Key least = ~0ull;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    least = shared.scratch[i] < least ? shared.scratch[i] : least;
  }
  const bool contends = own != 0 && own >= least;
  if (contends) {
    shared.keys[atomicAdd(&shared.contenders, 1)] = own;
  }
  __syncthreads();
  if (contends) {
    const int contenders = shared.contenders;
    int rank = 0;
    for (int i = 0; i < contenders; ++i) {
      rank += shared.keys[i] > own;
    }
    if (rank < k) {
      shared.owners[rank] = threadIdx.x;  // ranks are distinct and without a gap
      atomicAdd(&shared.owners_count, 1);
      if (rank == k - 1) {
        shared.threshold = own;
      }
    }
  }
  __syncthreads();
  const Key threshold = shared.threshold;
  const float least_value = shared.owners_count < k ? -INFINITY : key_value(threshold);
  each_owned<T, N>(shared, a, row, least_value, [&](int64_t column, float value) {
    const Key key = make_key(value, column);
    if (key >= threshold) {
      const int place = atomicAdd(&shared.found_count, 1);
      if (place < kFound) {
        shared.found[place] = key;
      }
    }
  });
  __syncthreads();
  const int count = shared.found_count;
  if (count <= kFound) {
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const Key key = shared.found[i];
      int place = 0;
      for (int other = 0; other < count; ++other) {
        place += shared.found[other] > key;
      }
      if (place < k) {
        values[place] = key_value(key);
        ids[place] = key_column(key);
      }
    }
    for (int i = count + threadIdx.x; i < k; i += kThreads) {  // a row with NaN: its loss is NaN anyway
      values[i] = __int_as_float(0x7fffffff);
      ids[i] = 0;
    }
    return;
  }
  Key last = ~0ull;
  for (int i = 0; i < k; ++i) {
    Key best = 0;
    each_owned<T, N>(shared, a, row, least_value, [&](int64_t column, float value) {
      const Key key = make_key(value, column);
      if (key < last && key > best) {
        best = key;
      }
    });
    last = block_max(best, shared.scratch);
    if (threadIdx.x == 0) {
      values[i] = key_value(last);
      ids[i] = key_column(last);
    }
  }
}

// What a thread knows of the columns it has seen. Which element of `best` is the largest is looked for once, at the end.
template <class T, int N>
struct Seen {
  float most = -INFINITY, sum = 0;  // sum of exp(x - most)
  int column = 0;                   // where `best` begins
  Vector<T, N> best{};
};

// The largest of a vector, NaN passed over.
template <class T, int N>
__device__ inline float largest_of(const Vector<T, N>& piece) {
  if constexpr (sizeof(T) == 2 && N == 8) {
    const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&piece);
    const __nv_bfloat162 most = __hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3]));
    return fmaxf(__low2float(most), __high2float(most));
  } else {
    float most = -INFINITY;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      most = fmaxf(most, to_float(piece.at[n]));
    }
    return most;
  }
}

// Adds kCount vectors; the columns of one begin kThreads * N behind those of the last.
template <class T, int N, bool kPlain, int kCount>
__device__ inline void see(Seen<T, N>& seen, const HeadRowsForward& a, const Vector<T, N> (&pieces)[kCount], int begin, int v) {
  const float before = seen.most;
  float x[kCount][N];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int c = begin + i * kThreads * N;
    if (c < v) {
      float largest = kPlain ? largest_of(pieces[i]) : -INFINITY;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        x[i][n] = to_float(pieces[i].at[n]);
        if (!kPlain) {
          x[i][n] = transform(x[i][n], a.multiplier, a.softcap);
          largest = fmaxf(largest, x[i][n]);
        }
      }
      if (largest > seen.most) {
        seen.most = largest;
        seen.column = c;
        seen.best = pieces[i];
      }
    }
  }
  if (seen.most != before) {
    seen.sum *= exp2_fast((before - seen.most) * kLog2E);  // 0 the first time
  }
  const float base = seen.most == -INFINITY ? 0.0f : seen.most * kLog2E;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (begin + i * kThreads * N < v) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        seen.sum += exp2_fast(fmaf(x[i][n], kLog2E, -base));
      }
    }
  }
}

// Vectors of 16 bytes come through shared memory, some batches ahead; a thread copies what it alone reads.
constexpr int kBatch = 2;
constexpr int kStages = 4;

template <class T, int N, bool kPlain>
__global__ void __launch_bounds__(kThreads, 4) forward_kernel(HeadRowsForward a) {
  extern __shared__ float memory[];
  __shared__ Shared shared;
  const T* row = static_cast<const T*>(a.logits_rv) + static_cast<int64_t>(blockIdx.x) * a.v;
  constexpr int kBatchColumns = kThreads * N * kBatch;
  const int v = static_cast<int>(a.v);  // of int: columns of a few batches behind it are counted, too
  Seen<T, N> seen;
  int begin = static_cast<int>(threadIdx.x) * N;
  if constexpr (sizeof(Vector<T, N>) == 16) {
    auto& pieces = *reinterpret_cast<Vector<T, N>(*)[kStages][kBatch][kThreads]>(memory);
    const auto fetch = [&](int first, int stage) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + i * kThreads * N < v) {
          copy_async<16>(shared_address(&pieces[stage][i][threadIdx.x]), row + first + i * kThreads * N, true);
        }
      }
      copies_commit();
    };
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
      fetch(begin + i * kBatchColumns, i);
    }
    for (int stage = 0; begin < v; begin += kBatchColumns, stage = stage + 1 == kStages ? 0 : stage + 1) {
      fetch(begin + (kStages - 1) * kBatchColumns, stage == 0 ? kStages - 1 : stage - 1);
      copies_wait<kStages - 1>();
      Vector<T, N> batch[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        batch[i] = pieces[stage][i][threadIdx.x];
      }
      see<T, N, kPlain>(seen, a, batch, begin, v);
    }
    copies_wait<0>();
  } else {
    for (; begin < v; begin += kBatchColumns) {
      Vector<T, N> batch[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (begin + i * kThreads * N < v) {
          batch[i] = *reinterpret_cast<const Vector<T, N>*>(row + begin + i * kThreads * N);
        }
      }
      see<T, N, kPlain>(seen, a, batch, begin, v);
    }
  }
  const float most = seen.most, sum = seen.sum;
  int64_t most_column = seen.column;
#pragma unroll
  for (int n = N - 1; n >= 0; --n) {
    const float x = to_float(seen.best.at[n]);
    if (__float_as_uint(kPlain ? x : transform(x, a.multiplier, a.softcap)) == __float_as_uint(most)) {  // 0 and -0 are equal, their keys are not
      most_column = seen.column + n;
    }
  }
  const Key own = most == -INFINITY ? 0 : make_key(most, most_column);
  const Key largest = block_max(own, shared.scratch);
  const float top = largest == 0 ? 0.0f : key_value(largest);
  const float total = block_sum(own == 0 ? sum : sum * exp2_fast((most - top) * kLog2E), shared.sums);
  const float log_sum_exp = top + logf(total);
  if (threadIdx.x == 0) {
    const float nll = log_sum_exp - transform(to_float(row[a.labels_r[blockIdx.x]]), a.multiplier, a.softcap);
    a.log_sum_exp_r[blockIdx.x] = log_sum_exp;
    a.nll_r[blockIdx.x] = nll < 0 ? 0 : nll;  // NaN stays
    a.argmax_r[blockIdx.x] = largest == 0 ? 0 : key_column(largest);
    a.max_probability_r[blockIdx.x] = 1.0f / total;
    if (a.wanted_r != nullptr) {
      a.wanted_values_r[blockIdx.x] = transform(to_float(row[a.wanted_r[blockIdx.x]]), a.multiplier, a.softcap);
    }
  }
  if (a.k > 0) {
    find_top<T, N>(shared, a, row, own);
  }
}

// sign(p - q) with q of the teacher's logit z.
__device__ inline float sign_of_difference(float p, float z, float teacher_log_sum_exp) {
  const float q = exp2_fast((z - teacher_log_sum_exp) * kLog2E);
  return p > q ? 1.0f : (p < q ? -1.0f : 0.0f);
}

template <class T, int N>
__global__ void __launch_bounds__(kThreads) distance_kernel(HeadDistance a) {
  __shared__ float scratch[32];
  const int64_t state = a.teacher_index_r[blockIdx.x];
  const T* row = static_cast<const T*>(a.logits_rv) + static_cast<int64_t>(blockIdx.x) * a.v;
  const T* teacher = static_cast<const T*>(a.teacher_tv) + state * a.v;
  const float log_sum_exp = a.log_sum_exp_r[blockIdx.x], teacher_log_sum_exp = a.teacher_log_sum_exp_t[state];
  float distance = 0, tilt = 0;
  constexpr int kAtOnce = 2;
  for (int64_t begin = static_cast<int64_t>(threadIdx.x) * N; begin < a.v; begin += static_cast<int64_t>(kThreads) * N * kAtOnce) {
    float x[kAtOnce][N], z[kAtOnce][N];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t c = begin + static_cast<int64_t>(i) * kThreads * N;
      if (c < a.v) {
        load(x[i], row + c);
        load(z[i], teacher + c);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (begin + static_cast<int64_t>(i) * kThreads * N < a.v) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
          const float p = exp2_fast((transform(x[i][n], a.multiplier, a.softcap) - log_sum_exp) * kLog2E);
          const float q = exp2_fast((z[i][n] - teacher_log_sum_exp) * kLog2E);
          distance += fabsf(p - q);
          tilt += p > q ? p : (p < q ? -p : 0.0f);
        }
      }
    }
  }
  distance = block_sum(distance, scratch);
  tilt = block_sum(tilt, scratch);
  if (threadIdx.x == 0) {
    a.distance_r[blockIdx.x] = distance;
    a.tilt_r[blockIdx.x] = tilt;
  }
}

template <class T, int N, bool kTeacher>
__global__ void __launch_bounds__(kThreads) backward_kernel(HeadRowsBackward a) {
  const int64_t r = blockIdx.x;
  T* row = static_cast<T*>(a.logits_rv) + r * a.v;
  const float factor = a.grad_nll_r == nullptr ? 0.0f : a.grad_nll_r[r];
  const float log_sum_exp = a.log_sum_exp_r[r];
  const int k = static_cast<int>(a.k), t = threadIdx.x;
  const int64_t label = a.labels_r[r];
  const T* teacher = nullptr;
  float grad_distance = 0, level = factor, teacher_log_sum_exp = 0;  // gradient: p * (level + grad_distance * sign(p - q))
  if (kTeacher) {
    const int64_t state = a.teacher_index_r[r];
    teacher = static_cast<const T*>(a.teacher_tv) + state * a.v;
    teacher_log_sum_exp = a.teacher_log_sum_exp_t[state];
    grad_distance = a.grad_distance_r[r];
    level = factor - grad_distance * a.tilt_r[r];
  }

  // Columns with more than the softmax: candidates, and the label unless it is one of them. Formed before the row is overwritten.
  int64_t special = -1;
  float special_gradient = 0;
  if (t <= k) {
    special = t < k ? a.ids_rk[r * k + t] : label;
    float add = t < k ? a.grad_values_rk[r * k + t] : 0.0f;
    if (special == label) {
      add -= factor;
    }
    for (int i = 0; t == k && i < k; ++i) {
      if (a.ids_rk[r * k + i] == label) {
        special = -1;
      }
    }
    if (special >= 0) {
      const float u = transform(to_float(row[special]), a.multiplier, a.softcap);
      const float p = exp2_fast((u - log_sum_exp) * kLog2E);
      const float sign = kTeacher ? sign_of_difference(p, to_float(teacher[special]), teacher_log_sum_exp) : 0.0f;
      special_gradient = (p * (level + grad_distance * sign) + add) * transform_slope(u, a.multiplier, a.softcap);
    }
  }
  __syncthreads();
  constexpr int kAtOnce = kTeacher ? 2 : 4;
  for (int64_t begin = static_cast<int64_t>(t) * N; begin < a.v; begin += static_cast<int64_t>(kThreads) * N * kAtOnce) {
    float x[kAtOnce][N], z[kAtOnce][N];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t c = begin + static_cast<int64_t>(i) * kThreads * N;
      if (c < a.v) {
        load(x[i], row + c);
        if (kTeacher) {
          load(z[i], teacher + c);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t c = begin + static_cast<int64_t>(i) * kThreads * N;
      if (c < a.v) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
          const float u = transform(x[i][n], a.multiplier, a.softcap), p = exp2_fast((u - log_sum_exp) * kLog2E);
          const float sign = kTeacher ? sign_of_difference(p, z[i][n], teacher_log_sum_exp) : 0.0f;
          x[i][n] = p * (level + grad_distance * sign) * transform_slope(u, a.multiplier, a.softcap);
        }
        store(row + c, x[i]);
      }
    }
  }
  __syncthreads();
  if (special >= 0) {
    row[special] = from_float<T>(special_gradient);
  }
}

template <class T, int N>
Error forward(const HeadRowsForward& a, cudaStream_t stream) {
  const bool is_plain = a.multiplier == 1.0f && !(a.softcap > 0);
  const auto kernel = is_plain ? forward_kernel<T, N, true> : forward_kernel<T, N, false>;
  constexpr size_t bytes = sizeof(Vector<T, N>) == 16 ? 16 * kThreads * kBatch * kStages : 0;
  if (Error error = allow_shared(kernel, bytes)) {
    return error;
  }
  kernel<<<static_cast<unsigned>(a.r), kThreads, bytes, stream>>>(a);
  return last_error();
}

template <class T, int N>
Error backward(const HeadRowsBackward& a, cudaStream_t stream) {
  if (a.grad_distance_r != nullptr) {
    backward_kernel<T, N, true><<<static_cast<unsigned>(a.r), kThreads, 0, stream>>>(a);
  } else {
    backward_kernel<T, N, false><<<static_cast<unsigned>(a.r), kThreads, 0, stream>>>(a);
  }
  return last_error();
}

template <class T, int N>
Error distance(const HeadDistance& a, cudaStream_t stream) {
  distance_kernel<T, N><<<static_cast<unsigned>(a.r), kThreads, 0, stream>>>(a);
  return last_error();
}

}  // namespace

Error head_rows_forward(const HeadRowsForward& a, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  const bool aligned = is_aligned(a.logits_rv);
  if (a.type == Type::bfloat16) {
    return aligned && a.v % 8 == 0 ? forward<bf16, 8>(a, on) : forward<bf16, 1>(a, on);
  }
  return aligned && a.v % 4 == 0 ? forward<float, 4>(a, on) : forward<float, 1>(a, on);
}

Error head_rows_backward(const HeadRowsBackward& a, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  const bool aligned = is_aligned(a.logits_rv);
  if (a.type == Type::bfloat16) {
    return aligned && a.v % 8 == 0 ? backward<bf16, 8>(a, on) : backward<bf16, 1>(a, on);
  }
  return aligned && a.v % 4 == 0 ? backward<float, 4>(a, on) : backward<float, 1>(a, on);
}

Error head_distance(const HeadDistance& a, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  const bool aligned = are_aligned(a.logits_rv, a.teacher_tv);
  if (a.type == Type::bfloat16) {
    return aligned && a.v % 8 == 0 ? distance<bf16, 8>(a, on) : distance<bf16, 1>(a, on);
  }
  return aligned && a.v % 4 == 0 ? distance<float, 4>(a, on) : distance<float, 1>(a, on);
}

}  // namespace sf::cuda
