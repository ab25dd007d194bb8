// Block attention, backward, without atomics: scores are computed twice, once by rows for the gradient of queries, once by keys for those of keys and values.
//
// By rows: a block of 4 warps takes 64 flat rows, 16 a warp, and walks over key tiles as forward does. By keys: a block takes 64 keys, 16 a warp, and walks
// over the row tiles that see them; scores are made transposed (keys x rows), so that they are the left operand of the next products as they stand in registers. Context
// keys are seen by nearly all rows, so their row tiles are split over blocks, and the parts, in float32, are added in order at the end.
//
// With p = exp(score - log_sum_exp) and d = sum over e of out * grad_out: grad score = p * (grad_out . value - d).
#include "core/kernels/cuda/attention_tile.cuh"

namespace sf::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kSplits = static_cast<int>(attention_splits());

constexpr int kAlongAtOnce = 4;  // pieces of a lane in flight together

// E / 8 lanes take a head of a row.
template <int E>
__global__ void __launch_bounds__(256) along_kernel(BlockAttention a) {
  constexpr int kLanes = E / 8, kHeads = 256 / kLanes;
  const unsigned n = static_cast<unsigned>(a.n), g = static_cast<unsigned>(a.n / a.m), q = static_cast<unsigned>(a.q);
  const unsigned first = blockIdx.x * (kHeads * kAlongAtOnce) + threadIdx.x / kLanes, lane = threadIdx.x % kLanes;  // of [q, n]
  Vector<bf16, 8> out[kAlongAtOnce], grad[kAlongAtOnce];
#pragma unroll
  for (int i = 0; i < kAlongAtOnce; ++i) {
    const unsigned place = first + i * kHeads;
    if (place < q * n) {
      const int64_t from = (static_cast<int64_t>(blockIdx.y) * q * n + place) * E + lane * 8;
      out[i] = *reinterpret_cast<const Vector<bf16, 8>*>(static_cast<const bf16*>(a.out_bqne) + from);
      grad[i] = *reinterpret_cast<const Vector<bf16, 8>*>(static_cast<const bf16*>(a.grad_out_bqne) + from);
    } else {
      out[i] = grad[i] = Vector<bf16, 8>{};
    }
  }
#pragma unroll
  for (int i = 0; i < kAlongAtOnce; ++i) {
    float sum = 0;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      sum += to_float(out[i].at[c]) * to_float(grad[i].at[c]);
    }
    sum = warp_sum<kLanes>(sum);
    const unsigned place = first + i * kHeads;
    if (lane == 0 && place < q * n) {
      const unsigned head = place % n, row = place / n;
      a.along_bmr[((static_cast<int64_t>(blockIdx.y) * a.m + head / g) * q + row) * g + head % g] = sum;
    }
  }
}

// Ranges of context keys that the rows of a tile of 64 flat rows see.
__global__ void tiles_kernel(BlockAttention a, int64_t tiles) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= a.b * tiles) {
    return;
  }
  const int64_t g = a.n / a.m, q = a.q, tile = at % tiles, sample = at / tiles;
  const int64_t first = tile * kFlat / g, last = (tile * kFlat + kFlat - 1) / g < q ? (tile * kFlat + kFlat - 1) / g : q - 1;
  Range4 range{INT_MAX, 0, 0, INT_MAX};
  for (int64_t row = first; row <= last; ++row) {
    const int4 bounds = reinterpret_cast<const int4*>(a.bounds_bq4)[sample * q + row];
    if (bounds.y > 0) {
      range.least_low = min(range.least_low, bounds.x);
    }
    range.largest_high = max(range.largest_high, bounds.y);
    range.largest_low = max(range.largest_low, bounds.x);
    range.least_high = min(range.least_high, bounds.y);
  }
  reinterpret_cast<Range4*>(a.tiles_bt4)[at] = range;
}

template <int E>
struct RowShared {
  bf16 query[kFlat * E], grad[kFlat * E];
  bf16 key[2][kKeys * E], value[2][kKeys * E];
};

