// One decoding step beside its products and attention: how it begins, the gate of the MLP, how it ends.
#include "core/kernels/cuda/decode.cuh"

namespace sf::cuda {
namespace {

Error attention(const DecodeAttention& a, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  return a.type == Type::bfloat16 ? decode_attention_on_tensor_cores(a, on) : decode_attention_in_registers(a, on);
}

template <class T>
__global__ void __launch_bounds__(kThreads) gate_kernel(DecodeGate a) {
  constexpr int kAtOnce = 16 / sizeof(T);
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kAtOnce;
  if (at >= a.b * a.i) {
    return;
  }
  const int64_t row = at / a.i, column = at % a.i;  // i is a multiple of kAtOnce
  let_next_come();
  wait_for_before();
  const T* from = static_cast<const T*>(a.gate_up_b2i) + row * 2 * a.i + column;
  float gate[kAtOnce], up[kAtOnce];
  load(gate, from);
  load(up, from + a.i);
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k) {
    up[k] *= rounded<T>(gate[k] / (1.0f + __expf(-gate[k])));
  }
  store(static_cast<T*>(a.out_bi) + at, up);
}

Error gate(const DecodeGate& a, void* stream) {
  const int64_t per_block = kThreads * (a.type == Type::bfloat16 ? 8 : 4);
  const auto blocks = static_cast<unsigned>((a.b * a.i + per_block - 1) / per_block);
  const auto on = static_cast<cudaStream_t>(stream);
  return launch_early(a.type == Type::bfloat16 ? gate_kernel<bf16> : gate_kernel<float>, dim3(blocks), dim3(kThreads), 1, on, a);
}

template <class T>
__global__ void __launch_bounds__(kThreads) start_kernel(DecodeStart a) {
  let_next_come();
  wait_for_before();
  const int64_t row = blockIdx.x, id = a.ids_b[row];
  const auto position = static_cast<float>(a.positions_b[row]);
  for (int64_t i = threadIdx.x; i < a.f; i += kThreads) {
    const float angle = position * a.inverse_frequencies_f[i];
    a.cos_bf[row * a.f + i] = rounded<T>(cosf(angle) * a.scaling);
    a.sin_bf[row * a.f + i] = rounded<T>(sinf(angle) * a.scaling);
  }
  const T* from = static_cast<const T*>(a.embedding_vh) + id * a.h;
  T* to = static_cast<T*>(a.x_bh) + row * a.h;
  for (int64_t i = threadIdx.x; i < a.h; i += kThreads) {
    to[i] = from[i];
  }
}

Error start(const DecodeStart& a, void* stream) {
  return launch_early(a.type == Type::bfloat16 ? start_kernel<bf16> : start_kernel<float>, dim3(static_cast<unsigned>(a.b)), dim3(kThreads), 1, static_cast<cudaStream_t>(stream), a);
}

// A cluster of blocks shares a row.
struct Best {
  float value;
  uint32_t place;
  __device__ void meet(float other, uint32_t there) {
    if (other > value || (other == value && there < place)) {
      value = other;
      place = there;
    }
  }
};

template <class T, int N>
__global__ void __launch_bounds__(kThreads) choice_kernel(DecodeChoice a, int splits) {
  __shared__ float values[kWarps], places[kWarps], block_value, block_place;  // places as bits
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int rank = static_cast<int>(blockIdx.x) % splits;
  const int64_t row = blockIdx.x / splits;
  let_next_come();
  wait_for_before();
  const T* logits = static_cast<const T*>(a.logits_bv) + row * a.v;
  Best best{-INFINITY, 0xffffffffu};
#pragma unroll 4
  for (int64_t c = (static_cast<int64_t>(rank) * kThreads + threadIdx.x) * N; c < a.v; c += static_cast<int64_t>(splits) * kThreads * N) {
    float some[N];
    load(some, logits + c);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      best.meet(some[i], static_cast<uint32_t>(c + i));
    }
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, best.value, step);
    best.meet(other, __shfl_xor_sync(0xffffffffu, best.place, step));
  }
  if (lane == 0) {
    values[warp] = best.value;
    places[warp] = __uint_as_float(best.place);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kWarps; ++w) {
      best.meet(values[w], __float_as_uint(places[w]));
    }
    block_value = best.value;
    block_place = __uint_as_float(best.place);
  }
  if (splits > 1) {
    cluster_barrier();
    if (rank == 0 && threadIdx.x == 0) {
      for (int s = 1; s < splits; ++s) {
        best.meet(of_block(&block_value, s), __float_as_uint(of_block(&block_place, s)));
      }
    }
    cluster_barrier();
  }
  if (rank == 0 && threadIdx.x == 0) {
    const int64_t place = best.place == 0xffffffffu ? 0 : best.place;  // no number at all
    a.said_b[row] = place;
    a.ids_b[row] = place;
    ++a.positions_b[row];
  }
}

template <class T>
Error choose_of(const DecodeChoice& a, cudaStream_t stream) {
  constexpr int kAtOnce = 16 / sizeof(T);
  const int splits = clusters_are_there() ? 8 : 1;
  const bool aligned = a.v % kAtOnce == 0 && is_aligned(a.logits_bv);
  return launch_early(aligned ? choice_kernel<T, kAtOnce> : choice_kernel<T, 1>, dim3(static_cast<unsigned>(a.b * splits)), dim3(kThreads), static_cast<unsigned>(splits), stream, a, splits);
}

Error choose(const DecodeChoice& a, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  return a.type == Type::bfloat16 ? choose_of<bf16>(a, on) : choose_of<float>(a, on);
}

const DecodeLaunchers launchers = {.start = start, .choose = choose, .attention = attention, .gate = gate};

}  // namespace

const DecodeLaunchers* decode_launchers() { return &launchers; }

}  // namespace sf::cuda
