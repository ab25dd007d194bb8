// Attention of a new token over its sequence's cache, in float32.
//
// A block takes a sequence, a key/value head and up to four of the query heads that share it. Eight lanes hold a key, so a warp looks at four keys at a time and a
// block at 32; each group of eight lanes keeps a maximum, a sum and an output of its own, which are merged at the end: exp(max_i - max) weighs them. Bound by the bytes of
// keys and values: 2 * e * 2 of them for each token and head.
#include "core/kernels/cuda/decode.cuh"

namespace sf::cuda {
namespace {

constexpr int kLanes = 8;              // that hold a key
constexpr int kGroups = 32 / kLanes;   // keys of a warp

template <class T, int kPart>
__device__ inline void load_part(float (&out)[kPart], const T* from) {
  constexpr int kAtOnce = 16 / sizeof(T);
#pragma unroll
  for (int i = 0; i < kPart; i += kAtOnce) {
    float some[kAtOnce];
    load(some, from + i);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      out[i + j] = some[j];
    }
  }
}

template <class T, int kHeadSize, int kHeads>
__global__ void __launch_bounds__(kThreads) attention_kernel(DecodeAttention a) {
  constexpr int kPart = kHeadSize / kLanes;
  __shared__ float heads[kHeads + 2][kHeadSize];   // queries, key, value of the new token
  __shared__ float merged[kWarps][kHeads][kHeadSize];
  __shared__ float maxima[kWarps][kHeads], sums[kWarps][kHeads];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int n = static_cast<int>(a.n), m = static_cast<int>(a.m), group = n / m;
  const int64_t sequence = blockIdx.x;
  const int kv = blockIdx.y, first = blockIdx.z * kHeads;
  const int count = min(kHeads, group - first);
  const int64_t position = a.positions_b[sequence];
  const T* qkv = static_cast<const T*>(a.qkv_bxe) + sequence * (n + 2 * m) * kHeadSize;
  const float *cos = a.cos_bf + sequence * a.f, *sin = a.sin_bf + sequence * a.f;
  const float eps = static_cast<float>(a.eps);
  const int64_t row = (sequence * m + kv) * a.capacity * kHeadSize;
  T* keys = static_cast<T*>(a.keys_bmce) + row;
  T* values = static_cast<T*>(a.values_bmce) + row;

  if (warp < count) {
    make_head<T>(heads[warp], qkv + (kv * group + first + warp) * kHeadSize, static_cast<const T*>(a.query_weight_e), cos, sin, kHeadSize, static_cast<int>(a.f), eps, lane);
  } else if (warp == kHeads) {
    make_head<T>(heads[kHeads], qkv + (n + kv) * kHeadSize, static_cast<const T*>(a.key_weight_e), cos, sin, kHeadSize, static_cast<int>(a.f), eps, lane);
  } else if (warp == kHeads + 1) {
    make_head<T>(heads[kHeads + 1], qkv + (n + m + kv) * kHeadSize, nullptr, nullptr, nullptr, kHeadSize, static_cast<int>(a.f), eps, lane);
  }
  __syncthreads();
  if (first == 0 && threadIdx.x < kHeadSize) {
    keys[position * kHeadSize + threadIdx.x] = from_float<T>(heads[kHeads][threadIdx.x]);
    values[position * kHeadSize + threadIdx.x] = from_float<T>(heads[kHeads + 1][threadIdx.x]);
  }

  const int part = lane % kLanes * kPart, member = lane / kLanes;
  float query[kHeads][kPart], out[kHeads][kPart], largest[kHeads], sum[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    largest[h] = -INFINITY;
    sum[h] = 0;
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
      query[h][i] = h < count ? heads[h][part + i] * a.scale : 0;
      out[h][i] = 0;
    }
  }
  const int tokens = static_cast<int>(position) + 1;
  for (int begin = warp * kGroups; begin < tokens; begin += kWarps * kGroups) {  // the same for all lanes of a warp
    const int token = begin + member;
    const bool is_there = token < tokens;
    float key[kPart], value[kPart];
    if (token < position) {
      load_part<T, kPart>(key, keys + static_cast<int64_t>(token) * kHeadSize + part);
      load_part<T, kPart>(value, values + static_cast<int64_t>(token) * kHeadSize + part);
    } else {
#pragma unroll
      for (int i = 0; i < kPart; ++i) {
        key[i] = heads[kHeads][part + i];
        value[i] = heads[kHeads + 1][part + i];
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float score = 0;
#pragma unroll
      for (int i = 0; i < kPart; ++i) {
        score += query[h][i] * key[i];
      }
      score = warp_sum<kLanes>(score);
      if (is_there) {
        const float before = largest[h];
        largest[h] = fmaxf(before, score);
        const float keep = __expf(before - largest[h]), weight = __expf(score - largest[h]);
        sum[h] = sum[h] * keep + weight;
#pragma unroll
        for (int i = 0; i < kPart; ++i) {
          out[h][i] = out[h][i] * keep + weight * value[i];
        }
      }
    }
  }

  // Lanes that hold the same part in the groups of a warp.
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
#pragma unroll
    for (int step = kLanes; step < 32; step *= 2) {
      const float other = __shfl_xor_sync(0xffffffffu, largest[h], step), more = __shfl_xor_sync(0xffffffffu, sum[h], step);
      const float top = fmaxf(largest[h], other);
      const float keep = top == -INFINITY ? 0.0f : __expf(largest[h] - top), add = top == -INFINITY ? 0.0f : __expf(other - top);
      sum[h] = sum[h] * keep + more * add;
#pragma unroll
      for (int i = 0; i < kPart; ++i) {
        out[h][i] = out[h][i] * keep + __shfl_xor_sync(0xffffffffu, out[h][i], step) * add;
      }
      largest[h] = top;
    }
    if (lane == 0) {
      maxima[warp][h] = largest[h];
      sums[warp][h] = sum[h];
    }
    if (member == 0) {
#pragma unroll
      for (int i = 0; i < kPart; ++i) {
        merged[warp][h][part + i] = out[h][i];
      }
    }
  }
  __syncthreads();
  for (int place = threadIdx.x; place < count * kHeadSize; place += kThreads) {
    const int h = place / kHeadSize, i = place % kHeadSize;
    float top = -INFINITY;
    for (int w = 0; w < kWarps; ++w) {
      top = fmaxf(top, maxima[w][h]);
    }
    float total = 0, found = 0;
    for (int w = 0; w < kWarps; ++w) {
      const float weight = __expf(maxima[w][h] - top);  // 0 for a warp without a key
      total += sums[w][h] * weight;
      found += merged[w][h][i] * weight;
    }
    static_cast<T*>(a.out_bne)[(sequence * n + kv * group + first + h) * kHeadSize + i] = from_float<T>(found / total);
  }
}

template <class T, int kHeadSize>
Error attention_of(const DecodeAttention& a, cudaStream_t stream) {
  const auto group = static_cast<unsigned>(a.n / a.m);
  const auto grid = [&](unsigned heads) { return dim3(static_cast<unsigned>(a.b), static_cast<unsigned>(a.m), (group + heads - 1) / heads); };
  if (group == 1) {
    attention_kernel<T, kHeadSize, 1><<<grid(1), kThreads, 0, stream>>>(a);
  } else if (group == 2) {
    attention_kernel<T, kHeadSize, 2><<<grid(2), kThreads, 0, stream>>>(a);
  } else {
    attention_kernel<T, kHeadSize, 4><<<grid(4), kThreads, 0, stream>>>(a);
  }
  return last_error();
}

}  // namespace

Error decode_attention_in_registers(const DecodeAttention& a, cudaStream_t stream) { return a.e == 64 ? attention_of<float, 64>(a, stream) : attention_of<float, 128>(a, stream); }

}  // namespace sf::cuda
