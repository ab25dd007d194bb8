// RMS norm of each head and rotation of pairs (i, i + f). A block takes a row, a warp some of its heads; a lane holds elements 2 * lane + {0, 1} of every
// 64, so that a warp reads 128 neighbouring bytes at a time and angles stay in registers over the heads of a row.
#include "core/kernels/cuda/device.cuh"

namespace sf::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kPairs = 2;   // of 64 elements: f up to 128
constexpr int kRest = 4;    // of 64 elements: what is not rotated, up to 256

// One head in a lane's registers. Element k of `first` and `second` are the two sides of a rotated pair.
struct Head {
  float first[kPairs][2], second[kPairs][2], rest[kRest][2];
};

template <class T>
struct Lane {
  int lane, f, e;

  template <class Body>
  __device__ void each(Head& head, Body&& body) const {
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      const int i = 64 * k + 2 * lane;
      if (i < f) {
        body(i, head.first[k]);
        body(f + i, head.second[k]);
      }
    }
    if (2 * f < e) {
#pragma unroll
      for (int k = 0; k < kRest; ++k) {
        const int i = 2 * f + 64 * k + 2 * lane;
        if (i < e) {
          body(i, head.rest[k]);
        }
      }
    }
  }
  __device__ void read(Head& head, const T* from) const {
    each(head, [&](int i, float (&pair)[2]) { load(pair, from + i); });
  }
  __device__ void write(T* to, Head& head) const {
    each(head, [&](int i, float (&pair)[2]) { store(to + i, pair); });
  }
};

struct Angles {
  float cos[kPairs][2], sin[kPairs][2];

  __device__ void read(const HeadNormRope& a, int64_t row, int lane) {
    const int64_t from = row % a.angle_rows * a.f;
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      const int i = 64 * k + 2 * lane;
      if (i < a.f) {
        load(cos[k], a.cos_rf + from + i);
        load(sin[k], a.sin_rf + from + i);
      }
    }
  }
  // Turns by the angles, or back.
  template <bool kBack>
  __device__ void turn(Head& head, int lane, int f) const {
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      if (64 * k + 2 * lane < f) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float x = head.first[k][i], y = head.second[k][i], c = cos[k][i], s = kBack ? -sin[k][i] : sin[k][i];
          head.first[k][i] = x * c - y * s;
          head.second[k][i] = y * c + x * s;
        }
      }
    }
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads) forward_kernel(HeadNormRope a) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int f = static_cast<int>(a.f), e = static_cast<int>(a.e);
  const Lane<T> on{lane, f, e};
  const int64_t row = blockIdx.x;
  Angles angles;
  angles.read(a, row, lane);
  const T* weight_e = static_cast<const T*>(a.weight_e);
  Head weight;
  if (weight_e != nullptr) {
    on.read(weight, weight_e);
  }
  for (int64_t head = warp; head < a.heads; head += kWarps) {
    const int64_t place = row * a.heads + head;
    Head x;
    on.read(x, static_cast<const T*>(a.x_rne) + place * e);
    if (weight_e != nullptr) {
      float squares = 0;
      on.each(x, [&](int, float (&pair)[2]) { squares += pair[0] * pair[0] + pair[1] * pair[1]; });
      const float inverse = rsqrtf(warp_sum(squares) / static_cast<float>(e) + static_cast<float>(a.eps));
      if (lane == 0) {
        a.inverse_rn[place] = inverse;
      }
#pragma unroll
      for (int k = 0; k < kPairs; ++k) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          x.first[k][i] *= inverse * weight.first[k][i];
          x.second[k][i] *= inverse * weight.second[k][i];
        }
      }
#pragma unroll
      for (int k = 0; k < kRest; ++k) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          x.rest[k][i] *= inverse * weight.rest[k][i];
        }
      }
    }
    angles.turn<false>(x, lane, f);
    on.write(static_cast<T*>(a.y_rne) + place * e, x);
  }
}

__device__ inline void add_unit(float (&sum)[2], const float (&g)[2], const float (&x)[2], float inverse) {
  sum[0] += g[0] * x[0] * inverse;
  sum[1] += g[1] * x[1] * inverse;
}

