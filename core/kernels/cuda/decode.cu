// One decoding step: attention of a new token over its sequence's cache, and the gate of the MLP.
//
// Attention in float32: a block takes a sequence, a key/value head and up to four of the query heads that share it. Eight lanes hold a key, so a warp looks at four keys at a time and a
// block at 32; each group of eight lanes keeps a maximum, a sum and an output of its own, which are merged at the end: exp(max_i - max) weighs them. Bound by the bytes of
// keys and values: 2 * e * 2 of them for each token and head.
#include "core/kernels/cuda/device.cuh"

#include "core/kernels/cuda/decode_launchers.hpp"

namespace sf::cuda {
namespace {

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

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kLanes = 8;              // that hold a key
constexpr int kGroups = 32 / kLanes;   // keys of a warp

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

// The same in bfloat16 on tensor cores, bound by memory where the one above is bound by what it can keep in registers.
//
// A warp takes 16 tokens at a time. Scores are a product of queries (A, heads are its rows, eight of sixteen used) and keys (B); outputs, turned over, one of values (A, elements
// of a head are its rows) and weights (B): what the first leaves in a lane is what the second takes from it. Neither product asks in which order columns are summed or rows stand,
// so lanes load 16 neighbouring bytes of a key or value and give each product the parts as they lie: keys and values go from memory to registers and nowhere else.
//
// The blocks of a cluster share a sequence's tokens evenly, whatever its length, and merge what they found through each other's shared memory.
namespace mma {

constexpr int kStep = 16;         // tokens of a warp
constexpr int kRows = 8;          // query heads of a block at most
constexpr float kLog2e = 1.44269504088896341f;

#ifdef __CUDACC__  // tests/kernels/fibers.hpp has its own
__device__ inline void tile_product(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

#endif

__device__ inline uint32_t packed(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Four words of 16 bytes, or zeros.
__device__ inline void fetch(uint32_t* to, const bf16* from, bool is_there) {
  const uint4 v = is_there ? *reinterpret_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
  to[0] = v.x;
  to[1] = v.y;
  to[2] = v.z;
  to[3] = v.w;
}

template <int kHeadSize, int kHeads>
__global__ void __launch_bounds__(kThreads, 2) attention_kernel(DecodeAttention a, int splits) {
  constexpr int kKeyParts = kHeadSize / 32, kValueParts = kHeadSize / 64, kTiles = kHeadSize / 16;
  constexpr int kQueryStride = kHeadSize + 32, kOutStride = kHeadSize + 4;  // no two lanes in one bank
  __shared__ float heads[kHeads + 2][kHeadSize];                            // queries, key, value of the new token
  __shared__ __align__(16) bf16 queries[kRows][kQueryStride];
  __shared__ float merged[kWarps][kHeads][kOutStride];
  __shared__ float maxima[kWarps][kHeads], sums[kWarps][kHeads];
  __shared__ float block_out[kHeads][kHeadSize], block_maximum[kHeads], block_sum_of[kHeads];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
  const int n = static_cast<int>(a.n), m = static_cast<int>(a.m), group = n / m;
  const int rank = static_cast<int>(blockIdx.x) % splits;
  const int64_t sequence = blockIdx.x / splits;
  const int kv = blockIdx.y, first = blockIdx.z * kHeads;
  const int count = min(kHeads, group - first);
  let_next_come();
  wait_for_before();
  const int position = static_cast<int>(a.positions_b[sequence]), tokens = position + 1;
  const int64_t row = (sequence * m + kv) * a.capacity * kHeadSize;
  bf16* keys = static_cast<bf16*>(a.keys_bmce) + row;
  bf16* values = static_cast<bf16*>(a.values_bmce) + row;
  const int all_steps = (tokens + kStep - 1) / kStep, share = (all_steps + splits - 1) / splits;
  const int last_step = min(all_steps, (rank + 1) * share);
  const bool is_last = last_step == all_steps && rank * share < all_steps;  // has the new token

  uint32_t key[2][kKeyParts * 4], value[4][kValueParts * 4];
  const auto fetch_keys = [&](int begin, int limit) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const int token = begin + 8 * t + g;
#pragma unroll
      for (int c = 0; c < kKeyParts; ++c) {
        fetch(&key[t][4 * c], keys + token * kHeadSize + (4 * c + q) * 8, token < limit);
      }
    }
  };
  const auto fetch_values = [&](int begin, int limit) {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const int token = begin + 2 * q + t % 2 + t / 2 * 8;
#pragma unroll
      for (int c = 0; c < kValueParts; ++c) {
        fetch(&value[t][4 * c], values + token * kHeadSize + 64 * c + 8 * g, token < limit);
      }
    }
  };
  int step = rank * share + warp;
  if (step < last_step) {  // on their way while the heads are made
    fetch_keys(step * kStep, position);
    fetch_values(step * kStep, position);
  }

