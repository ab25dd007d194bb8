// Attention of a new token over its sequence's cache, in bfloat16 on tensor cores: bound by memory, where decode_attention.cu is bound by what it can keep in registers.
//
// A warp takes 16 tokens at a time. Scores are a product of queries (A, heads are its rows, eight of sixteen used) and keys (B); outputs, turned over, one of values (A, elements
// of a head are its rows) and weights (B): what the first leaves in a lane is what the second takes from it. Neither product asks in which order columns are summed or rows stand,
// so lanes load 16 neighbouring bytes of a key or value and give each product the parts as they lie: keys and values go from memory to registers and nowhere else.
//
// The blocks of a cluster share a sequence's tokens evenly, whatever its length, and merge what they found through each other's shared memory.
#include "core/kernels/cuda/decode.cuh"

namespace sf::cuda {
namespace {

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

}  // namespace

Error decode_attention_on_tensor_cores(const DecodeAttention& a, cudaStream_t stream) { return a.e == 64 ? attention_of<64>(a, stream) : attention_of<128>(a, stream); }

}  // namespace sf::cuda