template <int E>
__global__ void __launch_bounds__(kThreads, 2) query_kernel(const __grid_constant__ BlockAttention a) {
  extern __shared__ __align__(1024) unsigned char memory[];
  RowShared<E>& shared = tiles_in<RowShared<E>>(memory);
  const Places at(a, blockIdx.y);
  const int64_t tile = gridDim.x - 1 - blockIdx.x, begin = tile * kFlat;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row0 = warp * 16;
  const uint32_t query_tile = shared_address(shared.query), grad_tile = shared_address(shared.grad);

  fetch_rows<E, kFlat, kThreads, true>(at, a.query_bqne, a.grad_out_bqne, begin, query_tile, grad_tile);
  const Range4 context = reinterpret_cast<const Range4*>(a.tiles_bt4)[at.sample * gridDim.x + tile];
  KeyTiles tiles{};
  if (context.largest_high > 0) {
    tiles.context_begin = context.least_low / kKeys * kKeys;
    tiles.context_tiles = (context.largest_high - tiles.context_begin + kKeys - 1) / kKeys;
  }
  const int64_t last_row = begin + kFlat < at.flat_rows ? begin + kFlat - 1 : at.flat_rows - 1;
  tiles.own_begin = static_cast<int>(at.draft_row(begin) / a.j * a.own_per_block);
  tiles.own_tiles = static_cast<int>(((at.draft_row(last_row) / a.j + 1) * a.own_per_block - tiles.own_begin + kKeys - 1) / kKeys);
  fetch_keys<E, kThreads>(at, tiles.is_own(0), tiles.begin(0), shared_address(shared.key[0]), shared_address(shared.value[0]));
  copies_commit();

  float log_sum_exp[2], along[2];
  int4 bounds[2];
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {
    const int64_t t = begin + row0 + lane / 4 + 8 * upper;
    const bool inside = t < at.flat_rows;
    const int64_t place = static_cast<int64_t>(blockIdx.y) * at.flat_rows + t;
    log_sum_exp[upper] = inside ? a.log_sum_exp_bmr[place] : 0.0f;
    along[upper] = inside ? a.along_bmr[place] : 0.0f;
    bounds[upper] = inside ? reinterpret_cast<const int4*>(a.bounds_bq4)[at.sample * a.q + at.draft_row(t)] : make_int4(0, 0, 0, 0);
  }

  const float scale = a.scale * kLog2E;
  float result[E / 8][4] = {};
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
    float score[kKeys / 8][4], slope[kKeys / 8][4];
#if SF_WGMMA
    settle(score);
    settle(slope);
    products_begin();
#pragma unroll
    for (int k = 0; k < E; k += 16) {
      multiply_shared(score, Tile<E, kFlat>::by_columns(query_tile, 0, k), Tile<E, kKeys>::by_columns(key_tile, 0, k), k > 0);
    }
    products_commit();
#pragma unroll
    for (int k = 0; k < E; k += 16) {
      multiply_shared(slope, Tile<E, kFlat>::by_columns(grad_tile, 0, k), Tile<E, kKeys>::by_columns(value_tile, 0, k), k > 0);
    }
    products_commit();
    products_wait<1>();  // exponentials are formed while the second product runs
    settle(score);
#else
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      score[n][0] = score[n][1] = score[n][2] = score[n][3] = slope[n][0] = slope[n][1] = slope[n][2] = slope[n][3] = 0;
    }
#pragma unroll
    for (int k = 0; k < E; k += 16) {
      uint32_t query[4], grad[4];
      Tile<E, kFlat>::load_a(query, query_tile, row0, k, lane);
      Tile<E, kFlat>::load_a(grad, grad_tile, row0, k, lane);
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        uint32_t other[4];
        Tile<E, kKeys>::load_b_rows(other, key_tile, n * 16, k, lane);
        multiply_add(score[2 * n], query, other[0], other[1]);
        multiply_add(score[2 * n + 1], query, other[2], other[3]);
        Tile<E, kKeys>::load_b_rows(other, value_tile, n * 16, k, lane);
        multiply_add(slope[2 * n], grad, other[0], other[1]);
        multiply_add(slope[2 * n + 1], grad, other[2], other[3]);
      }
    }
