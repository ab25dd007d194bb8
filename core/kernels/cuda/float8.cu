// Float8 numbers of a matrix: the largest magnitude, and one pass that reads a matrix once and writes its values row by row, transposed, or both. Magnitudes are compared as bits:
// those of |x| order as the numbers do, infinity above all numbers and NaN above infinity, so both survive.
#include "core/kernels/cuda/device.cuh"

#include <cuda_fp8.h>

namespace sf::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kInFlight = 4;              // 16-byte loads of a thread that are on their way together
constexpr int kTile = 128;                // rows and columns of a tile
constexpr int kColumns = 16;              // of a thread
constexpr int kRows = 4;                  // of a thread: four bytes of a column make a word of the transposed copy
static_assert(kTile / kColumns * (kTile / kRows) == kThreads);

template <class T>
__global__ void __launch_bounds__(kThreads) amax_kernel(const T* x, int64_t pieces, int64_t count, float* amax) {
  constexpr int N = 16 / sizeof(T);
  uint32_t most = 0;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < pieces; i += step * kInFlight) {
    float v[kInFlight][N];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (i + k * step < pieces) {
        load(v[k], x + (i + k * step) * N);
      }
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (i + k * step < pieces) {
        note(most, v[k]);
      }
    }
  }
  if (blockIdx.x == 0) {
    for (int64_t i = pieces * N + threadIdx.x; i < count; i += kThreads) {
      most = max(most, magnitude(to_float(x[i])));
    }
  }
  warp_amax(most, amax);
}

// Largest magnitudes of rows and columns: a block takes 128 columns, 16 a thread, and a run of rows.
template <class T>
__global__ void __launch_bounds__(kThreads) amax_rows_kernel(Float8Amax a) {
  __shared__ uint32_t columns[kTile];
  const int group = threadIdx.x % (kTile / kColumns), first = threadIdx.x / (kTile / kColumns);
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kTile + group * kColumns;
  if (threadIdx.x < kTile) {
    columns[threadIdx.x] = 0;
  }
  __syncthreads();
  uint32_t most[kColumns] = {};
  const int64_t begin = static_cast<int64_t>(blockIdx.y) * kTile, end = begin + kTile < a.r ? begin + kTile : a.r;
  for (int64_t row = begin + first; row - first < end; row += kThreads / (kTile / kColumns)) {
    uint32_t of_row = 0;
    if (row < end && c < a.c) {
      float v[kColumns];
      load(v, static_cast<const T*>(a.x_rc) + row * a.c + c);
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        const uint32_t m = magnitude(v[n]);
        most[n] = max(most[n], m);
        of_row = max(of_row, m);
      }
    }
#pragma unroll
    for (int step = 1; step < kTile / kColumns; step *= 2) {
      of_row = max(of_row, __shfl_xor_sync(0xffffffffu, of_row, step));
    }
    if (group == 0 && row < end) {
      raise_amax(of_row, a.amax_r + row);
    }
  }
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
    if (most[n] != 0) {
      atomicMax(&columns[group * kColumns + n], most[n]);
    }
  }
  __syncthreads();
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kTile + threadIdx.x;
  if (threadIdx.x < kTile && column < a.c) {
    raise_amax(columns[threadIdx.x], a.amax_c + column);
  }
}

// Two numbers to two bytes, to the nearest, ties to even; what is too large becomes the largest.
template <__nv_fp8_interpretation_t kFormat>
__device__ inline uint32_t encode_pair(float low, float high) {
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, kFormat);
}
template <__nv_fp8_interpretation_t kFormat>
__device__ inline uint32_t encode_four(float a, float b, float c, float d) {
  return encode_pair<kFormat>(a, b) | encode_pair<kFormat>(c, d) << 16;
}

// Words of a tile's transposed copy: column by column, 32 words of four rows; the eight 16-byte pieces of a column are permuted by the thread that wrote it, so that a warp's
// writes and reads meet every bank once.
__device__ inline int word_of(int column, int row_group) { return column * (kTile / 4) + (((row_group >> 2) ^ (column / kColumns & 7)) << 2) + (row_group & 3); }

