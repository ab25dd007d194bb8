// core/kernels/cuda/attention_tile.cuh: tiles of block attention in shared memory and the tensor-core instructions on them (sm_80 and newer).
//
// A tile is Rows x E bfloat16 in slabs of 64 columns: a slab's rows are 128 bytes, one after the other, and the eight 16-byte pieces of a row are permuted by the
// row's number (piece ^ (row % 8)). So the eight rows that a matrix load reads at once lie in different banks, and the layout is the one that sm_90's wgmma calls
// 128-byte swizzle: tiles begin at multiples of 1024 bytes.
//
// Two ways to multiply. sm_90a: wgmma, four warps together, operands from shared memory (A also from registers). Elsewhere mma.m16n8k16 on registers: A is 16 x 16
// (four registers), B 16 x 8 (two), C 16 x 8 (four floats). Both leave the result alike: warp w has rows 16 w .. 16 w + 15, lane l of it the rows l / 4 and
// l / 4 + 8, the columns 2 * (l % 4) and the next of every 8.
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

template <int E, int Rows>
struct Tile {
  static constexpr int kPieces = E / 8;
  static constexpr uint32_t kSlab = Rows * 128;  // bytes

  // Address of a 16-byte piece.
  __device__ static uint32_t piece(uint32_t tile, int row, int piece) {
    return tile + static_cast<uint32_t>(piece >> 3) * kSlab + static_cast<uint32_t>(row * 128 + (((piece & 7) ^ (row & 7)) << 4));
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

  // Place of an element, counted in elements from the tile's begin.
  __device__ static int element(int row, int column) {
    return column / 64 * (Rows * 64) + row * 64 + (((column / 8 & 7) ^ (row & 7)) << 3) + column % 8;
  }

  // wgmma's descriptors. Along columns: rows row.., k = column..column+15 (column a multiple of 16); eight rows lie 1024 bytes after the last eight.
  __device__ static uint64_t by_columns(uint32_t tile, int row, int column) {
    return describe(tile + static_cast<uint32_t>(column / 64) * kSlab + static_cast<uint32_t>(row * 128 + column % 64 * 2), 16, 1024);
  }
  // Along rows: k = row..row+15 (row a multiple of 16), n over all columns; slabs lie kSlab apart, eight rows 1024 bytes.
  __device__ static uint64_t by_rows(uint32_t tile, int row) { return describe(tile + static_cast<uint32_t>(row * 128), kSlab, 1024); }

 private:
  __device__ static uint64_t describe(uint32_t address, uint32_t leading, uint32_t stride) {
    return static_cast<uint64_t>((address & 0x3FFFFu) >> 4) | static_cast<uint64_t>(leading >> 4) << 16 | static_cast<uint64_t>(stride >> 4) << 32 |
           uint64_t{1} << 62;
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define SF_WGMMA 1
// Shared memory written by threads becomes visible to wgmma.
__device__ inline void fence_tiles() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ inline void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until all but the newest `Left` groups of products are done.
template <int Left>
__device__ inline void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Left) : "memory");
}
// The compiler may not move uses of these registers over this place: products write them behind its back.
template <int N>
__device__ inline void settle(float (&c)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    asm volatile("" : "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])::"memory");
  }
}
template <int N>
__device__ inline void settle(uint32_t (&a)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    asm volatile("" : "+r"(a[n][0]), "+r"(a[n][1]), "+r"(a[n][2]), "+r"(a[n][3])::"memory");
  }
}

#define SF_TILE(c, n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define SF_TILES_8(c, n) \
  SF_TILE(c, n), SF_TILE(c, n + 1), SF_TILE(c, n + 2), SF_TILE(c, n + 3), SF_TILE(c, n + 4), SF_TILE(c, n + 5), SF_TILE(c, n + 6), SF_TILE(c, n + 7)
#define SF_REGISTERS_32 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define SF_REGISTERS_64 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, " \
  "%62, %63}"