#endif
    const bool masked = own || key0 < context.largest_low || key0 + kKeys > context.least_high;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int upper = c / 2;
        score[n][c] = exp2_fast(score[n][c] * scale - log_sum_exp[upper]);
        if (masked) {
          const int key = key0 + n * 8 + 2 * (lane % 4) + c % 2;
          const int low = own ? bounds[upper].z : bounds[upper].x, high = own ? bounds[upper].w : bounds[upper].y;
          score[n][c] = key >= low && key < high ? score[n][c] : 0.0f;
        }
      }
    }
#if SF_WGMMA
    products_wait<0>();
    settle(slope);
#endif
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        score[n][c] *= slope[n][c] - along[c / 2];
      }
    }
    uint32_t left[kKeys / 16][4];
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      as_operand(left[k], score[2 * k], score[2 * k + 1]);
    }
#if SF_WGMMA
    settle(left);
    settle(result);
    products_begin();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      multiply_registers(result, left[k], Tile<E, kKeys>::by_rows(key_tile, k * 16));
    }
    products_commit();
    products_wait<0>();
    settle(result);
#else
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
#pragma unroll
      for (int n = 0; n < E / 16; ++n) {
        uint32_t key[4];
        Tile<E, kKeys>::load_b_columns(key, key_tile, k * 16, n * 16, lane);
        multiply_add(result[2 * n], left[k], key[0], key[1]);
        multiply_add(result[2 * n + 1], left[k], key[2], key[3]);
      }
    }
#endif
    __syncthreads();
  }

#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {
    const int row = row0 + lane / 4 + 8 * upper;
#pragma unroll
    for (int n = 0; n < E / 8; ++n) {
      bf16* to = shared.query + Tile<E, kFlat>::element(row, n * 8 + 2 * (lane % 4));
      *reinterpret_cast<uint32_t*>(to) = pack(result[n][2 * upper] * a.scale, result[n][2 * upper + 1] * a.scale);
    }
  }
  __syncwarp();
  constexpr int kPieces = E / 8;
  for (int i = lane; i < 16 * kPieces; i += 32) {
    const int row = row0 + i / kPieces, piece = i % kPieces;
    if (begin + row < at.flat_rows) {
      *reinterpret_cast<uint4*>(static_cast<bf16*>(a.grad_query_bqne) + at.query(begin + row) + piece * 8) =
          *reinterpret_cast<const uint4*>(shared.query + Tile<E, kFlat>::element(row, piece * 8));
    }
  }
}

template <int E>
struct KeyShared {
  bf16 key[kKeys * E], value[kKeys * E];
  bf16 query[2][kFlat * E], grad[2][kFlat * E];
  float log_sum_exp[2][kFlat], along[2][kFlat];
  int2 bounds[2][kFlat];
};

template <int E, bool kOwn>
__device__ void fetch_row_tile(KeyShared<E>& shared, const Places& at, int64_t bm, int64_t tile, int stage) {
  const int64_t begin = tile * kFlat;
  fetch_rows<E, kFlat, kThreads, true>(at, at.a.query_bqne, at.a.grad_out_bqne, begin, shared_address(shared.query[stage]), shared_address(shared.grad[stage]));
  const int i = threadIdx.x % kFlat;
  const int64_t t = begin + i;
  const bool inside = t < at.flat_rows;
  const int64_t place = inside ? bm * at.flat_rows + t : 0;
  if (threadIdx.x < kFlat) {
    copy_async<4>(shared_address(&shared.log_sum_exp[stage][i]), at.a.log_sum_exp_bmr + place, inside);
    copy_async<4>(shared_address(&shared.along[stage][i]), at.a.along_bmr + place, inside);
  } else {
    const int64_t row = inside ? at.sample * at.a.q + at.draft_row(t) : 0;
    copy_async<8>(shared_address(&shared.bounds[stage][i]), at.a.bounds_bq4 + row * 4 + (kOwn ? 2 : 0), inside);
  }
}

