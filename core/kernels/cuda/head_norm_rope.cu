// RMS norm of each head and rotation of pairs (i, i + f). A block takes a row, a warp some of its heads; a lane holds elements 2 * lane + {0, 1} of every
// 64, so that a warp reads 128 neighbouring bytes at a time and angles stay in registers over the heads of a row.
#include "core/kernels/cuda/device.cuh"

namespace sf::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kHeads = 4;   // of a warp in flight together

// One head in a lane's registers. Element k of `first` and `second` are the two sides of a rotated pair. Two sizes are built: pairs in 64 elements and nothing else (f up
// to 64, e = 2 f), and pairs in 128 with up to 256 elements that are not rotated.
template <int kPairs, int kRest>
struct Head {
  float first[kPairs][2], second[kPairs][2], rest[kRest > 0 ? kRest : 1][2];
};

template <class T, int kPairs, int kRest>
struct Lane {
  int lane, f, e;

  template <class Body>
  __device__ void each(Head<kPairs, kRest>& head, Body&& body) const {
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      const int i = 64 * k + 2 * lane;
      if (i < f) {
        body(i, head.first[k]);
        body(f + i, head.second[k]);
      }
    }
    if (kRest > 0 && 2 * f < e) {
#pragma unroll
      for (int k = 0; k < kRest; ++k) {
        const int i = 2 * f + 64 * k + 2 * lane;
        if (i < e) {
          body(i, head.rest[k]);
        }
      }
    }
  }
  __device__ void read(Head<kPairs, kRest>& head, const T* from) const {
    each(head, [&](int i, float (&pair)[2]) { load(pair, from + i); });
  }
  __device__ void write(T* to, Head<kPairs, kRest>& head) const {
    each(head, [&](int i, float (&pair)[2]) { store(to + i, pair); });
  }
};

template <int kPairs>
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
  template <bool kBack, int kRest>
  __device__ void turn(Head<kPairs, kRest>& head, int lane, int f) const {
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

template <class T, int kPairs, int kRest>
__global__ void __launch_bounds__(kThreads) forward_kernel(HeadNormRope a) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int f = static_cast<int>(a.f), e = static_cast<int>(a.e);
  const Lane<T, kPairs, kRest> on{lane, f, e};
  const int64_t row = blockIdx.x;
  Angles<kPairs> angles;
  angles.read(a, row, lane);
  const T* weight_e = static_cast<const T*>(a.weight_e);
  Head<kPairs, kRest> weight;
  if (weight_e != nullptr) {
    on.read(weight, weight_e);
  }
  for (int64_t first = warp; first < a.heads; first += kWarps * kHeads) {
    Head<kPairs, kRest> heads[kHeads];
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      if (first + i * kWarps < a.heads) {
        on.read(heads[i], static_cast<const T*>(a.x_rne) + (row * a.heads + first + i * kWarps) * e);
      }
    }
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      if (first + i * kWarps >= a.heads) {
        break;
      }
      const int64_t place = row * a.heads + first + i * kWarps;
      Head<kPairs, kRest>& x = heads[i];
      if (weight_e != nullptr) {
        float squares = 0;
        on.each(x, [&](int, float (&pair)[2]) { squares += pair[0] * pair[0] + pair[1] * pair[1]; });
        const float inverse = rsqrtf(warp_sum(squares) / static_cast<float>(e) + static_cast<float>(a.eps));
        if (lane == 0) {
          a.inverse_rn[place] = inverse;
        }
        const auto scale = [&](float (&value)[2], const float (&w)[2]) {
          value[0] *= inverse * w[0];
          value[1] *= inverse * w[1];
        };
#pragma unroll
        for (int k = 0; k < kPairs; ++k) {
          scale(x.first[k], weight.first[k]);
          scale(x.second[k], weight.second[k]);
        }
#pragma unroll
        for (int k = 0; k < kRest; ++k) {
          scale(x.rest[k], weight.rest[k]);
        }
      }
      angles.template turn<false>(x, lane, f);
      on.write(static_cast<T*>(a.y_rne) + place * e, x);
    }
  }
}

__device__ inline void add_unit(float (&sum)[2], const float (&g)[2], const float (&x)[2], float inverse) {
  sum[0] += g[0] * x[0] * inverse;
  sum[1] += g[1] * x[1] * inverse;
}

// What a block adds to the weight's gradient, from what its parts found. All threads come here.
template <int kParts, int kStride>
__device__ inline void write_partial(const HeadNormRope& a, const float (&sums)[kParts][kStride], int e) {
  __syncthreads();
  for (int i = threadIdx.x; i < e; i += kThreads) {
    float sum = 0;
    for (int part = 0; part < kParts; ++part) {
      sum += sums[part][i];
    }
    a.partial_pe[static_cast<int64_t>(blockIdx.x) * e + i] = sum;
  }
}

