#include "core/model/memory_bandwidth.hpp"

#include "core/base/error.hpp"
#include "core/kernels/crew.hpp"
#include "core/kernels/row_tiles.hpp"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <vector>

namespace sf {
namespace {

constexpr int64_t kBytesCpu = int64_t{256} << 20, kBytesGpu = int64_t{1} << 30;  // several times a cache
constexpr int kTrials = 12;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

constexpr int64_t kStreams = 8, kRun = 4096;       // places that a thread reads from at once, floats from each before it goes on
constexpr int64_t kColumns = 1024, kOutputs = 32;  // of a product: as much for a task

// Of all runs; eight sums for each stream, which a compiler keeps in vectors.
float sum_of(const float* from) {
  constexpr int64_t kSums = 8;
  float sums[kStreams * kSums] = {};
  for (int64_t i = 0; i < kRun; i += kSums) {
    for (int64_t s = 0; s < kStreams; ++s) {
      for (int64_t k = 0; k < kSums; ++k) sums[s * kSums + k] += from[s * kRun + i + k];
    }
  }
  float total = 0;
  for (const float one : sums) total += one;
  return total;
}

// Seconds that the threads of a decoding step take to read all of it, by plain sums or as the weights of a product with one row.
double seconds_of_read(const at::Tensor& from, bool as_product, std::vector<float>& kept) {
  const int64_t tasks = from.numel() / (kStreams * kRun);
  static_assert(kStreams * kRun == kColumns * kOutputs);
  kept.assign(static_cast<size_t>(tasks * kOutputs), 0);
  const std::vector<float> row(kColumns, 1.0F);
  const auto* data = from.const_data_ptr<float>();
  const auto start = std::chrono::steady_clock::now();
  in_crew(tasks, at::get_num_threads(), [&](int64_t task) {
    const float* own = data + task * kStreams * kRun;
    if (as_product) {
      row_tiles()->product(row.data(), 1, kColumns, own, kOutputs, kept.data() + task * kOutputs, tasks * kOutputs);
    } else {
      kept[static_cast<size_t>(task * kOutputs)] = sum_of(own);
    }
  });
  return seconds_since(start);
}

}  // namespace

double memory_bandwidth(at::Device device) {
  const at::NoGradGuard no_grad;
  const int64_t bytes = device.is_cpu() ? kBytesCpu : kBytesGpu;
  const at::Tensor from = at::ones({bytes / 4}, at::TensorOptions().dtype(at::kFloat).device(device));
  double best = 0;
  if (device.is_cpu()) {
    std::vector<float> kept;  // so that nothing is left out
    for (int trial = 0; trial < kTrials; ++trial) {
      const bool as_product = trial % 2 == 1 && row_tiles() != nullptr;
      best = std::max(best, static_cast<double>(bytes) / seconds_of_read(from, as_product, kept));
      SF_CHECK(kept[0] == static_cast<float>(as_product ? kColumns : kStreams * kRun), "a read of ones gives {}", kept[0]);
    }
    return best;
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