// Row tiles that see some of the keys key0..key0+63: of the context those of this split, in ascending order; of own keys the tiles of their blocks.
template <bool kOwn>
class RowTiles {
 public:
  __device__ RowTiles(const Places& at, int key0, int split) : at_(at), key0_(key0), split_(split), tiles_((at.flat_rows + kFlat - 1) / kFlat) {
    if (kOwn) {
      const int64_t j = at.a.j, own = at.a.own_per_block, last = key0 + kKeys < at.a.own ? key0 + kKeys - 1 : at.a.own - 1;
      next_ = key0 / own * j * at.g / kFlat;
      tiles_ = ((last / own + 1) * j * at.g + kFlat - 1) / kFlat;
    }
  }
  // -1 after the last.
  __device__ int64_t take() {
    if constexpr (kOwn) {
      return next_ < tiles_ ? next_++ : -1;
    } else {
      while (seen_ == 0) {
        if (next_ >= tiles_) {
          return -1;
        }
        group_ = next_;
        const int64_t tile = group_ + static_cast<int64_t>(threadIdx.x % 32) * kSplits + split_;
        bool sees = false;
        if (tile < tiles_) {
          const Range4 range = reinterpret_cast<const Range4*>(at_.a.tiles_bt4)[at_.sample * tiles_ + tile];
          sees = range.largest_high > key0_ && range.least_low < key0_ + kKeys;
        }
        seen_ = __ballot_sync(0xffffffffu, sees);
        next_ += 32 * kSplits;
      }
      const int first = __ffs(static_cast<int>(seen_)) - 1;
      seen_ &= seen_ - 1;
      return group_ + static_cast<int64_t>(first) * kSplits + split_;
    }
  }

 private:
  const Places& at_;
  int key0_, split_;
  int64_t tiles_, next_ = 0, group_ = 0;
  unsigned seen_ = 0;
};

