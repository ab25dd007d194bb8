// tests/kernels/fibers.hpp: runs the source of a CUDA kernel on the CPU. The threads of a block are fibers of one system thread that meet at __syncthreads and at a warp's shuffles.
// So that an order that only happens to be right is found, fibers run from the last to the first, and a cp.async copy happens as late as its wait allows.
//
// It stands before a kernel's source (sources_on_cpu.cmake) and gives it what nvcc would. What it shows: indices, bounds, formulas, who waits for which copy, that all threads
// come to a barrier. What it can't show: races between warps that real hardware would run at once, tensor cores, speed. Blocks run one after another.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <utility>
#include <vector>

namespace sf::test::fibers {

constexpr size_t kStack = size_t{1} << 16;

struct Barrier {
  int arrived = 0;
  uint64_t generation = 0;
};

struct Warp {
  Barrier barrier;
  int alive = 0;
  uint64_t slots[2][32] = {};  // of this meeting and the one before it, which some lanes may still read
};

struct Copy {
  void* to;
  const void* from;
  int bytes;
};

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  uint3 thread;
  bool is_done = false;
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
};

inline std::vector<Fiber> all;
inline std::vector<Warp> warps;
inline Barrier block_barrier;
inline int alive = 0, current = 0;
inline ucontext_t scheduler;
inline uint3 block_index;
inline dim3 block_size, grid_size;
inline std::vector<char> dynamic_memory;
inline std::function<void()> body;

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "kernel on the CPU: %s (block %u, %u, thread %d)\n", what, block_index.x, block_index.y, current);
  std::abort();
}

inline void yield() { swapcontext(&all[static_cast<size_t>(current)].context, &scheduler); }

// Until all fibers that have not returned are here; `expected` shrinks when one returns.
inline void meet(Barrier& barrier, const int& expected) {
  const uint64_t mine = barrier.generation;
  ++barrier.arrived;
  while (barrier.generation == mine) {
    if (barrier.arrived >= expected) {
      barrier.arrived = 0;
      ++barrier.generation;
      return;
    }
    yield();
  }
}

template <class T>
T from_lane(T value, int lane) {
  Warp& warp = warps[static_cast<size_t>(current / 32)];
  uint64_t(&slots)[32] = warp.slots[warp.barrier.generation & 1];
  static_assert(sizeof(T) <= sizeof(uint64_t));
  std::memcpy(&slots[current % 32], &value, sizeof(T));
  meet(warp.barrier, warp.alive);
  std::memcpy(&value, &slots[lane], sizeof(T));
  return value;
}

template <class T>
T shuffle_xor(T value, int step) {
  return from_lane(value, current % 32 ^ step);
}

inline uint32_t reduce_max(uint32_t value) {
  for (int step = 16; step > 0; step /= 2) {
    value = std::max(value, shuffle_xor(value, step));
  }
  return value;
}

inline bool any(bool value) { return reduce_max(value ? 1 : 0) != 0; }

inline void start() {
  body();
  Fiber& fiber = all[static_cast<size_t>(current)];
  if (!fiber.open.empty() || !fiber.groups.empty()) {
    fail("copies are on their way at the end");
  }
  fiber.is_done = true;
  --alive;
  --warps[static_cast<size_t>(current / 32)].alive;
  yield();
}

inline void run_block() {
  const size_t count = size_t{block_size.x} * block_size.y;
  all.resize(count);
  warps.assign((count + 31) / 32, {});
  block_barrier = {};
  alive = static_cast<int>(count);
  for (size_t i = 0; i < count; ++i) {
    Fiber& fiber = all[i];
    fiber.is_done = false;
    fiber.groups.clear();
    fiber.thread = {static_cast<unsigned>(i) % block_size.x, static_cast<unsigned>(i) / block_size.x, 0};
    fiber.stack.resize(kStack);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, start, 0);
    ++warps[i / 32].alive;
  }
  for (int64_t round = 0; alive > 0; ++round) {
    for (size_t i = count; i-- > 0;) {
      if (!all[i].is_done) {
        current = static_cast<int>(i);
        swapcontext(&scheduler, &all[i].context);
      }
    }
    if (round > 1000000) {
      fail("threads wait for each other");
    }
  }
}

/// launch(grid, block, bytes, stream)(call) for kernel<<<grid, block, bytes, stream>>>(arguments).
inline auto launch(dim3 grid, dim3 block, size_t bytes = 0, const void* = nullptr) {
  return [=](const std::function<void()>& call) {
    grid_size = grid;
    block_size = block;
    dynamic_memory.assign(bytes + 16, 0x5a);
    body = call;
    for (unsigned i = 0; i < grid.x * grid.y * grid.z; ++i) {
      block_index = {i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y};
      run_block();
    }
  };
}

inline uint32_t bits_of(float x) {
  uint32_t bits = 0;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
inline float float_of(uint32_t bits) {
  float x = 0;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
inline uint32_t choose_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t both = uint64_t{high} << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<uint32_t>(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  }
  return result;
}
inline int add(int* to, int value) { return std::exchange(*to, *to + value); }
inline unsigned raise(unsigned* to, unsigned value) { return std::exchange(*to, std::max(*to, value)); }

}  // namespace sf::test::fibers