// c [64, 64] = (adds ? c : 0) + a b, both from shared memory, k along their columns.
__device__ inline void multiply_shared(float (&c)[8][4], uint64_t a, uint64_t b, bool adds) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " SF_REGISTERS_32 ", %32, %33, p, 1, 1, 0, 0;\n}"
      : SF_TILES_8(c, 0)
      : "l"(a), "l"(b), "r"(static_cast<int>(adds)));
}
// c [64, 64] += a b, a from registers, b from shared memory, k along its rows.
__device__ inline void multiply_registers(float (&c)[8][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " SF_REGISTERS_32 ", {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
               : SF_TILES_8(c, 0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// The same for 128 columns.
__device__ inline void multiply_registers(float (&c)[16][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " SF_REGISTERS_64 ", {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
               : SF_TILES_8(c, 0), SF_TILES_8(c, 8)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#else
#define SF_WGMMA 0
__device__ inline void fence_tiles() {}
#endif

// The A operand of 16 columns out of two C tiles beside each other.
__device__ inline void as_operand(uint32_t (&a)[4], const float (&left)[4], const float (&right)[4]) {
  a[0] = pack(left[0], left[1]);
  a[1] = pack(left[2], left[3]);
  a[2] = pack(right[0], right[1]);
  a[3] = pack(right[2], right[3]);
}

// Dynamic shared memory, where tiles may begin.
template <class Shared>
__device__ inline Shared& tiles_in(unsigned char* memory) {
  return *reinterpret_cast<Shared*>((reinterpret_cast<uintptr_t>(memory) + 1023) & ~uintptr_t{1023});
}
template <class Shared>
constexpr size_t bytes_for() {
  return sizeof(Shared) + 1023;
}

// Where things are. A key/value head `bm` is a sample and a head; its flat row t is the pair (draft row t / g, query head t % g of the group).
struct Places {
  const BlockAttention& a;
  int64_t sample, head;     // key/value head
  int g;
  int64_t flat_rows;
  uint32_t magic;           // t / g as a multiplication, exact for every flat row (fewer than 2^32 / g)

  __device__ Places(const BlockAttention& attention, int64_t bm)
      : a(attention), sample(bm / attention.m), head(bm % attention.m), g(static_cast<int>(attention.n / attention.m)),
        flat_rows(attention.q * g), magic(static_cast<uint32_t>((uint64_t{1} << 32) / static_cast<unsigned>(g)) + 1) {}

  __device__ int64_t draft_row(int64_t t) const {
    return g == 1 ? t : static_cast<int64_t>(__umulhi(static_cast<uint32_t>(t), magic));
  }
  // Number of a flat row among the (row, head) pairs of its sample.
  __device__ uint32_t query_in_sample(uint32_t t) const {
    const uint32_t row = g == 1 ? t : __umulhi(t, magic);
    return row * static_cast<uint32_t>(a.n) + static_cast<uint32_t>(head) * g + (t - row * g);
  }
  // Offset of a flat row in [b, q, n, e].
  __device__ int64_t query(int64_t t) const {
    const int64_t row = draft_row(t);
    return ((sample * a.q + row) * a.n + head * g + (t - row * g)) * a.e;
  }
  __device__ int64_t context_key(int64_t key) const { return ((sample * a.s + key) * a.m + head) * a.e; }
  __device__ int64_t own_key(int64_t key) const { return ((sample * a.own + key) * a.m + head) * a.e; }
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

// Which rows of a tile a thread copies: one 16-byte piece of every kStep-th. kStep is a multiple of 8, so all of them are permuted alike.
template <int E, int Rows, int Threads>
struct Share {
  static constexpr int kPieces = E / 8, kStep = Threads / kPieces, kCount = Rows / kStep;
  static_assert(kStep % 8 == 0 && Rows % kStep == 0);
  int row = static_cast<int>(threadIdx.x) / kPieces, piece = static_cast<int>(threadIdx.x) % kPieces;

  __device__ uint32_t place(uint32_t tile) const { return Tile<E, Rows>::piece(tile, row, piece); }
};

// Copies keys begin..begin+63 and their values into two tiles; zeros past the end.
template <int E, int Threads>
__device__ inline void fetch_keys(const Places& at, bool own, int begin, uint32_t key_tile, uint32_t value_tile) {
  const Share<E, kKeys, Threads> share;
  const int end = static_cast<int>(own ? at.a.own : at.a.s);
  const int64_t from = (own ? at.own_key(begin + share.row) : at.context_key(begin + share.row)) + share.piece * 8;
  const bf16* keys = static_cast<const bf16*>(own ? at.a.block_key_bqme : at.a.context_key_bsme) + from;
  const bf16* values = static_cast<const bf16*>(own ? at.a.block_value_bqme : at.a.context_value_bsme) + from;
  const int64_t step = at.a.m * E * share.kStep;
  const uint32_t key_place = share.place(key_tile), value_place = share.place(value_tile);
#pragma unroll
  for (int i = 0; i < share.kCount; ++i) {
    const bool valid = begin + share.row + i * share.kStep < end;
    copy_async<16>(key_place + i * share.kStep * 128, valid ? keys + i * step : static_cast<const bf16*>(at.a.query_bqne), valid);
    copy_async<16>(value_place + i * share.kStep * 128, valid ? values + i * step : static_cast<const bf16*>(at.a.query_bqne), valid);
  }
}

// Copies flat rows begin.. of one or two [b, q, n, e] tensors into tiles; zeros past the end.
template <int E, int Rows, int Threads, bool kTwo>
__device__ inline void fetch_rows(const Places& at, const void* first_bqne, const void* second_bqne, int64_t begin, uint32_t first_tile,
                                  uint32_t second_tile) {
  const Share<E, Rows, Threads> share;
  const bf16* first = static_cast<const bf16*>(first_bqne) + at.sample * at.a.q * at.a.n * E + share.piece * 8;
  const bf16* second = static_cast<const bf16*>(second_bqne) + at.sample * at.a.q * at.a.n * E + share.piece * 8;
  const uint32_t first_place = share.place(first_tile), second_place = share.place(second_tile);
#pragma unroll
  for (int i = 0; i < share.kCount; ++i) {
    const int64_t t = begin + share.row + i * share.kStep;
    const bool valid = t < at.flat_rows;
    const uint32_t from = valid ? at.query_in_sample(static_cast<uint32_t>(t)) * E : 0;
    copy_async<16>(first_place + i * share.kStep * 128, first + from, valid);
    if (kTwo) {
      copy_async<16>(second_place + i * share.kStep * 128, second + from, valid);
    }
  }
}

}  // namespace sf::cuda
