// core/kernels/cuda/device.cuh: what every kernel uses: vectors of 16 bytes, sums over a warp or block, launch errors.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "core/kernels/cuda/launchers.hpp"

namespace sf::cuda {

using bf16 = __nv_bfloat16;

inline Error last_error() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// Dynamic shared memory for a kernel that has at most 16 KiB beside it: both together are 48 KiB without asking.
template <class Kernel>
Error allow_shared(Kernel kernel, size_t bytes) {
  if (bytes <= 32 * 1024) {
    return nullptr;
  }
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

inline bool is_aligned(const void* pointer) { return (reinterpret_cast<uintptr_t>(pointer) & 15u) == 0; }

template <class... Pointers>
bool are_aligned(Pointers... pointers) {
  return (is_aligned(pointers) && ...);
}

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16 x) { return __bfloat162float(x); }
template <class T>
__device__ T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) { return x; }
template <>
__device__ inline bf16 from_float<bf16>(float x) { return __float2bfloat16_rn(x); }

// N neighbouring elements, moved as one access of N * sizeof(T) bytes (16, or one element).
template <class T, int N>
struct alignas(sizeof(T) * N) Vector {
  T at[N];
};

template <class T, int N>
__device__ inline void load(float (&out)[N], const T* from) {
  const Vector<T, N> v = *reinterpret_cast<const Vector<T, N>*>(from);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    out[i] = to_float(v.at[i]);
  }
}

template <class T, int N>
__device__ inline void store(T* to, const float (&in)[N]) {
  Vector<T, N> v;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    v.at[i] = from_float<T>(in[i]);
  }
  *reinterpret_cast<Vector<T, N>*>(to) = v;
}

#ifdef __CUDACC__  // tests/kernels/fibers.hpp has its own
// Of the device that this process uses, asked for once.
template <cudaDeviceAttr Attribute>
int device_attribute() {
  static const int value = [] {
    int device = 0, found = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&found, Attribute, device);
    return found;
  }();
  return value;
}
inline bool clusters_are_there() { return device_attribute<cudaDevAttrComputeCapabilityMajor>() >= 9; }
inline int processor_count() { return device_attribute<cudaDevAttrMultiProcessorCount>(); }

inline int shared_most() { return device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>(); }  // bytes that a block can have

// A kernel that is brought in while the one before it ends, where the device can: it calls wait_for_before() before it touches memory. `cluster` blocks of x make a cluster, `bytes` are
// dynamic shared memory.
template <class... Parameters, class... Arguments>
Error launch_early_with_shared(void (*kernel)(Parameters...), dim3 grid, dim3 block, unsigned cluster, size_t bytes, cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {cluster, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = !clusters_are_there() ? 0 : cluster > 1 ? 2 : 1;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
template <class Kernel, class... Arguments>
Error launch_early(Kernel kernel, dim3 grid, dim3 block, unsigned cluster, cudaStream_t stream, const Arguments&... arguments) {
  return launch_early_with_shared(kernel, grid, block, cluster, 0, stream, arguments...);
}
// Lets the next kernel of launch_early() come in now; it waits there. All blocks have to call this or end.
__device__ inline void let_next_come() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ inline void wait_for_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
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
#endif

template <int Width = 32>
__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int step = Width / 2; step > 0; step /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, step);
  }
  return x;
}

// The sum over the block, in every thread. `scratch` holds 32 floats; may be called again at once.
__device__ inline float block_sum(float x, float* scratch) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = (blockDim.x + 31) / 32;
  x = warp_sum(x);
  __syncthreads();
  if (lane == 0) {
    scratch[warp] = x;
  }
  __syncthreads();
  return warp_sum(lane < warps ? scratch[lane] : 0.0f);
}

// Bits of |x|: they order as magnitudes do, NaN above infinity.
__device__ inline uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// Raises *amax, which is not negative, to the number of these bits. The result does not depend on the order of calls; most of them end at the look.
__device__ inline void raise_amax(uint32_t bits, float* amax) {
  auto* to = reinterpret_cast<unsigned*>(amax);
  if (bits > *static_cast<volatile unsigned*>(to)) {
    atomicMax(to, bits);
  }
}

// Raises *amax to the largest that a warp's lanes bring. All lanes come here.
__device__ inline void warp_amax(uint32_t bits, float* amax) {
  bits = __reduce_max_sync(0xffffffffu, bits);
  if (threadIdx.x % 32 == 0 && bits != 0) {
    raise_amax(bits, amax);
  }
}

// The same for magnitudes of sums in float32 that are stored as T: rounding keeps their order. Null: nothing.
template <class T>
__device__ inline void warp_amax_of(uint32_t bits, float* amax) {
  if (amax != nullptr) {
    warp_amax(magnitude(to_float(from_float<T>(__uint_as_float(bits)))), amax);
  }
}

// As warp_amax_of for a whole block, one attempt: `before` is what *amax held when the block began, read so early that nobody waits for it. All threads come here.
__device__ inline uint32_t amax_before(const float* amax) { return amax == nullptr ? 0 : *reinterpret_cast<const volatile uint32_t*>(amax); }

template <class T>
__device__ inline void block_amax_of(uint32_t bits, uint32_t before, float* amax) {
  __shared__ uint32_t of_warps[32];
  if (amax == nullptr) {
    return;  // for all threads alike
  }
  bits = __reduce_max_sync(0xffffffffu, bits);
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = (blockDim.x + 31) / 32;
  if (lane == 0) {
    of_warps[warp] = bits;
  }
  __syncthreads();
  if (warp == 0) {
    bits = magnitude(to_float(from_float<T>(__uint_as_float(__reduce_max_sync(0xffffffffu, lane < warps ? of_warps[lane] : 0)))));
    if (lane == 0 && bits > before) {
      atomicMax(reinterpret_cast<unsigned*>(amax), bits);
    }
  }
  __syncthreads();  // the next call may come at once
}

template <int N>
__device__ inline void note(uint32_t& most, const float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    most = max(most, magnitude(x[i]));
  }
}

/// out[c] = sum over p of partial[p, c], rounded once. Defined in row_norm.cu.
Error sum_partials(Type type, const float* partial_pc, int64_t p, int64_t c, void* out_c, cudaStream_t stream);

}  // namespace sf::cuda