template <int E, bool kOwn>
__global__ void __launch_bounds__(kThreads, 2) key_kernel(const __grid_constant__ BlockAttention a) {
  extern __shared__ __align__(1024) unsigned char memory[];
  KeyShared<E>& shared = tiles_in<KeyShared<E>>(memory);
  const int64_t bm = kOwn ? blockIdx.x : blockIdx.x / kSplits;
  const int split = kOwn ? 0 : static_cast<int>(blockIdx.x % kSplits);
  const Places at(a, bm);
  const int key0 = static_cast<int>(blockIdx.y) * kKeys;  // early keys are seen by most rows, so those of all heads start first
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row0 = warp * 16;
  const uint32_t key_tile = shared_address(shared.key), value_tile = shared_address(shared.value);

  fetch_keys<E, kThreads>(at, kOwn, key0, key_tile, value_tile);
  RowTiles<kOwn> tiles(at, key0, split);
  int64_t tile = tiles.take();
  if (tile >= 0) {
    fetch_row_tile<E, kOwn>(shared, at, bm, tile, 0);
  }
  copies_commit();

  const float scale = a.scale * kLog2E;
  float grad_key[E / 8][4] = {}, grad_value[E / 8][4] = {};
  for (int stage = 0; tile >= 0; stage ^= 1) {
    bool masked = true;
    if (!kOwn) {
      const Range4 range = reinterpret_cast<const Range4*>(a.tiles_bt4)[at.sample * ((at.flat_rows + kFlat - 1) / kFlat) + tile];
      masked = key0 < range.largest_low || key0 + kKeys > range.least_high;
    }
    tile = tiles.take();
    if (tile >= 0) {
      fetch_row_tile<E, kOwn>(shared, at, bm, tile, stage ^ 1);
    }
    copies_commit();
    copies_wait<1>();
    fence_tiles();
    __syncthreads();

    const uint32_t query_tile = shared_address(shared.query[stage]), grad_tile = shared_address(shared.grad[stage]);
    float p[kFlat / 8][4], slope[kFlat / 8][4];
#if SF_WGMMA
    settle(p);
    settle(slope);
    products_begin();
#pragma unroll
    for (int k = 0; k < E; k += 16) {
      multiply_shared(p, Tile<E, kKeys>::by_columns(key_tile, 0, k), Tile<E, kFlat>::by_columns(query_tile, 0, k), k > 0);
    }
    products_commit();
#pragma unroll
    for (int k = 0; k < E; k += 16) {
      multiply_shared(slope, Tile<E, kKeys>::by_columns(value_tile, 0, k), Tile<E, kFlat>::by_columns(grad_tile, 0, k), k > 0);
    }
    products_commit();
    products_wait<1>();  // exponentials are formed while the second product runs, the gradient of scores while the third does
    settle(p);
#else
#pragma unroll
    for (int n = 0; n < kFlat / 8; ++n) {
      p[n][0] = p[n][1] = p[n][2] = p[n][3] = slope[n][0] = slope[n][1] = slope[n][2] = slope[n][3] = 0;
    }
#pragma unroll
    for (int k = 0; k < E; k += 16) {
      uint32_t key[4], value[4];
      Tile<E, kKeys>::load_a(key, key_tile, row0, k, lane);
      Tile<E, kKeys>::load_a(value, value_tile, row0, k, lane);
#pragma unroll
      for (int n = 0; n < kFlat / 16; ++n) {
        uint32_t other[4];
        Tile<E, kFlat>::load_b_rows(other, query_tile, n * 16, k, lane);
        multiply_add(p[2 * n], key, other[0], other[1]);
        multiply_add(p[2 * n + 1], key, other[2], other[3]);
        Tile<E, kFlat>::load_b_rows(other, grad_tile, n * 16, k, lane);
        multiply_add(slope[2 * n], value, other[0], other[1]);
        multiply_add(slope[2 * n + 1], value, other[2], other[3]);
      }
    }
#endif
    uint32_t left[kFlat / 16][4], left_slope[kFlat / 16][4];
#pragma unroll
    for (int n = 0; n < kFlat / 8; ++n) {
      const int column = n * 8 + 2 * (lane % 4);
      const float2 log_sum_exp = *reinterpret_cast<const float2*>(&shared.log_sum_exp[stage][column]);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        p[n][c] = exp2_fast(p[n][c] * scale - (c % 2 ? log_sum_exp.y : log_sum_exp.x));
      }
      if (masked) {
        const int4 bounds = *reinterpret_cast<const int4*>(&shared.bounds[stage][column]);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int key = key0 + row0 + lane / 4 + 8 * (c / 2);
          const int low = c % 2 ? bounds.z : bounds.x, high = c % 2 ? bounds.w : bounds.y;
          p[n][c] = key >= low && key < high ? p[n][c] : 0.0f;
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kFlat / 16; ++k) {
      as_operand(left[k], p[2 * k], p[2 * k + 1]);
    }
#if SF_WGMMA
    settle(left);
    settle(grad_value);
    products_begin();
#pragma unroll
    for (int k = 0; k < kFlat / 16; ++k) {
      multiply_registers(grad_value, left[k], Tile<E, kFlat>::by_rows(grad_tile, k * 16));
    }
    products_commit();
    products_wait<1>();
    settle(slope);
#endif
#pragma unroll
    for (int n = 0; n < kFlat / 8; ++n) {
      const float2 along = *reinterpret_cast<const float2*>(&shared.along[stage][n * 8 + 2 * (lane % 4)]);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        slope[n][c] = p[n][c] * (slope[n][c] - (c % 2 ? along.y : along.x));
      }
    }
#pragma unroll
    for (int k = 0; k < kFlat / 16; ++k) {
      as_operand(left_slope[k], slope[2 * k], slope[2 * k + 1]);
    }
#if SF_WGMMA
    settle(left_slope);
    settle(grad_key);
    products_begin();
#pragma unroll
    for (int k = 0; k < kFlat / 16; ++k) {
      multiply_registers(grad_key, left_slope[k], Tile<E, kFlat>::by_rows(query_tile, k * 16));
    }
    products_commit();
    products_wait<0>();
    settle(grad_value);
    settle(grad_key);
#else
#pragma unroll
    for (int k = 0; k < kFlat / 16; ++k) {
#pragma unroll
      for (int n = 0; n < E / 16; ++n) {
        uint32_t other[4];
        Tile<E, kFlat>::load_b_columns(other, grad_tile, k * 16, n * 16, lane);
        multiply_add(grad_value[2 * n], left[k], other[0], other[1]);
        multiply_add(grad_value[2 * n + 1], left[k], other[2], other[3]);
        Tile<E, kFlat>::load_b_columns(other, query_tile, k * 16, n * 16, lane);
        multiply_add(grad_key[2 * n], left_slope[k], other[0], other[1]);
        multiply_add(grad_key[2 * n + 1], left_slope[k], other[2], other[3]);
      }
    }
#endif
    __syncthreads();
  }
  copies_wait<0>();

  uint32_t most = 0;
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {
    const int key = key0 + row0 + lane / 4 + 8 * upper;
    if (key >= (kOwn ? a.own : a.s)) {
      continue;
    }
    const int64_t to = (kOwn ? at.own_key(key) : at.context_key(key)) + 2 * (lane % 4);
#pragma unroll
    for (int n = 0; n < E / 8; ++n) {
      const float k0 = grad_key[n][2 * upper] * a.scale, k1 = grad_key[n][2 * upper + 1] * a.scale;
      const float v0 = grad_value[n][2 * upper], v1 = grad_value[n][2 * upper + 1];
      if (kOwn) {
        *reinterpret_cast<uint32_t*>(static_cast<bf16*>(a.grad_block_key_bqme) + to + n * 8) = pack(k0, k1);
        *reinterpret_cast<uint32_t*>(static_cast<bf16*>(a.grad_block_value_bqme) + to + n * 8) = pack(v0, v1);
        note(most, {v0, v1});
      } else {
        const int64_t part = static_cast<int64_t>(split) * a.b * a.s * a.m * a.e + to + n * 8;
        *reinterpret_cast<float2*>(a.partial_key + part) = make_float2(k0, k1);
        *reinterpret_cast<float2*>(a.partial_value + part) = make_float2(v0, v1);
      }
    }
  }
  if (kOwn) {
    warp_amax_of<bf16>(most, a.amax);
  }
}

