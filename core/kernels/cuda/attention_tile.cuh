// core/kernels/cuda/attention_tile.cuh: tiles of block attention in shared memory and the tensor-core instructions on them (sm_80 and newer).
//
// A tile is rows x E bfloat16. The 16-byte pieces of a row are permuted by the row's number (piece ^ (row % 8)), so that the eight rows which a matrix load
// reads at once lie in different banks.
//
// Instruction shapes are those of mma.m16n8k16: A is 16 x 16 (four registers), B 16 x 8 (two), C 16 x 8 (four floats); lane l holds of C the rows l / 4 and
// l / 4 + 8, the columns 2 * (l % 4) and the next.
#pragma once

#include "core/kernels/cuda/device.cuh"

namespace sf::cuda {

constexpr int kKeys = 64;      // keys of a tile
constexpr int kFlat = 64;      // flat rows of a tile in backward
constexpr float kLog2E = 1.4426950408889634f;

__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline uint32_t shared_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

// Copies without waiting; zeros when the source is not `valid` (it must still be an address).
template <int Bytes>
__device__ inline void copy_async(uint32_t to, const void* from, bool valid) {
  const int bytes = valid ? Bytes : 0;
  if constexpr (Bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(Bytes), "r"(bytes) : "memory");
  }
}
__device__ inline void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Left>
__device__ inline void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Left) : "memory");
}

__device__ inline void load_matrices(uint32_t (&r)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}
__device__ inline void load_matrices_transposed(uint32_t (&r)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}

// c += a b
__device__ inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

template <int E>
struct Tile {
  static constexpr int kPieces = E / 8;

  // Address of a 16-byte piece.
  __device__ static uint32_t piece(uint32_t tile, int row, int piece) {
    return tile + static_cast<uint32_t>(row * E * 2 + ((piece ^ (row & 7)) << 4));
  }
  // A operand: rows row..row+15, columns column..column+15.
  __device__ static void load_a(uint32_t (&r)[4], uint32_t tile, int row, int column, int lane) {
    load_matrices(r, piece(tile, row + (lane & 15), column / 8 + (lane >> 4)));
  }
  // B operands of two neighbouring products whose n runs over the tile's rows (n = row..row+15) and k over its columns: {r0, r1} and {r2, r3}.
  __device__ static void load_b_rows(uint32_t (&r)[4], uint32_t tile, int row, int column, int lane) {
    load_matrices(r, piece(tile, row + (lane & 7) + ((lane >> 4) << 3), column / 8 + ((lane >> 3) & 1)));
  }
  // The same with k over the tile's rows (k = row..row+15) and n over its columns (n = column..column+15).
  __device__ static void load_b_columns(uint32_t (&r)[4], uint32_t tile, int row, int column, int lane) {
    load_matrices_transposed(r, piece(tile, row + (lane & 15), column / 8 + (lane >> 4)));
  }
};

// The A operand of 16 columns out of two C tiles beside each other.
__device__ inline void as_operand(uint32_t (&a)[4], const float (&left)[4], const float (&right)[4]) {
  a[0] = pack(left[0], left[1]);
  a[1] = pack(left[2], left[3]);
  a[2] = pack(right[0], right[1]);
  a[3] = pack(right[2], right[3]);
}

// Where things are. A key/value head `bm` is a sample and a head; its flat row t is the pair (draft row t / g, query head t % g of the group).
struct Places {
  const BlockAttention& a;
  int64_t sample, head;     // key/value head
  int g;
  int64_t flat_rows;
  uint64_t magic;           // t / g as a multiplication

  __device__ Places(const BlockAttention& attention, int64_t bm)
      : a(attention), sample(bm / attention.m), head(bm % attention.m), g(static_cast<int>(attention.n / attention.m)),
        flat_rows(attention.q * g), magic((uint64_t{1} << 32) / static_cast<unsigned>(g) + 1) {}

  __device__ int64_t draft_row(int64_t t) const {
    return g == 1 ? t : static_cast<int64_t>((static_cast<uint64_t>(t) * magic) >> 32);
  }
  // Offset of a flat row in [b, q, n, e].
  __device__ int64_t query(int64_t t) const {
    const int64_t row = draft_row(t);
    return ((sample * a.q + row) * a.n + head * g + (t - row * g)) * a.e;
  }
  __device__ int64_t context_key(int64_t key) const { return ((sample * a.s + key) * a.m + head) * a.e; }
  __device__ int64_t own_key(int64_t key) const { return ((sample * a.q + key) * a.m + head) * a.e; }
};

// Key tiles of a run of rows: first those of the context, then those of the rows' own blocks.
struct KeyTiles {
  int context_begin, context_tiles, own_begin, own_tiles;

  __device__ int count() const { return context_tiles + own_tiles; }
  __device__ bool is_own(int i) const { return i >= context_tiles; }
  __device__ int begin(int i) const { return is_own(i) ? own_begin + (i - context_tiles) * kKeys : context_begin + i * kKeys; }
};

struct Range4 {
  int least_low, largest_high, largest_low, least_high;
};

// Copies keys begin..begin+63 and their values into two tiles; zeros past the end.
template <int E, int Threads>
__device__ inline void fetch_keys(const Places& at, bool own, int begin, uint32_t key_tile, uint32_t value_tile) {
  constexpr int kPieces = Tile<E>::kPieces;
  const bf16* keys = static_cast<const bf16*>(own ? at.a.block_key_bqme : at.a.context_key_bsme);
  const bf16* values = static_cast<const bf16*>(own ? at.a.block_value_bqme : at.a.context_value_bsme);
  const int end = static_cast<int>(own ? at.a.q : at.a.s);
#pragma unroll
  for (int i = threadIdx.x; i < kKeys * kPieces; i += Threads) {
    const int row = i / kPieces, piece = i % kPieces, key = begin + row;
    const bool valid = key < end;
    const int64_t from = valid ? (own ? at.own_key(key) : at.context_key(key)) + piece * 8 : 0;
    copy_async<16>(Tile<E>::piece(key_tile, row, piece), keys + from, valid);
    copy_async<16>(Tile<E>::piece(value_tile, row, piece), values + from, valid);
  }
}

// Copies flat rows begin.. of a [b, q, n, e] tensor into a tile; zeros past the end.
template <int E, int Rows, int Threads>
__device__ inline void fetch_rows(const Places& at, const void* tensor_bqne, int64_t begin, uint32_t tile) {
  constexpr int kPieces = Tile<E>::kPieces;
#pragma unroll
  for (int i = threadIdx.x; i < Rows * kPieces; i += Threads) {
    const int row = i / kPieces, piece = i % kPieces;
    const bool valid = begin + row < at.flat_rows;
    const int64_t from = valid ? at.query(begin + row) + piece * 8 : 0;
    copy_async<16>(Tile<E>::piece(tile, row, piece), static_cast<const bf16*>(tensor_bqne) + from, valid);
  }
}

}  // namespace sf::cuda