  const bf16* qkv = static_cast<const bf16*>(a.qkv_bxe) + sequence * (n + 2 * m) * kHeadSize;
  const float *cos = a.cos_bf + sequence * a.f, *sin = a.sin_bf + sequence * a.f;
  const float eps = static_cast<float>(a.eps);
  const int made = count + (is_last ? 2 : 0);
  for (int h = warp; h < made; h += kWarps) {
    if (h < count) {
      make_head<bf16>(heads[h], qkv + (kv * group + first + h) * kHeadSize, static_cast<const bf16*>(a.query_weight_e), cos, sin, kHeadSize, static_cast<int>(a.f), eps, lane);
      for (int i = lane; i < kHeadSize; i += 32) {
        queries[h][i] = from_float<bf16>(heads[h][i]);
      }
    } else if (h == count) {
      make_head<bf16>(heads[kHeads], qkv + (n + kv) * kHeadSize, static_cast<const bf16*>(a.key_weight_e), cos, sin, kHeadSize, static_cast<int>(a.f), eps, lane);
      for (int i = lane; i < kHeadSize; i += 32) {
        keys[static_cast<int64_t>(position) * kHeadSize + i] = from_float<bf16>(heads[kHeads][i]);
      }
    } else {
      for (int i = lane; i < kHeadSize; i += 32) {
        values[static_cast<int64_t>(position) * kHeadSize + i] = qkv[(n + m + kv) * kHeadSize + i];
      }
    }
  }
  for (int i = threadIdx.x; i < (kRows - count) * kHeadSize; i += kThreads) {
    queries[count + i / kHeadSize][i % kHeadSize] = from_float<bf16>(0.0f);
  }
  __syncthreads();

  float out[kTiles][4], maximum = -INFINITY, sum = 0;  // of head g, in units of log 2; the sum is this lane's part
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[t][i] = 0;
    }
  }
  if (step < last_step && (step + 1) * kStep > position) {  // the new token is there now
    fetch_keys(step * kStep, tokens);
    fetch_values(step * kStep, tokens);
  }
  const float scale = a.scale * kLog2e;
  for (; step < last_step; step += kWarps) {
    const int begin = step * kStep, next = begin + kWarps * kStep;
    float score[2][4] = {};
#pragma unroll
    for (int c = 0; c < kKeyParts; ++c) {
      const uint4 query = *reinterpret_cast<const uint4*>(&queries[g][(4 * c + q) * 8]);
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        tile_product(score[t], query.x, 0, query.y, 0, key[t][4 * c], key[t][4 * c + 1]);
        tile_product(score[t], query.z, 0, query.w, 0, key[t][4 * c + 2], key[t][4 * c + 3]);
      }
    }
    const bool has_next = step + kWarps < last_step;
    if (has_next) {
      fetch_keys(next, tokens);
    }
    float top = maximum;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        score[t][i] = begin + 8 * t + 2 * q + i < tokens ? score[t][i] * scale : -INFINITY;
        top = fmaxf(top, score[t][i]);
      }
    }
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
    if (__any_sync(0xffffffffu, top > maximum)) {
      const float keep = exp2f(maximum - top);  // 0 at first
      sum *= keep;
      const float even = __shfl_sync(0xffffffffu, keep, 8 * q), odd = __shfl_sync(0xffffffffu, keep, 8 * q + 4);  // of heads 2 q and 2 q + 1
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        out[t][0] *= even;
        out[t][1] *= odd;
        out[t][2] *= even;
        out[t][3] *= odd;
      }
      maximum = top;
    }
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        score[t][i] = exp2f(score[t][i] - maximum);
        sum += score[t][i];
      }
    }
    const uint32_t low = packed(score[0][0], score[0][1]), high = packed(score[1][0], score[1][1]);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      uint32_t part[4];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = r * kTiles + t;  // of the elements that this lane has
        const uint32_t pick = i % 2 == 0 ? 0x5410 : 0x7632;
        part[r] = __byte_perm(value[0][i / 2], value[1][i / 2], pick);
        part[r + 2] = __byte_perm(value[2][i / 2], value[3][i / 2], pick);
      }
      tile_product(out[t], part[0], part[1], part[2], part[3], low, high);
    }
    if (has_next) {
      fetch_values(next, tokens);
    }
  }

  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  sum += __shfl_xor_sync(0xffffffffu, sum, 2);
  if (q == 0 && g < kHeads) {
    maxima[warp][g] = maximum;
    sums[warp][g] = sum;
  }
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int h = 2 * q + i % 2;
      if (h < kHeads) {
        merged[warp][h][(2 * t + i / 2) * 8 + g] = out[t][i];
      }
    }
  }
  __syncthreads();
  const auto element = [](int place) {  // of a head, from its place in `merged`
    const int t = place / 16, r = place / 8 % 2, lanes = place % 8;
    return kHeadSize == 128 ? 64 * r + 8 * lanes + t : 8 * lanes + 4 * r + t;
  };
  const auto weight = [](float maximum_of_part, float top) { return maximum_of_part == -INFINITY ? 0.0f : exp2f(maximum_of_part - top); };
  bf16* to = static_cast<bf16*>(a.out_bne) + (sequence * n + kv * group + first) * kHeadSize;
  for (int at = threadIdx.x; at < count * kHeadSize; at += kThreads) {
    const int h = at / kHeadSize, i = at % kHeadSize;
    float top = -INFINITY;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      top = fmaxf(top, maxima[w][h]);
    }
    float total = 0, found = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float part = weight(maxima[w][h], top);
      total += sums[w][h] * part;
      found += merged[w][h][i] * part;
    }
    if (splits == 1) {
      to[h * kHeadSize + element(i)] = from_float<bf16>(found / total);
    } else {
      block_out[h][i] = found;
      if (i == 0) {
        block_maximum[h] = top;
        block_sum_of[h] = total;
      }
    }
  }
  if (splits == 1) {
    return;
  }
  cluster_barrier();
  for (int at = rank * kThreads + threadIdx.x; at < count * kHeadSize; at += splits * kThreads) {
    const int h = at / kHeadSize, i = at % kHeadSize;
    float top = -INFINITY;
    for (int s = 0; s < splits; ++s) {
      top = fmaxf(top, of_block(&block_maximum[h], s));
    }
    float total = 0, found = 0;
    for (int s = 0; s < splits; ++s) {
      const float part = weight(of_block(&block_maximum[h], s), top);
      total += of_block(&block_sum_of[h], s) * part;
      found += of_block(&block_out[h][i], s) * part;
    }
    to[h * kHeadSize + element(i)] = from_float<bf16>(found / total);
  }
  cluster_barrier();  // nobody's memory goes before all have read it
}