__global__ void __launch_bounds__(256) join_kernel(BlockAttention a, int64_t count) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x) * 4;
  const bool inside = i < count;
  float key[4] = {}, value[4] = {};
  for (int split = 0; split < kSplits && inside; ++split) {
    float part[4];
    load(part, a.partial_key + split * count + i);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      key[n] += part[n];
    }
    load(part, a.partial_value + split * count + i);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      value[n] += part[n];
    }
  }
  uint32_t most = 0;
  if (inside) {
    store(static_cast<bf16*>(a.grad_context_key_bsme) + i, key);
    store(static_cast<bf16*>(a.grad_context_value_bsme) + i, value);
    note(most, value);
  }
  warp_amax_of<bf16>(most, a.amax_context_value);
}

template <int E>
Error run(const BlockAttention& a, cudaStream_t stream) {
  const int64_t g = a.n / a.m, q = a.q, tiles = (q * g + kFlat - 1) / kFlat;
  const auto heads = static_cast<unsigned>(a.b * a.m);
  constexpr int64_t kAlongHeads = 256 / (E / 8) * kAlongAtOnce;
  along_kernel<E><<<dim3(static_cast<unsigned>((q * a.n + kAlongHeads - 1) / kAlongHeads), static_cast<unsigned>(a.b)), 256, 0, stream>>>(a);
  tiles_kernel<<<static_cast<unsigned>((a.b * tiles + 127) / 128), 128, 0, stream>>>(a, tiles);
  if (Error error = last_error()) {
    return error;
  }
  for (Error error : {allow_shared(query_kernel<E>, bytes_for<RowShared<E>>()), allow_shared(key_kernel<E, false>, bytes_for<KeyShared<E>>()),
                      allow_shared(key_kernel<E, true>, bytes_for<KeyShared<E>>())}) {
    if (error != nullptr) {
      return error;
    }
  }
  query_kernel<E><<<dim3(static_cast<unsigned>(tiles), heads), kThreads, bytes_for<RowShared<E>>(), stream>>>(a);
  if (a.own > 0) {
    key_kernel<E, true><<<dim3(heads, static_cast<unsigned>((a.own + kKeys - 1) / kKeys)), kThreads, bytes_for<KeyShared<E>>(), stream>>>(a);
  }
  if (a.s > 0) {
    key_kernel<E, false><<<dim3(heads * kSplits, static_cast<unsigned>((a.s + kKeys - 1) / kKeys)), kThreads, bytes_for<KeyShared<E>>(), stream>>>(a);
    const int64_t count = a.b * a.s * a.m * a.e;
    join_kernel<<<static_cast<unsigned>((count / 4 + 255) / 256), 256, 0, stream>>>(a, count);
  }
  return last_error();
}

}  // namespace

Error block_attention_backward(const BlockAttention& a, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  return a.e == 64 ? run<64>(a, on) : run<128>(a, on);
}

}  // namespace sf::cuda