template <class T>
__global__ void __launch_bounds__(kThreads) backward_kernel(HeadNormRope a) {
  __shared__ float sums[kWarps][256];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int f = static_cast<int>(a.f), e = static_cast<int>(a.e);
  const Lane<T> on{lane, f, e};
  const T* weight_e = static_cast<const T*>(a.weight_e);
  Head weight, total;
  if (weight_e != nullptr) {
    on.read(weight, weight_e);
  }
  on.each(total, [](int, float (&pair)[2]) { pair[0] = pair[1] = 0; });
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    Angles angles;
    angles.read(a, row, lane);
    for (int64_t head = warp; head < a.heads; head += kWarps) {
      const int64_t place = row * a.heads + head;
      Head g;
      on.read(g, static_cast<const T*>(a.grad_y_rne) + place * e);
      angles.turn<true>(g, lane, f);
      if (weight_e != nullptr) {
        Head x;
        on.read(x, static_cast<const T*>(a.x_rne) + place * e);
        const float inverse = a.inverse_rn[place];
        float along = 0;
        const auto first = [&](float (&sum)[2], float (&gradient)[2], const float (&value)[2], const float (&w)[2]) {
          add_unit(sum, gradient, value, inverse);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            gradient[i] *= w[i];
            along += gradient[i] * value[i] * inverse;
          }
        };
#pragma unroll
        for (int k = 0; k < kPairs; ++k) {
          if (64 * k + 2 * lane < f) {
            first(total.first[k], g.first[k], x.first[k], weight.first[k]);
            first(total.second[k], g.second[k], x.second[k], weight.second[k]);
          }
        }
#pragma unroll
        for (int k = 0; k < kRest; ++k) {
          if (2 * f + 64 * k + 2 * lane < e) {
            first(total.rest[k], g.rest[k], x.rest[k], weight.rest[k]);
          }
        }
        along = warp_sum(along) / static_cast<float>(e);
        const auto second = [&](float (&gradient)[2], const float (&value)[2]) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            gradient[i] = (gradient[i] - value[i] * inverse * along) * inverse;
          }
        };
#pragma unroll
        for (int k = 0; k < kPairs; ++k) {
          second(g.first[k], x.first[k]);
          second(g.second[k], x.second[k]);
        }
#pragma unroll
        for (int k = 0; k < kRest; ++k) {
          second(g.rest[k], x.rest[k]);
        }
      }
      on.write(static_cast<T*>(a.grad_x_rne) + place * e, g);
    }
  }
  if (a.grad_weight_e == nullptr) {
    return;
  }
  on.each(total, [&](int i, float (&pair)[2]) {
    sums[warp][i] = pair[0];
    sums[warp][i + 1] = pair[1];
  });
  __syncthreads();
  for (int i = threadIdx.x; i < e; i += kThreads) {
    float sum = 0;
    for (int w = 0; w < kWarps; ++w) {
      sum += sums[w][i];
    }
    a.partial_pe[static_cast<int64_t>(blockIdx.x) * e + i] = sum;
  }
}

}  // namespace

Error head_norm_rope_forward(const HeadNormRope& a, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  if (a.type == Type::bfloat16) {
    forward_kernel<bf16><<<static_cast<unsigned>(a.rows), kThreads, 0, on>>>(a);
  } else {
    forward_kernel<float><<<static_cast<unsigned>(a.rows), kThreads, 0, on>>>(a);
  }
  return last_error();
}

Error head_norm_rope_backward(const HeadNormRope& a, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  const int64_t grid = head_norm_partials(a.rows);
  if (a.type == Type::bfloat16) {
    backward_kernel<bf16><<<static_cast<unsigned>(grid), kThreads, 0, on>>>(a);
  } else {
    backward_kernel<float><<<static_cast<unsigned>(grid), kThreads, 0, on>>>(a);
  }
  if (Error error = last_error()) {
    return error;
  }
  return a.grad_weight_e == nullptr ? nullptr : sum_partials(a.type, a.partial_pe, grid, a.e, a.grad_weight_e, on);
}

}  // namespace sf::cuda