template <class T, int kPairs, int kRest>
__global__ void __launch_bounds__(kThreads) backward_kernel(HeadNormRope a) {
  __shared__ float sums[kWarps][256];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int f = static_cast<int>(a.f), e = static_cast<int>(a.e);
  const Lane<T, kPairs, kRest> on{lane, f, e};
  constexpr int kAtOnce = kHeads / 2;
  const T* weight_e = static_cast<const T*>(a.weight_e);
  Head<kPairs, kRest> weight, total;
  if (weight_e != nullptr) {
    on.read(weight, weight_e);
  }
  on.each(total, [](int, float (&pair)[2]) { pair[0] = pair[1] = 0; });
  uint32_t most = 0;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    Angles<kPairs> angles;
    angles.read(a, row, lane);
    for (int64_t begin = warp; begin < a.heads; begin += kWarps * kAtOnce) {
      Head<kPairs, kRest> gradients[kAtOnce], values[kAtOnce];
      float inverses[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int64_t place = row * a.heads + begin + i * kWarps;
        if (begin + i * kWarps < a.heads) {
          on.read(gradients[i], static_cast<const T*>(a.grad_y_rne) + place * e);
          if (weight_e != nullptr) {
            on.read(values[i], static_cast<const T*>(a.x_rne) + place * e);
            inverses[i] = a.inverse_rn[place];
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (begin + i * kWarps >= a.heads) {
          break;
        }
        const int64_t place = row * a.heads + begin + i * kWarps;
        Head<kPairs, kRest>&g = gradients[i], &x = values[i];
        angles.template turn<true>(g, lane, f);
        if (weight_e != nullptr) {
          const float inverse = inverses[i];
          float along = 0;
          const auto first = [&](float (&sum)[2], float (&gradient)[2], const float (&value)[2], const float (&w)[2]) {
            add_unit(sum, gradient, value, inverse);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
              gradient[n] *= w[n];
              along += gradient[n] * value[n] * inverse;
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
            for (int n = 0; n < 2; ++n) {
              gradient[n] = (gradient[n] - value[n] * inverse * along) * inverse;
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
        if (a.amax != nullptr) {
          on.each(g, [&](int, float (&pair)[2]) { note(most, pair); });
        }
      }
    }
  }
  warp_amax_of<T>(most, a.amax);
  if (a.grad_weight_e == nullptr) {
    return;
  }
  on.each(total, [&](int i, float (&pair)[2]) {
    sums[warp][i] = pair[0];
    sums[warp][i + 1] = pair[1];
  });
  write_partial(a, sums, e);
}

// The same where a head is two sides of pairs and nothing else: kLanes lanes take a head, eight pairs each, by accesses of 16 bytes, and a warp takes 32 / kLanes heads. Groups of
// lanes walk over all heads of all rows; the next head is on its way while one is turned.
template <class T, int kLanes, bool kBackward>
__global__ void __launch_bounds__(kThreads, kBackward ? 2 : 3) pairs_kernel(HeadNormRope a) {
  constexpr int f = 8 * kLanes, e = 2 * f, kGroups = kThreads / kLanes;
  using Numbers = Vector<T, 8>;
  struct Sides {
    Numbers first, second;
  };
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  const auto read = [&](const void* from, int64_t place) {
    const T* const at = static_cast<const T*>(from) + place * e + lane * 8;
    return Sides{*reinterpret_cast<const Numbers*>(at), *reinterpret_cast<const Numbers*>(at + f)};
  };
  const bool norms = a.weight_e != nullptr, reads_x = norms || !kBackward;
  const auto weight = norms ? read(a.weight_e, 0) : Sides{};
  const int64_t count = a.rows * a.heads, step = static_cast<int64_t>(gridDim.x) * kGroups, start = static_cast<int64_t>(blockIdx.x) * kGroups + group;
  Sides next_x{}, next_g{};
  float next_inverse = 0, total[2][8] = {};
  const auto fetch = [&](int64_t place) {
    if (place < count) {
      if (reads_x) {
        next_x = read(a.x_rne, place);
      }
      if (kBackward) {
        next_g = read(a.grad_y_rne, place);
        next_inverse = norms ? a.inverse_rn[place] : 0.0f;
      }
    }
  };
  fetch(start);
  uint32_t most = 0;
  for (int64_t place = start, begin = start - group; begin < count; place += step, begin += step) {  // lanes of a warp stay together for their sums
    const bool inside = place < count;
    const Sides x = next_x, g = next_g;
    const float known_inverse = next_inverse;
    fetch(place + step);
    float cos[8], sin[8], first[8], second[8];
    {
      const int64_t from = (inside ? place / a.heads % a.angle_rows : 0) * f + lane * 8;
      float part[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        load(part, a.cos_rf + from + half * 4);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          cos[half * 4 + i] = part[i];
        }
        load(part, a.sin_rf + from + half * 4);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sin[half * 4 + i] = part[i];
        }
      }
    }
    if constexpr (!kBackward) {
      float inverse = 1;
      if (norms) {
        float squares = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float u = to_float(x.first.at[i]), v = to_float(x.second.at[i]);
          squares += u * u + v * v;
        }
        inverse = rsqrtf(warp_sum<kLanes>(squares) / static_cast<float>(e) + static_cast<float>(a.eps));
        if (inside && lane == 0) {
          a.inverse_rn[place] = inverse;
        }
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float u = to_float(x.first.at[i]) * (norms ? inverse * to_float(weight.first.at[i]) : 1.0f);
        const float v = to_float(x.second.at[i]) * (norms ? inverse * to_float(weight.second.at[i]) : 1.0f);
        first[i] = u * cos[i] - v * sin[i];
        second[i] = v * cos[i] + u * sin[i];
      }
    } else {
      float along = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float u = to_float(g.first.at[i]), v = to_float(g.second.at[i]);
        first[i] = u * cos[i] + v * sin[i];
        second[i] = v * cos[i] - u * sin[i];
        if (norms) {
          const float unit = to_float(x.first.at[i]) * known_inverse, other = to_float(x.second.at[i]) * known_inverse;
          total[0][i] += inside ? first[i] * unit : 0.0f;
          total[1][i] += inside ? second[i] * other : 0.0f;
          first[i] *= to_float(weight.first.at[i]);
          second[i] *= to_float(weight.second.at[i]);
          along += first[i] * unit + second[i] * other;
        }
      }
      if (norms) {
        along = warp_sum<kLanes>(along) / static_cast<float>(e);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          first[i] = (first[i] - to_float(x.first.at[i]) * known_inverse * along) * known_inverse;
          second[i] = (second[i] - to_float(x.second.at[i]) * known_inverse * along) * known_inverse;
        }
      }
    }
    if (inside) {
      T* const to = static_cast<T*>(kBackward ? a.grad_x_rne : a.y_rne) + place * e + lane * 8;
      store(to, first);
      store(to + f, second);
      if (kBackward && a.amax != nullptr) {
        note(most, first);
        note(most, second);
      }
    }
  }
  if constexpr (kBackward) {
    warp_amax_of<T>(most, a.amax);
    if (a.grad_weight_e == nullptr) {
      return;
    }
    __shared__ float sums[kGroups][e + 1];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      sums[group][lane * 8 + i] = total[0][i];
      sums[group][f + lane * 8 + i] = total[1][i];
    }
    write_partial(a, sums, e);
  }
}

