#include "core/train/window_trace.hpp"

#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <set>
#include <string_view>
#include <utility>

namespace sf {
namespace {

// As shared definitions of a host read have it: the waits, and the copies that wait.
constexpr std::array<std::string_view, 7> kWaits = {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy",
                                                    "cuStreamSynchronize",   "cuCtxSynchronize",      "cuEventSynchronize"};
constexpr std::array<std::string_view, 5> kLaunches = {"cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch"};
constexpr size_t kNameLength = 160;

template <size_t N>
bool is_one_of(const std::array<std::string_view, N>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

uint64_t nanoseconds_now() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch()).count());
}

}  // namespace

WindowTrace trace_window(const std::function<void()>& window) {
  namespace profiler = torch::autograd::profiler;
  using torch::profiler::impl::ActivityType;
  const torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
  const std::set<ActivityType> activities = {ActivityType::CUDA};
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities);
  const uint64_t begin = nanoseconds_now();
  window();
  const uint64_t end = nanoseconds_now();
  const auto result = profiler::disableProfiler();

  WindowTrace trace;
  std::map<std::string, WindowTrace::Operation> by_name;
  std::vector<std::pair<uint64_t, uint64_t>> spans;
  for (const profiler::KinetoEvent& event : result->events()) {
    const std::string name = event.name();
    if (event.deviceType() == c10::DeviceType::CUDA) {
      WindowTrace::Operation& operation = by_name[name.substr(0, kNameLength)];
      ++operation.count;
      operation.milliseconds += static_cast<double>(event.durationNs()) * 1e-6;
      spans.emplace_back(event.startNs(), event.startNs() + event.durationNs());
    } else if (event.startNs() >= begin && event.startNs() <= end) {
      if (is_one_of(kWaits, name)) {
        ++trace.waits[name];
        ++trace.host_waits;
      }
      trace.launches += is_one_of(kLaunches, name) ? 1 : 0;
    }
  }
  trace.is_known = !spans.empty();
  trace.device_operations = static_cast<int64_t>(spans.size());
  std::sort(spans.begin(), spans.end());
  uint64_t until = spans.empty() ? 0 : spans.front().first;
  for (const auto& [first, last] : spans) {
    trace.idle_ms += first > until ? static_cast<double>(first - until) * 1e-6 : 0;
    trace.busy_ms += last > std::max(first, until) ? static_cast<double>(last - std::max(first, until)) * 1e-6 : 0;
    until = std::max(until, last);
  }
  for (auto& [name, operation] : by_name) {
    operation.name = name;
    trace.operations.push_back(std::move(operation));
  }
  std::sort(trace.operations.begin(), trace.operations.end(), [](const auto& a, const auto& b) { return a.milliseconds > b.milliseconds; });
  return trace;
}

}  // namespace sf
