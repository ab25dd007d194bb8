// core/train/window_trace.hpp: what a GPU and its driver did while something ran: how often the host waited, and where the device's time went. Through
// LibTorch's profiler, so a traced window is slower than others and is not timed itself.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace sf {

struct WindowTrace {
  struct Operation {
    std::string name;            // of the kernel or copy, as the driver has it, cut
    int64_t count = 0;
    double milliseconds = 0;
  };
  bool is_known = false;         // false: the driver gave no record
  int64_t host_waits = 0;        // calls after which the host knew that the device had finished something
  std::map<std::string, int64_t> waits;   // by name of the call
  int64_t launches = 0;          // calls that start kernels, a graph counting once
  int64_t device_operations = 0; // kernels, copies and fills that ran
  double busy_ms = 0;            // the device ran something
  double idle_ms = 0;            // between its first and its last operation it ran nothing
  std::vector<Operation> operations;      // longest first
};

/// Runs `window`, which must end with the host having waited for the device.
[[nodiscard]] WindowTrace trace_window(const std::function<void()>& window);

}  // namespace sf
