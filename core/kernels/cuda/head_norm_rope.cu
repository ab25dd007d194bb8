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

// The same where a head is two sides of pairs and nothing else: kLanes lanes take a head, eight pairs each, by accesses of 16 bytes, and a warp takes kSlots = 32 / kLanes heads of a
// row in a step. Each warp walks over its own run of steps, rows in order, so that a row's angles are read once by most; the next steps are on their way into shared memory meanwhile.
template <class T, int kLanes, bool kBackward>
struct PairsShared {
  static constexpr int kStages = 4, kSlots = 32 / kLanes, f = 8 * kLanes;

  struct Stage {
    Vector<T, 8> pieces[kBackward ? 2 : 1][2][32];
    float angles[2][f];       // of the row that begins with this step
    float inverses[kSlots];
  };
  Stage stages[kWarps][kStages];
};

template <class T, int kLanes, bool kBackward>
__global__ void __launch_bounds__(kThreads, kBackward ? 2 : 3) pairs_kernel(HeadNormRope a) {
  using Shared = PairsShared<T, kLanes, kBackward>;
  constexpr int f = Shared::f, e = 2 * f, kSlots = Shared::kSlots, kStages = Shared::kStages, kGroups = kThreads / kLanes;
  extern __shared__ float memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = lane % kLanes, slot = lane / kLanes;
  auto& stages = reinterpret_cast<Shared*>(memory)->stages[warp];
  const bool norms = a.weight_e != nullptr, reads_x = norms || !kBackward;
  const int heads = static_cast<int>(a.heads), steps = (heads + kSlots - 1) / kSlots, angle_rows = static_cast<int>(a.angle_rows);
  const int64_t all = a.rows * steps, warps = static_cast<int64_t>(gridDim.x) * kWarps, mine = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
  const int64_t begin = all * mine / warps, end = all * (mine + 1) / warps;

  struct Place {
    int64_t row;
    int step, angle_row;

    __device__ void go_on(int of_row, int rows_of_angles) {
      if (++step == of_row) {
        step = 0;
        ++row;
        angle_row = angle_row + 1 == rows_of_angles ? 0 : angle_row + 1;
      }
    }
  };
  Place here{begin / steps, static_cast<int>(begin % steps), static_cast<int>(begin / steps % angle_rows)}, coming = here;
  const auto fetch = [&](int64_t i, int stage) {
    if (i < end) {
      auto& to = stages[stage];
      const int head = coming.step * kSlots + slot;
      const int64_t place = coming.row * heads + head, from = place * e + part * 8;
      if (head < heads) {
        if (reads_x) {
          copy_async<16>(shared_address(&to.pieces[0][0][lane]), static_cast<const T*>(a.x_rne) + from, true);
          copy_async<16>(shared_address(&to.pieces[0][1][lane]), static_cast<const T*>(a.x_rne) + from + f, true);
        }
        if constexpr (kBackward) {
          copy_async<16>(shared_address(&to.pieces[1][0][lane]), static_cast<const T*>(a.grad_y_rne) + from, true);
          copy_async<16>(shared_address(&to.pieces[1][1][lane]), static_cast<const T*>(a.grad_y_rne) + from + f, true);
          if (norms && part == 0) {
            copy_async<4>(shared_address(&to.inverses[slot]), a.inverse_rn + place, true);
          }
        }
      }
      if ((coming.step == 0 || i == begin) && lane < f / 2) {
        const int side = lane / (f / 4), column = lane % (f / 4) * 4;
        copy_async<16>(shared_address(&to.angles[side][column]), (side == 0 ? a.cos_rf : a.sin_rf) + static_cast<int64_t>(coming.angle_row) * f + column, true);
      }
      coming.go_on(steps, angle_rows);
    }
    copies_commit();
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    fetch(begin + i, i);
  }
  Vector<T, 8> weight[2] = {};
  if (norms) {
    weight[0] = *reinterpret_cast<const Vector<T, 8>*>(static_cast<const T*>(a.weight_e) + part * 8);
    weight[1] = *reinterpret_cast<const Vector<T, 8>*>(static_cast<const T*>(a.weight_e) + f + part * 8);
  }
  float cos[8], sin[8], total[2][8] = {};
  uint32_t most = 0;
  int stage = 0;
  for (int64_t i = begin; i < end; ++i) {
    __syncwarp();  // all have read what the next copies overwrite
    fetch(i + kStages - 1, stage == 0 ? kStages - 1 : stage - 1);
    copies_wait<kStages - 1>();
    __syncwarp();
    auto& from = stages[stage];
    if (here.step == 0 || i == begin) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        cos[n] = from.angles[0][part * 8 + n];
        sin[n] = from.angles[1][part * 8 + n];
      }
    }
    const int head = here.step * kSlots + slot;
    const bool inside = head < heads;
    const int64_t place = here.row * heads + head;
    float first[8], second[8];
    if constexpr (!kBackward) {
      load(first, &from.pieces[0][0][lane].at[0]);
      load(second, &from.pieces[0][1][lane].at[0]);
      if (norms) {
        float squares = 0;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          squares += first[n] * first[n] + second[n] * second[n];
        }
        const float inverse = rsqrtf(warp_sum<kLanes>(squares) / static_cast<float>(e) + static_cast<float>(a.eps));
        if (inside && part == 0) {
          a.inverse_rn[place] = inverse;
        }
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          first[n] *= inverse * to_float(weight[0].at[n]);
          second[n] *= inverse * to_float(weight[1].at[n]);
        }
      }
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float u = first[n], v = second[n];
        first[n] = u * cos[n] - v * sin[n];
        second[n] = v * cos[n] + u * sin[n];
      }
    } else {
      load(first, &from.pieces[1][0][lane].at[0]);
      load(second, &from.pieces[1][1][lane].at[0]);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float u = first[n], v = second[n];
        first[n] = u * cos[n] + v * sin[n];
        second[n] = v * cos[n] - u * sin[n];
      }
      if (norms) {
        const float inverse = inside ? from.inverses[slot] : 0.0f;
        float x[2][8], along = 0;
        load(x[0], &from.pieces[0][0][lane].at[0]);
        load(x[1], &from.pieces[0][1][lane].at[0]);
        const auto scale = [&](float& gradient, float& sum, float value, T w) {
          gradient *= inverse;
          sum += gradient * value;
          gradient *= to_float(w);
          along += gradient * value;
        };
        if (inside) {  // elsewhere the pieces hold nothing
#pragma unroll
          for (int n = 0; n < 8; ++n) {
            scale(first[n], total[0][n], x[0][n], weight[0].at[n]);
            scale(second[n], total[1][n], x[1][n], weight[1].at[n]);
          }
        }
        const float back = warp_sum<kLanes>(along) / static_cast<float>(e) * inverse * inverse;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          first[n] -= x[0][n] * back;
          second[n] -= x[1][n] * back;
        }
      }
    }
    if (inside) {
      T* const to = static_cast<T*>(kBackward ? a.grad_x_rne : a.y_rne) + place * e + part * 8;
      store(to, first);
      store(to + f, second);
      if (kBackward && a.amax != nullptr) {
        note(most, first);
        note(most, second);
      }
    }
    here.go_on(steps, angle_rows);
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  copies_wait<0>();
  if constexpr (kBackward) {
    warp_amax_of<T>(most, a.amax);
    if (a.grad_weight_e == nullptr) {
      return;
    }
    __syncthreads();  // pieces are no longer wanted
    static_assert(sizeof(float[kGroups][e + 1]) <= sizeof(Shared));
    auto& sums = *reinterpret_cast<float(*)[kGroups][e + 1]>(memory);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      sums[warp * kSlots + slot][part * 8 + n] = total[0][n];
      sums[warp * kSlots + slot][f + part * 8 + n] = total[1][n];
    }
    write_partial(a, sums, e);
  }
}