// Blocks that share a sequence: as many as find room beside each other, if the cache has work for them. One where there are no clusters.
int splits_for(const DecodeAttention& a, unsigned blocks) {
  const int processors = clusters_are_there() ? processor_count() : 0;
  int splits = 1;
  while (splits < 8 && 2 * splits * static_cast<int64_t>(blocks) <= 2 * static_cast<int64_t>(processors) && 2 * splits * kStep * kWarps / 2 <= a.capacity) {
    splits *= 2;
  }
  return splits;
}

template <int kHeadSize, int kHeads>
Error launch(const DecodeAttention& a, cudaStream_t stream) {
  const auto groups = static_cast<unsigned>((a.n / a.m + kHeads - 1) / kHeads);
  const int splits = splits_for(a, static_cast<unsigned>(a.b * a.m) * groups);
  const dim3 grid(static_cast<unsigned>(a.b) * splits, static_cast<unsigned>(a.m), groups);
  return launch_early(attention_kernel<kHeadSize, kHeads>, grid, dim3(kThreads), static_cast<unsigned>(splits), stream, a, splits);
}

template <int kHeadSize>
Error attention_of(const DecodeAttention& a, cudaStream_t stream) {
  const int64_t group = a.n / a.m;
  return group == 1 ? launch<kHeadSize, 1>(a, stream) : group == 2 ? launch<kHeadSize, 2>(a, stream) : group <= 4 ? launch<kHeadSize, 4>(a, stream) : launch<kHeadSize, 8>(a, stream);
}

}  // namespace mma

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

Error attention(const DecodeAttention& a, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  if (a.type == Type::bfloat16) {
    return a.e == 64 ? mma::attention_of<64>(a, on) : mma::attention_of<128>(a, on);
  }
  return a.e == 64 ? attention_of<float, 64>(a, on) : attention_of<float, 128>(a, on);
}

template <class T>
__global__ void __launch_bounds__(kThreads) gate_kernel(DecodeGate a) {
  constexpr int kAtOnce = 16 / sizeof(T);
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kAtOnce;
  if (at >= a.b * a.i) {
    return;
  }
  const int64_t row = at / a.i, column = at % a.i;  // i is a multiple of kAtOnce
  let_next_come();
  wait_for_before();
  const T* from = static_cast<const T*>(a.gate_up_b2i) + row * 2 * a.i + column;
  float gate[kAtOnce], up[kAtOnce];
  load(gate, from);
  load(up, from + a.i);
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k) {
    up[k] *= rounded<T>(gate[k] / (1.0f + __expf(-gate[k])));
  }
  store(static_cast<T*>(a.out_bi) + at, up);
}

