// Block attention, forward. A block of 4 warps takes 128 flat rows of one key/value head in two halves of 64, 16 rows a warp, and walks over key tiles of 64: those of the context
// that some of its rows see, then those of the rows' own blocks. Two stages of keys and values are in flight. Nothing is masked in a context tile that all
// rows see; elsewhere each row has a half-open range of keys. Softmax runs in float32 with a running maximum; rows that see nothing come out as zero.
#include "core/kernels/cuda/attention_tile.cuh"

namespace sf::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kRows = 128;

// {context low, context high, own low, own high} of each draft row; an empty range is {0, 0}.
__global__ void bounds_kernel(BlockAttention a) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, q = a.q;
  if (at >= a.b * q) {
    return;
  }
  const int64_t row = at % q, block = row / a.j, slot = row % a.j, place = at / q * a.w + block;
  int4 bounds = make_int4(0, 0, 0, 0);
  if (a.keep_bw == nullptr || a.keep_bw[place]) {
    const int64_t anchor = a.anchors_bw == nullptr ? block + 1 : a.anchors_bw[place], reach = a.window_tokens > 0 ? a.window_tokens - 1 : INT64_MAX / 2;
    const int64_t high = anchor < a.s ? anchor : a.s, low = anchor + slot - reach > 0 ? anchor + slot - reach : 0;
    if (low < high) {
      bounds.x = static_cast<int>(low);
      bounds.y = static_cast<int>(high);
    }
    if (a.own_per_block > 0) {
      bounds.z = static_cast<int>(block * a.own_per_block + (slot > reach ? slot - reach : 0));
      bounds.w = static_cast<int>(block * a.own_per_block + (a.causal ? slot + 1 : a.own_per_block));
    }
  }
  reinterpret_cast<int4*>(a.bounds_bq4)[at] = bounds;
}

template <int E>
struct Shared {
  bf16 query[kRows * E];
  bf16 key[2][kKeys * E], value[2][kKeys * E];
  int4 bounds[kRows];
  int least[kThreads / 32][6];
};

__device__ inline int warp_min(int x) { return __reduce_min_sync(0xffffffffu, x); }
__device__ inline int warp_max(int x) { return __reduce_max_sync(0xffffffffu, x); }

// Bounds of the rows into shared memory, and what they have in common.
template <int E>
__device__ KeyTiles find_tiles(Shared<E>& shared, const Places& at, int64_t begin, Range4& context) {
  const int64_t t = begin + threadIdx.x;
  const bool inside = t < at.flat_rows;
  const int4 bounds = inside ? reinterpret_cast<const int4*>(at.a.bounds_bq4)[at.sample * at.a.q + at.draft_row(t)] : make_int4(0, 0, 0, 0);
  shared.bounds[threadIdx.x] = bounds;
  const int far = INT_MAX;
  const int values[6] = {warp_min(bounds.y > 0 ? bounds.x : far), -warp_max(bounds.y),
                         -warp_max(inside ? bounds.x : 0),       warp_min(inside ? bounds.y : far),
                         warp_min(bounds.w > 0 ? bounds.z : far), -warp_max(bounds.w)};
  if (threadIdx.x % 32 == 0) {
    for (int i = 0; i < 6; ++i) {
      shared.least[threadIdx.x / 32][i] = values[i];
    }
  }
  __syncthreads();
  int least[6];
  for (int i = 0; i < 6; ++i) {
    least[i] = min(min(shared.least[0][i], shared.least[1][i]), min(shared.least[2][i], shared.least[3][i]));
  }
  context = {least[0], -least[1], -least[2], least[3]};
  KeyTiles tiles{};
  if (context.largest_high > 0) {
    tiles.context_begin = context.least_low / kKeys * kKeys;
    tiles.context_tiles = (context.largest_high - tiles.context_begin + kKeys - 1) / kKeys;
  }
  if (-least[5] > 0) {
    tiles.own_begin = least[4];
    tiles.own_tiles = (-least[5] - least[4] + kKeys - 1) / kKeys;
  }
  return tiles;
}

