// core/kernels/cuda/sum_parts.hpp: a sum over the parts that ranks of a reduction gave. Called inside libsf_engine_cuda.so, not through the table of launchers.
#pragma once

#include <cstdint>

namespace sf::cuda {

/// sum[i] = parts[0][i] + parts[1][i] + ..., in this order, in float32. At most 16 parts, at multiples of 16 bytes.
struct SumParts {
  float* sum;
  const void* const* parts;   // host memory, copied when called
  int count;
  int64_t elements;
  bool is_bfloat16;           // parts; else float32
  int float_part = -1;        // number of one that is float32 all the same; -1: none
};

constexpr int kSumPartsMost = 16;

/// Null, or what went wrong.
const char* sum_parts(const SumParts&, void* stream);

}  // namespace sf::cuda
