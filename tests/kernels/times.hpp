// tests/kernels/times.hpp: how long work on the GPU takes, for the programs that print it.
#pragma once

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

namespace sf::test {

inline int time_repeats = 7, time_calls = 8;

/// Milliseconds of a call: median of `time_repeats` times `time_calls` in a row, so that the host is not seen.
inline double milliseconds(const std::function<void()>& body) {
  const c10::impl::VirtualGuardImpl guard(at::kCUDA);
  body();
  std::vector<double> times;
  for (int i = 0; i < time_repeats; ++i) {
    guard.synchronizeDevice(0);
    const auto start = std::chrono::steady_clock::now();
    for (int call = 0; call < time_calls; ++call) {
      body();
    }
    guard.synchronizeDevice(0);
    times.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count() / time_calls);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

/// One line: milliseconds, and what they come to in TB/s of memory that has to move and TFLOP/s of products.
inline void time_line(const std::string& name, double ms, double bytes, double flop = 0) {
  std::printf("%-44s %8.3f ms  %6.2f GB  %5.2f TB/s", name.c_str(), ms, bytes / 1e9, bytes / ms / 1e9);
  if (flop > 0) {
    std::printf("  %6.1f TFLOP/s", flop / ms / 1e9);
  }
  std::printf("\n");
}

}  // namespace sf::test