// In place of those of device.cuh, which are assembly.
namespace sf::cuda {

template <class Kernel, class... Arguments>
const char* launch_early_with_shared(Kernel kernel, dim3 grid, dim3 block, unsigned, size_t bytes, const void*, const Arguments&... arguments) {
  test::fibers::launch(grid, block, bytes)([&] { kernel(arguments...); });
  return nullptr;
}
template <class Kernel, class... Arguments>
const char* launch_early(Kernel kernel, dim3 grid, dim3 block, unsigned cluster, const void* stream, const Arguments&... arguments) {
  return launch_early_with_shared(kernel, grid, block, cluster, 0, stream, arguments...);
}
inline void wait_for_before() {}
inline bool clusters_are_there() { return false; }
inline int processor_count() { return 1; }
inline int shared_most() { return 99 * 1024; }
inline void let_next_come() {}

inline unsigned char* shared_address(const void* pointer) { return static_cast<unsigned char*>(const_cast<void*>(pointer)); }
template <int Bytes>
void copy_async(unsigned char* to, const void* from, bool valid) {
  if (valid) {
    test::fibers::all[static_cast<size_t>(test::fibers::current)].open.push_back({to, from, Bytes});
  } else {
    std::memset(to, 0, Bytes);
  }
}
inline void copies_commit() {
  test::fibers::Fiber& fiber = test::fibers::all[static_cast<size_t>(test::fibers::current)];
  fiber.groups.push_back(std::exchange(fiber.open, {}));
}
template <int Left>
void copies_wait() {
  auto& groups = test::fibers::all[static_cast<size_t>(test::fibers::current)].groups;
  for (; groups.size() > static_cast<size_t>(Left); groups.pop_front()) {
    for (const test::fibers::Copy& copy : groups.front()) {
      std::memcpy(copy.to, copy.from, static_cast<size_t>(copy.bytes));
    }
  }
}

}  // namespace sf::cuda

// What a tensor core does for a warp, by its lanes' registers.
namespace sf::cuda {

inline void tile_product(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  namespace fibers = test::fibers;
  static uint32_t all[32][32][6];
  const int warp = fibers::current / 32, lane = fibers::current % 32;
  const uint32_t mine[6] = {a0, a1, a2, a3, b0, b1};
  std::copy_n(mine, 6, all[warp][lane]);
  fibers::meet(fibers::warps[static_cast<size_t>(warp)].barrier, fibers::warps[static_cast<size_t>(warp)].alive);
  const auto half = [](uint32_t word, int which) { return fibers::float_of(which == 0 ? word << 16 : word & 0xffff0000U); };
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      const int from = k % 8 / 2, high = k / 8;
      sum[i] += half(all[warp][row % 8 * 4 + from][row / 8 + 2 * high], k % 2) * half(all[warp][column * 4 + from][4 + high], k % 2);
    }
  }
  fibers::meet(fibers::warps[static_cast<size_t>(warp)].barrier, fibers::warps[static_cast<size_t>(warp)].alive);
}
inline void cluster_barrier() {}
inline float of_block(const float* mine, int) { return *mine; }

}  // namespace sf::cuda

#undef __shared__
#undef __global__
#undef __device__
#undef __launch_bounds__
#define __shared__ static
#define __global__
#define __device__
#define __launch_bounds__(...)
#define threadIdx (::sf::test::fibers::all[static_cast<size_t>(::sf::test::fibers::current)].thread)
#define blockIdx ::sf::test::fibers::block_index
#define blockDim ::sf::test::fibers::block_size
#define gridDim ::sf::test::fibers::grid_size
#define __syncthreads() ::sf::test::fibers::meet(::sf::test::fibers::block_barrier, ::sf::test::fibers::alive)
#define __shfl_xor_sync(mask, value, step) ::sf::test::fibers::shuffle_xor(value, step)
#define __shfl_sync(mask, value, lane) ::sf::test::fibers::from_lane(value, lane)
#define __any_sync(mask, value) ::sf::test::fibers::any(value)
#define __syncwarp() static_cast<void>(::sf::test::fibers::any(false))
#define __reduce_max_sync(mask, value) ::sf::test::fibers::reduce_max(value)
#define __expf std::exp
#define rsqrtf(x) (1.0f / std::sqrt(x))
#define __float_as_uint ::sf::test::fibers::bits_of
#define __uint_as_float ::sf::test::fibers::float_of
#define __int_as_float(x) ::sf::test::fibers::float_of(static_cast<uint32_t>(x))
#define __byte_perm ::sf::test::fibers::choose_bytes
#define atomicMax ::sf::test::fibers::raise
#define atomicAdd ::sf::test::fibers::add
#define cudaMemsetAsync(to, value, bytes, stream) (std::memset(to, value, bytes), cudaSuccess)
#define cudaFuncSetAttribute(...) cudaSuccess
#define cudaGetLastError() cudaSuccess
using std::isfinite;
using std::isnan;
using std::max;
using std::min;