// float32 has pieces of 32 bytes there; it goes the general way.
template <class T>
auto pairs_kernel_for(const HeadNormRope& a, bool backward) -> void (*)(HeadNormRope) {
  if constexpr (sizeof(T) == 2) {
    const bool aligned = backward ? are_aligned(a.x_rne, a.weight_e, a.cos_rf, a.sin_rf, a.grad_y_rne, a.grad_x_rne)
                                  : are_aligned(a.x_rne, a.weight_e, a.cos_rf, a.sin_rf, a.y_rne);
    if (aligned && a.e == 2 * a.f && (a.f == 64 || a.f == 32)) {
      if (a.f == 64) {
        return backward ? pairs_kernel<T, 8, true> : pairs_kernel<T, 8, false>;
      }
      return backward ? pairs_kernel<T, 4, true> : pairs_kernel<T, 4, false>;
    }
  }
  return nullptr;
}

constexpr int64_t kForwardBlocks = 396;

bool is_small(const HeadNormRope& a) { return a.f <= 64 && a.e == 2 * a.f; }

template <class T>
Error forward(const HeadNormRope& a, cudaStream_t stream) {
  const auto grid = static_cast<unsigned>(a.rows);
  if (const auto kernel = pairs_kernel_for<T>(a, false)) {
    kernel<<<grid < kForwardBlocks ? grid : static_cast<unsigned>(kForwardBlocks), kThreads, 0, stream>>>(a);
  } else if (is_small(a)) {
    forward_kernel<T, 1, 0><<<grid, kThreads, 0, stream>>>(a);
  } else {
    forward_kernel<T, 2, 4><<<grid, kThreads, 0, stream>>>(a);
  }
  return last_error();
}

template <class T>
Error backward(const HeadNormRope& a, cudaStream_t stream) {
  const auto grid = static_cast<unsigned>(head_norm_partials(a.rows));
  if (const auto kernel = pairs_kernel_for<T>(a, true)) {
    kernel<<<grid, kThreads, 0, stream>>>(a);
  } else if (is_small(a)) {
    backward_kernel<T, 1, 0><<<grid, kThreads, 0, stream>>>(a);
  } else {
    backward_kernel<T, 2, 4><<<grid, kThreads, 0, stream>>>(a);
  }
  if (Error error = last_error()) {
    return error;
  }
  return a.grad_weight_e == nullptr ? nullptr : sum_partials(a.type, a.partial_pe, grid, a.e, a.grad_weight_e, stream);
}

}  // namespace

Error head_norm_rope_forward(const HeadNormRope& a, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  return a.type == Type::bfloat16 ? forward<bf16>(a, on) : forward<float>(a, on);
}

Error head_norm_rope_backward(const HeadNormRope& a, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  return a.type == Type::bfloat16 ? backward<bf16>(a, on) : backward<float>(a, on);
}

}  // namespace sf::cuda