// Four rows of four bytes (a word each) to four columns.
__device__ inline void transpose_four(const uint32_t (&rows)[4], uint32_t (&columns)[4]) {
  const uint32_t ab_low = __byte_perm(rows[0], rows[1], 0x5140), ab_high = __byte_perm(rows[0], rows[1], 0x7362);
  const uint32_t cd_low = __byte_perm(rows[2], rows[3], 0x5140), cd_high = __byte_perm(rows[2], rows[3], 0x7362);
  columns[0] = __byte_perm(ab_low, cd_low, 0x5410);
  columns[1] = __byte_perm(ab_low, cd_low, 0x7632);
  columns[2] = __byte_perm(ab_high, cd_high, 0x5410);
  columns[3] = __byte_perm(ab_high, cd_high, 0x7632);
}

// A tile in shared memory to the transposed copy, 128 bytes of a column side by side.
__device__ inline void write_columns(const uint32_t* tile, unsigned char* values_cr, int64_t row0, int64_t column0, int64_t r, int64_t c) {
  const int64_t padded = float8_padded(r);
  constexpr int kPieces = kTile / 16;  // of a column
  for (int i = threadIdx.x; i < kTile * kPieces; i += kThreads) {
    const int column = i / kPieces, piece = i % kPieces;
    if (column0 + column < c && row0 + piece * 16 < padded) {
      *reinterpret_cast<uint4*>(values_cr + (column0 + column) * padded + row0 + piece * 16) = *reinterpret_cast<const uint4*>(&tile[word_of(column, piece * 4)]);
    }
  }
}

__global__ void __launch_bounds__(kThreads) transpose_kernel(Float8Transpose a) {
  __shared__ __align__(16) uint32_t tile[kTile * kTile / 4];
  const int64_t row0 = static_cast<int64_t>(blockIdx.y) * kTile, column0 = static_cast<int64_t>(blockIdx.x) * kTile;
  const int group = threadIdx.x % (kTile / kColumns), row_group = threadIdx.x / (kTile / kColumns);
  const int64_t c = column0 + group * kColumns, row = row0 + row_group * kRows;
  uint4 raw[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    raw[i] = make_uint4(0, 0, 0, 0);
    if (row + i < a.r && c < a.c) {
      raw[i] = *reinterpret_cast<const uint4*>(static_cast<const unsigned char*>(a.values_rc) + (row + i) * a.c + c);
    }
  }
  const auto write = [&](int k, uint32_t first, uint32_t second, uint32_t third, uint32_t fourth) {
    const uint32_t rows[4] = {first, second, third, fourth};
    uint32_t columns[4];
    transpose_four(rows, columns);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      tile[word_of(group * kColumns + 4 * k + n, row_group)] = columns[n];
    }
  };
  write(0, raw[0].x, raw[1].x, raw[2].x, raw[3].x);
  write(1, raw[0].y, raw[1].y, raw[2].y, raw[3].y);
  write(2, raw[0].z, raw[1].z, raw[2].z, raw[3].z);
  write(3, raw[0].w, raw[1].w, raw[2].w, raw[3].w);
  __syncthreads();
  write_columns(tile, static_cast<unsigned char*>(a.values_cr), row0, column0, a.r, a.c);
}