template <int E>
__global__ void __launch_bounds__(kThreads, 2) forward_kernel(const __grid_constant__ BlockAttention a) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared<E>& shared = tiles_in<Shared<E>>(memory);
  const Places at(a, blockIdx.y);
  const int64_t begin = static_cast<int64_t>(gridDim.x - 1 - blockIdx.x) * kRows;  // late anchors see most, so they start first
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row0 = warp * 16;
  const uint32_t query_tile = shared_address(shared.query);

  fetch_rows<E, kRows, kThreads, false>(at, a.query_bqne, a.query_bqne, begin, query_tile, query_tile);
  Range4 context;
  const KeyTiles tiles = find_tiles(shared, at, begin, context);
  if (tiles.count() > 0) {
    fetch_keys<E, kThreads>(at, tiles.is_own(0), tiles.begin(0), shared_address(shared.key[0]), shared_address(shared.value[0]));
  }
  copies_commit();

  const float scale = a.scale * kLog2E;
  float out[2][E / 8][4] = {};
  float most[2][2] = {{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}}, sum[2][2] = {};
  for (int i = 0; i < tiles.count(); ++i) {
    const int stage = i & 1, key0 = tiles.begin(i);
    const bool own = tiles.is_own(i);
    if (i + 1 < tiles.count()) {
      fetch_keys<E, kThreads>(at, tiles.is_own(i + 1), tiles.begin(i + 1), shared_address(shared.key[stage ^ 1]),
                              shared_address(shared.value[stage ^ 1]));
    }
    copies_commit();
    copies_wait<1>();
    fence_tiles();
    __syncthreads();

    const uint32_t key_tile = shared_address(shared.key[stage]), value_tile = shared_address(shared.value[stage]);
    const bool masked = own || key0 < context.largest_low || key0 + kKeys > context.least_high;
    float score[2][kKeys / 8][4];
    uint32_t probability[2][kKeys / 16][4];
    // Scores of a half to probabilities, with the running maximum; what was summed before shrinks by it.
    const auto soften = [&](int half) {
      if (masked) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int4 bounds = shared.bounds[half * 64 + row0 + lane / 4 + 8 * (c / 2)];
          const int low = own ? bounds.z : bounds.x, high = own ? bounds.w : bounds.y;
#pragma unroll
          for (int n = 0; n < kKeys / 8; ++n) {
            const int key = key0 + n * 8 + 2 * (lane % 4) + c % 2;
            score[half][n][c] = key >= low && key < high ? score[half][n][c] : -INFINITY;
          }
        }
      }
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        float largest = most[half][upper];
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
          largest = fmaxf(largest, fmaxf(score[half][n][2 * upper], score[half][n][2 * upper + 1]));
        }
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
        const float base = largest == -INFINITY ? 0.0f : largest * scale;
        const float shrink = exp2_fast(most[half][upper] * scale - base);
        most[half][upper] = largest;
        float total = 0;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
          for (int c = 2 * upper; c < 2 * upper + 2; ++c) {
            score[half][n][c] = exp2_fast(score[half][n][c] * scale - base);
            total += score[half][n][c];
          }
        }
        sum[half][upper] = sum[half][upper] * shrink + total;
#pragma unroll
        for (int n = 0; n < E / 8; ++n) {
          out[half][n][2 * upper] *= shrink;
          out[half][n][2 * upper + 1] *= shrink;
        }
      }
#pragma unroll
      for (int k = 0; k < kKeys / 16; ++k) {
        as_operand(probability[half][k], score[half][2 * k], score[half][2 * k + 1]);
      }
    };
#if SF_WGMMA
    // While one half softens, the other multiplies.
    const auto multiply_keys = [&](int half) {
#pragma unroll
      for (int k = 0; k < E; k += 16) {
        multiply_shared(score[half], Tile<E, kRows>::by_columns(query_tile, half * 64, k), Tile<E, kKeys>::by_columns(key_tile, 0, k), k > 0);
      }
      products_commit();
    };
    const auto multiply_values = [&](int half) {
      settle(out[half]);
      settle(probability[half]);
      products_begin();
#pragma unroll
      for (int k = 0; k < kKeys / 16; ++k) {
        multiply_registers(out[half], probability[half][k], Tile<E, kKeys>::by_rows(value_tile, k * 16));
      }
      products_commit();
    };
    settle(score[0]);
    settle(score[1]);
    products_begin();
    multiply_keys(0);
    multiply_keys(1);
    products_wait<1>();
    settle(score[0]);
    soften(0);
    multiply_values(0);
    products_wait<1>();
    settle(score[1]);
    soften(1);
    multiply_values(1);
    products_wait<0>();
    settle(out[0]);
    settle(out[1]);