Error gate(const DecodeGate& a, void* stream) {
  const int64_t per_block = kThreads * (a.type == Type::bfloat16 ? 8 : 4);
  const auto blocks = static_cast<unsigned>((a.b * a.i + per_block - 1) / per_block);
  const auto on = static_cast<cudaStream_t>(stream);
  return launch_early(a.type == Type::bfloat16 ? gate_kernel<bf16> : gate_kernel<float>, dim3(blocks), dim3(kThreads), 1, on, a);
}

template <class T>
__global__ void __launch_bounds__(kThreads) start_kernel(DecodeStart a) {
  let_next_come();
  wait_for_before();
  const int64_t row = blockIdx.x, id = a.ids_b[row];
  const auto position = static_cast<float>(a.positions_b[row]);
  for (int64_t i = threadIdx.x; i < a.f; i += kThreads) {
    const float angle = position * a.inverse_frequencies_f[i];
    a.cos_bf[row * a.f + i] = rounded<T>(cosf(angle) * a.scaling);
    a.sin_bf[row * a.f + i] = rounded<T>(sinf(angle) * a.scaling);
  }
  const T* from = static_cast<const T*>(a.embedding_vh) + id * a.h;
  T* to = static_cast<T*>(a.x_bh) + row * a.h;
  for (int64_t i = threadIdx.x; i < a.h; i += kThreads) {
    to[i] = from[i];
  }
}

Error start(const DecodeStart& a, void* stream) {
  return launch_early(a.type == Type::bfloat16 ? start_kernel<bf16> : start_kernel<float>, dim3(static_cast<unsigned>(a.b)), dim3(kThreads), 1, static_cast<cudaStream_t>(stream), a);
}

// A cluster of blocks shares a row.
struct Best {
  float value;
  uint32_t place;
  __device__ void meet(float other, uint32_t there) {
    if (other > value || (other == value && there < place)) {
      value = other;
      place = there;
    }
  }
};

template <class T, int N>
__global__ void __launch_bounds__(kThreads) choice_kernel(DecodeChoice a, int splits) {
  __shared__ float values[kWarps], places[kWarps], block_value, block_place;  // places as bits
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int rank = static_cast<int>(blockIdx.x) % splits;
  const int64_t row = blockIdx.x / splits;
  let_next_come();
  wait_for_before();
  const T* logits = static_cast<const T*>(a.logits_bv) + row * a.v;
  Best best{-INFINITY, 0xffffffffu};
#pragma unroll 4
  for (int64_t c = (static_cast<int64_t>(rank) * kThreads + threadIdx.x) * N; c < a.v; c += static_cast<int64_t>(splits) * kThreads * N) {
    float some[N];
    load(some, logits + c);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      best.meet(some[i], static_cast<uint32_t>(c + i));
    }
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, best.value, step);
    best.meet(other, __shfl_xor_sync(0xffffffffu, best.place, step));
  }
  if (lane == 0) {
    values[warp] = best.value;
    places[warp] = __uint_as_float(best.place);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kWarps; ++w) {
      best.meet(values[w], __float_as_uint(places[w]));
    }
    block_value = best.value;
    block_place = __uint_as_float(best.place);
  }
  if (splits > 1) {
    cluster_barrier();
    if (rank == 0 && threadIdx.x == 0) {
      for (int s = 1; s < splits; ++s) {
        best.meet(of_block(&block_value, s), __float_as_uint(of_block(&block_place, s)));
      }
    }
    cluster_barrier();
  }
  if (rank == 0 && threadIdx.x == 0) {
    const int64_t place = best.place == 0xffffffffu ? 0 : best.place;  // no number at all
    a.said_b[row] = place;
    a.ids_b[row] = place;
    ++a.positions_b[row];
  }
}

template <class T>
Error choose_of(const DecodeChoice& a, cudaStream_t stream) {
  constexpr int kAtOnce = 16 / sizeof(T);
  const int splits = clusters_are_there() ? 8 : 1;
  const bool aligned = a.v % kAtOnce == 0 && is_aligned(a.logits_bv);
  return launch_early(aligned ? choice_kernel<T, kAtOnce> : choice_kernel<T, 1>, dim3(static_cast<unsigned>(a.b * splits)), dim3(kThreads), static_cast<unsigned>(splits), stream, a, splits);
}

Error choose(const DecodeChoice& a, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  return a.type == Type::bfloat16 ? choose_of<bf16>(a, on) : choose_of<float>(a, on);
}

const DecodeLaunchers launchers = {.start = start, .choose = choose, .attention = attention, .gate = gate};

}  // namespace

const DecodeLaunchers* decode_launchers() { return &launchers; }

}  // namespace sf::cuda