template <class T, __nv_fp8_interpretation_t kFormat, bool kRowWise>
__global__ void __launch_bounds__(kThreads) encode_kernel(Float8Encode a) {
  __shared__ __align__(16) uint32_t tile[kTile * kTile / 4];
  __shared__ float scales[kRowWise ? 2 * kTile : 1];
  const int64_t row0 = static_cast<int64_t>(blockIdx.y) * kTile, column0 = static_cast<int64_t>(blockIdx.x) * kTile;
  const int group = threadIdx.x % (kTile / kColumns), row_group = threadIdx.x / (kTile / kColumns);
  const int64_t c = column0 + group * kColumns, row = row0 + row_group * kRows;

  Vector<T, 16 / sizeof(T)> raw[kRows][kColumns * sizeof(T) / 16];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const bool inside = row + i < a.r && c < a.c;
#pragma unroll
    for (int k = 0; k < static_cast<int>(kColumns * sizeof(T) / 16); ++k) {
      if (inside) {
        raw[i][k] = reinterpret_cast<const Vector<T, 16 / sizeof(T)>*>(static_cast<const T*>(a.x_rc) + (row + i) * a.c + c)[k];
      } else {
#pragma unroll
        for (int n = 0; n < static_cast<int>(16 / sizeof(T)); ++n) {
          raw[i][k].at[n] = from_float<T>(0.0f);
        }
      }
    }
  }
  const auto scale_of = [](float amax) {  // in double, as the twin: one rounding
    const double wide = amax;
    const double floor = 1e-12, most = kFormat == __NV_E4M3 ? 448.0 : 57344.0;
    return isfinite(amax) ? static_cast<float>(most / (wide < floor ? floor : wide)) : NAN;
  };
  float scale = 0;
  if (kRowWise) {
    const int i = threadIdx.x % kTile;
    const bool of_rows = threadIdx.x < kTile;
    const int64_t at = (of_rows ? row0 : column0) + i;
    if (at < (of_rows ? a.r : a.c)) {
      scales[threadIdx.x] = scale_of(of_rows ? a.amax_r[at] : a.amax_c[at]);
      if (a.alarm != nullptr && isnan(scales[threadIdx.x])) {
        *a.alarm = 1;
      }
      if (of_rows && blockIdx.x == 0 && a.inverse_scale_r != nullptr) {
        a.inverse_scale_r[at] = 1.0f / scales[threadIdx.x];
      }
      if (!of_rows && blockIdx.y == 0 && a.inverse_scale_c != nullptr) {
        a.inverse_scale_c[at] = 1.0f / scales[threadIdx.x];
      }
    } else {
      scales[threadIdx.x] = 0;
    }
    __syncthreads();
  } else {
    scale = scale_of(*a.amax);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
      *a.inverse_scale = 1.0f / scale;
      if (a.alarm != nullptr && isnan(scale)) {
        *a.alarm = 1;
      }
    }
  }

  const auto at = [&](int i, int n) { return to_float(raw[i][n / (16 / sizeof(T))].at[n % (16 / sizeof(T))]); };
  uint32_t words[kRows][kColumns / 4];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const float s = kRowWise ? scales[row_group * kRows + i] : scale;
#pragma unroll
    for (int k = 0; k < kColumns / 4; ++k) {  // zero behind the end, whatever the scale
      words[i][k] = row + i < a.r ? encode_four<kFormat>(at(i, 4 * k) * s, at(i, 4 * k + 1) * s, at(i, 4 * k + 2) * s, at(i, 4 * k + 3) * s) : 0;
    }
    if (a.values_rc != nullptr && row + i < a.r && c < a.c) {
      *reinterpret_cast<uint4*>(static_cast<unsigned char*>(a.values_rc) + (row + i) * a.c + c) = make_uint4(words[i][0], words[i][1], words[i][2], words[i][3]);
    }
  }
  if (a.values_cr == nullptr) {
    return;
  }
#pragma unroll
  for (int k = 0; k < kColumns / 4; ++k) {
    if (kRowWise) {
#pragma unroll
      for (int n = 4 * k; n < 4 * k + 4; ++n) {
        const float s = scales[kTile + group * kColumns + n];
        const int64_t left = a.r - row;  // rows of these four that are there
        const uint32_t kept = left >= kRows ? 0xffffffffu : left <= 0 ? 0u : (1u << 8 * left) - 1;
        tile[word_of(group * kColumns + n, row_group)] = encode_four<kFormat>(at(0, n) * s, at(1, n) * s, at(2, n) * s, at(3, n) * s) & kept;
      }
    } else {
      const uint32_t rows[4] = {words[0][k], words[1][k], words[2][k], words[3][k]};
      uint32_t columns[4];
      transpose_four(rows, columns);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        tile[word_of(group * kColumns + 4 * k + n, row_group)] = columns[n];
      }
    }
  }
  __syncthreads();
  write_columns(tile, static_cast<unsigned char*>(a.values_cr), row0, column0, a.r, a.c);
}

