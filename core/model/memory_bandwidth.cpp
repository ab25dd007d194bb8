#include "core/model/memory_bandwidth.hpp"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <chrono>

namespace sf {
namespace {

constexpr int64_t kBytesCpu = int64_t{256} << 20, kBytesGpu = int64_t{1} << 30;  // several times a cache
constexpr int kTrials = 12;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Sixteen sums at a time, which a compiler keeps in vectors.
float sum_of(const float* from, int64_t count) {
  constexpr int64_t kSums = 64;
  float sums[kSums] = {};
  for (int64_t i = 0; i + kSums <= count; i += kSums) {
    for (int64_t k = 0; k < kSums; ++k) sums[k] += from[i + k];
  }
  float total = 0;
  for (const float one : sums) total += one;
  return total;
}

}  // namespace

double memory_bandwidth(at::Device device) {
  const at::NoGradGuard no_grad;
  const int64_t bytes = device.is_cpu() ? kBytesCpu : kBytesGpu;
  const at::Tensor from = at::ones({bytes / 4}, at::TensorOptions().dtype(at::kFloat).device(device));
  double best = 0;
  if (device.is_cpu()) {
    std::atomic<float> kept = 0;  // so that nothing is left out
    for (int trial = 0; trial < kTrials; ++trial) {
      const auto start = std::chrono::steady_clock::now();
      at::parallel_for(0, from.numel() / 4096, 1, [&](int64_t begin, int64_t end) {
        kept = kept + sum_of(from.const_data_ptr<float>() + begin * 4096, (end - begin) * 4096);
      });
      best = std::max(best, static_cast<double>(bytes) / seconds_since(start));
    }
    return kept > 0 ? best : 0;
  }
  const c10::impl::VirtualGuardImpl guard(device.type());
  at::Tensor to = at::empty_like(from);
  for (int trial = 0; trial < kTrials; ++trial) {
    constexpr int kCopies = 8;  // a wait costs as much as one of them
    guard.synchronizeDevice(device.index());
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kCopies; ++i) to.copy_(from, /*non_blocking=*/true);
    guard.synchronizeDevice(device.index());
    best = std::max(best, 2.0 * kCopies * static_cast<double>(bytes) / seconds_since(start));
  }
  return best;
}

}  // namespace sf