#else
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        score[half][n][0] = score[half][n][1] = score[half][n][2] = score[half][n][3] = 0;
      }
    }
#pragma unroll
    for (int k = 0; k < E; k += 16) {
      uint32_t query[2][4];
      Tile<E, kRows>::load_a(query[0], query_tile, row0, k, lane);
      Tile<E, kRows>::load_a(query[1], query_tile, 64 + row0, k, lane);
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        uint32_t key[4];
        Tile<E, kKeys>::load_b_rows(key, key_tile, n * 16, k, lane);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          multiply_add(score[half][2 * n], query[half], key[0], key[1]);
          multiply_add(score[half][2 * n + 1], query[half], key[2], key[3]);
        }
      }
    }
    soften(0);
    soften(1);
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
#pragma unroll
      for (int n = 0; n < E / 16; ++n) {
        uint32_t value[4];
        Tile<E, kKeys>::load_b_columns(value, value_tile, k * 16, n * 16, lane);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          multiply_add(out[half][2 * n], probability[half][k], value[0], value[1]);
          multiply_add(out[half][2 * n + 1], probability[half][k], value[2], value[3]);
        }
      }
    }
#endif
    __syncthreads();
  }
  copies_wait<0>();
  __syncthreads();  // the query tile is free for all now, and rows of it that no product waited for have arrived

  // Through the query tile, so that whole rows are written.
  uint32_t found = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      float total = sum[half][upper];
      total += __shfl_xor_sync(0xffffffffu, total, 1);
      total += __shfl_xor_sync(0xffffffffu, total, 2);
      const float inverse = total > 0 ? 1.0f / total : (total == 0 ? 0.0f : total);  // NaN stays
      const int row = half * 64 + row0 + lane / 4 + 8 * upper;
      if (lane % 4 == 0 && begin + row < at.flat_rows) {
        a.log_sum_exp_bmr[static_cast<int64_t>(blockIdx.y) * at.flat_rows + begin + row] = total == 0 ? 0.0f : most[half][upper] * scale + log2f(total);
      }
#pragma unroll
      for (int n = 0; n < E / 8; ++n) {
        bf16* to = shared.query + Tile<E, kRows>::element(row, n * 8 + 2 * (lane % 4));
        const float pair[2] = {out[half][n][2 * upper] * inverse, out[half][n][2 * upper + 1] * inverse};
        *reinterpret_cast<uint32_t*>(to) = pack(pair[0], pair[1]);
        if (begin + row < at.flat_rows) {
          note(found, pair);
        }
      }
    }
  }
  warp_amax_of<bf16>(found, a.amax);
  __syncwarp();
  constexpr int kPieces = E / 8;
  for (int i = lane; i < 32 * kPieces; i += 32) {
    const int local = i / kPieces, row = local / 16 * 64 + row0 + local % 16, piece = i % kPieces;
    if (begin + row < at.flat_rows) {
      *reinterpret_cast<uint4*>(static_cast<bf16*>(a.out_bqne) + at.query(begin + row) + piece * 8) =
          *reinterpret_cast<const uint4*>(shared.query + Tile<E, kRows>::element(row, piece * 8));
    }
  }
}

template <int E>
Error run(const BlockAttention& a, cudaStream_t stream) {
  if (Error error = allow_shared(forward_kernel<E>, bytes_for<Shared<E>>())) {
    return error;
  }
  const int64_t flat_rows = a.q * (a.n / a.m);
  const dim3 grid(static_cast<unsigned>((flat_rows + kRows - 1) / kRows), static_cast<unsigned>(a.b * a.m));
  forward_kernel<E><<<grid, kThreads, bytes_for<Shared<E>>(), stream>>>(a);
  return last_error();
}

}  // namespace

Error block_attention_forward(const BlockAttention& a, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  const int64_t rows = a.b * a.q;
  bounds_kernel<<<static_cast<unsigned>((rows + 255) / 256), 256, 0, on>>>(a);
  if (Error error = last_error()) {
    return error;
  }
  return a.e == 64 ? run<64>(a, on) : run<128>(a, on);
}

}  // namespace sf::cuda