template <class T>
Error amax(const Float8Amax& a, cudaStream_t stream) {
  const bool row_wise = a.amax == nullptr;
  if (!row_wise) {
    if (const cudaError_t error = cudaMemsetAsync(a.amax, 0, sizeof(float), stream); error != cudaSuccess) {
      return cudaGetErrorString(error);
    }
    const int64_t count = a.r * a.c, pieces = is_aligned(a.x_rc) ? count / static_cast<int64_t>(16 / sizeof(T)) : 0;
    const int64_t wanted = (pieces + kThreads * kInFlight - 1) / (kThreads * kInFlight);
    const auto grid = static_cast<unsigned>(wanted < 1 ? 1 : (wanted < 1056 ? wanted : 1056));
    amax_kernel<<<grid, kThreads, 0, stream>>>(static_cast<const T*>(a.x_rc), pieces, count, a.amax);
    return last_error();
  }
  if (a.c % kColumns != 0 || !is_aligned(a.x_rc)) {
    return "float8: rows are not made of whole pieces of 16 numbers";
  }
  for (cudaError_t error : {cudaMemsetAsync(a.amax_r, 0, static_cast<size_t>(a.r) * sizeof(float), stream),
                            cudaMemsetAsync(a.amax_c, 0, static_cast<size_t>(a.c) * sizeof(float), stream)}) {
    if (error != cudaSuccess) {
      return cudaGetErrorString(error);
    }
  }
  const dim3 grid(static_cast<unsigned>((a.c + kTile - 1) / kTile), static_cast<unsigned>((a.r + kTile - 1) / kTile));
  amax_rows_kernel<T><<<grid, kThreads, 0, stream>>>(a);
  return last_error();
}

template <class T, __nv_fp8_interpretation_t kFormat>
Error encode(const Float8Encode& a, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((a.c + kTile - 1) / kTile), static_cast<unsigned>((a.r + kTile - 1) / kTile));
  if (a.amax == nullptr) {
    encode_kernel<T, kFormat, true><<<grid, kThreads, 0, stream>>>(a);
  } else {
    encode_kernel<T, kFormat, false><<<grid, kThreads, 0, stream>>>(a);
  }
  return last_error();
}

template <class T>
Error encode(const Float8Encode& a, cudaStream_t stream) {
  return a.format == Float8::e4m3 ? encode<T, __NV_E4M3>(a, stream) : encode<T, __NV_E5M2>(a, stream);
}

constexpr int64_t kMostRows = int64_t{65535} * kTile;  // tiles of rows stand on the grid's second axis

}  // namespace

Error float8_amax(const Float8Amax& a, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  if (a.amax == nullptr && a.r > kMostRows) {
    return "float8: more rows than a grid holds";
  }
  return a.type == Type::bfloat16 ? amax<bf16>(a, on) : amax<float>(a, on);
}

Error float8_encode(const Float8Encode& a, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  if (a.c % kColumns != 0 || !are_aligned(a.x_rc, a.values_rc, a.values_cr)) {
    return "float8: rows are not made of whole pieces of 16 numbers";
  }
  if (a.r > kMostRows) {
    return "float8: more rows than a grid holds";
  }
  return a.type == Type::bfloat16 ? encode<bf16>(a, on) : encode<float>(a, on);
}

Error float8_transpose(const Float8Transpose& a, void* stream) {
  if (a.c % kColumns != 0 || !are_aligned(a.values_rc, a.values_cr)) {
    return "float8: rows are not made of whole pieces of 16 numbers";
  }
  if (a.r > kMostRows) {
    return "float8: more rows than a grid holds";
  }
  const dim3 grid(static_cast<unsigned>((a.c + kTile - 1) / kTile), static_cast<unsigned>((a.r + kTile - 1) / kTile));
  transpose_kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(a);
  return last_error();
}

}  // namespace sf::cuda