// float32 has pieces of 32 bytes there; it goes the general way.
template <class T>
bool goes_by_pairs(const HeadNormRope& a, bool backward) {
  const bool aligned = backward ? are_aligned(a.x_rne, a.weight_e, a.cos_rf, a.sin_rf, a.grad_y_rne, a.grad_x_rne)
                                : are_aligned(a.x_rne, a.weight_e, a.cos_rf, a.sin_rf, a.y_rne);
  return sizeof(T) == 2 && aligned && a.e == 2 * a.f && (a.f == 64 || a.f == 32);
}

template <class T, int kLanes, bool kBackward>
Error run_pairs(const HeadNormRope& a, int64_t grid, cudaStream_t stream) {
  constexpr size_t bytes = sizeof(PairsShared<T, kLanes, kBackward>);
  if (Error error = allow_shared(pairs_kernel<T, kLanes, kBackward>, bytes)) {
    return error;
  }
  pairs_kernel<T, kLanes, kBackward><<<static_cast<unsigned>(grid), kThreads, bytes, stream>>>(a);
  return last_error();
}

constexpr int64_t kForwardBlocks = 396;

bool is_small(const HeadNormRope& a) { return a.f <= 64 && a.e == 2 * a.f; }

template <class T>
Error forward(const HeadNormRope& a, cudaStream_t stream) {
  const auto grid = static_cast<unsigned>(a.rows);
  if constexpr (sizeof(T) == 2) {
    if (goes_by_pairs<T>(a, false)) {
      const int64_t blocks = a.rows < kForwardBlocks ? a.rows : kForwardBlocks;
      return a.f == 64 ? run_pairs<T, 8, false>(a, blocks, stream) : run_pairs<T, 4, false>(a, blocks, stream);
    }
  }
  if (is_small(a)) {
    forward_kernel<T, 1, 0><<<grid, kThreads, 0, stream>>>(a);
  } else {
    forward_kernel<T, 2, 4><<<grid, kThreads, 0, stream>>>(a);
  }
  return last_error();
}

template <class T>
Error backward_rows(const HeadNormRope& a, int64_t grid, cudaStream_t stream) {
  if constexpr (sizeof(T) == 2) {
    if (goes_by_pairs<T>(a, true)) {
      return a.f == 64 ? run_pairs<T, 8, true>(a, grid, stream) : run_pairs<T, 4, true>(a, grid, stream);
    }
  }
  if (is_small(a)) {
    backward_kernel<T, 1, 0><<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(a);
  } else {
    backward_kernel<T, 2, 4><<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(a);
  }
  return last_error();
}

template <class T>
Error backward(const HeadNormRope& a, cudaStream_t stream) {
  const int64_t grid = head_norm_partials(a.rows);
  if (Error error = backward_rows<T>(a, grid, stream)) {
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
