// sum[i] = parts[0][i] + parts[1][i] + ...: bound by memory, 4 bytes written and 2 or 4 read for each part. A thread takes 8 elements at a time.
#include "core/kernels/cuda/device.cuh"
#include "core/kernels/cuda/sum_parts.hpp"

namespace sf::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kElements = 8;
constexpr int kBlocksMost = 528;  // four for each multiprocessor of an H200

struct Parts {
  const void* at[kSumPartsMost];
};

template <class T>
__global__ void __launch_bounds__(kThreads) sum_parts_kernel(float* sum, const __grid_constant__ Parts parts, int count, int float_part, int64_t elements) {
  const auto load_part = [&](float (&to)[kElements], int p, int64_t i) {
    if (p == float_part) {
      load(to, static_cast<const float*>(parts.at[p]) + i);
    } else {
      load(to, static_cast<const T*>(parts.at[p]) + i);
    }
  };
  const auto one = [&](int p, int64_t i) { return p == float_part ? static_cast<const float*>(parts.at[p])[i] : to_float(static_cast<const T*>(parts.at[p])[i]); };
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads * kElements;
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kElements; i < elements; i += stride) {
    if (i + kElements <= elements) {
      float total[kElements], next[kElements];
      load_part(total, 0, i);
      for (int p = 1; p < count; ++p) {
        load_part(next, p, i);
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          total[e] += next[e];
        }
      }
#pragma unroll
      for (int half = 0; half < kElements; half += 4) {
        const float four[4] = {total[half], total[half + 1], total[half + 2], total[half + 3]};
        store(sum + i + half, four);
      }
    } else {
      for (int64_t e = i; e < elements; ++e) {
        float total = 0;
        for (int p = 0; p < count; ++p) {
          total = p == 0 ? one(p, e) : total + one(p, e);
        }
        sum[e] = total;
      }
    }
  }
}

}  // namespace

const char* sum_parts(const SumParts& a, void* stream) {
  if (a.elements == 0) {
    return nullptr;
  }
  if (a.count < 1 || a.count > kSumPartsMost || !is_aligned(a.sum)) {
    return "a sum of 1 to 16 parts at multiples of 16 bytes";
  }
  Parts parts{};
  for (int p = 0; p < a.count; ++p) {
    parts.at[p] = a.parts[p];
    if (!is_aligned(a.parts[p])) {
      return "a sum of 1 to 16 parts at multiples of 16 bytes";
    }
  }
  const int64_t wanted = (a.elements + kThreads * kElements - 1) / (kThreads * kElements);
  const auto blocks = static_cast<unsigned>(wanted < kBlocksMost ? wanted : kBlocksMost);
  const auto on = static_cast<cudaStream_t>(stream);
  if (a.is_bfloat16) {
    sum_parts_kernel<bf16><<<blocks, kThreads, 0, on>>>(a.sum, parts, a.count, a.float_part, a.elements);
  } else {
    sum_parts_kernel<float><<<blocks, kThreads, 0, on>>>(a.sum, parts, a.count, a.float_part, a.elements);
  }
  return last_error();
}

}  // namespace sf::cuda
