// libsf_graphs_cuda.so: records CUDA graphs through LibTorch, whose allocator gives each pool of graphs memory of its own.
#include "core/train/graphs.hpp"

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>

namespace sf {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

class CudaGraph final : public RecordedGraph {
 public:
  void replay() override { graph.replay(); }
  at::cuda::CUDAGraph graph;
};

class CudaRecorder final : public GraphRecorder {
 public:
  explicit CudaRecorder(int device) : device_(static_cast<c10::DeviceIndex>(device)), pool_(at::cuda::graph_pool_handle()) {}

  std::unique_ptr<RecordedGraph> record(const Body& body, std::vector<at::Tensor>& made) override {
    const c10::cuda::CUDAGuard here(device_);
    auto recorded = std::make_unique<CudaGraph>();
    const int64_t before = reserved();
    // Of this thread alone: data threads may take pinned memory and the watchdog ask for events meanwhile.
    recorded->graph.capture_begin(pool_, cudaStreamCaptureModeThreadLocal);
    try {
      made = body();
    } catch (...) {
      try {
        recorded->graph.capture_end();
      } catch (...) {  // a broken recording ends with an error; the first one counts
      }
      throw;
    }
    recorded->graph.capture_end();
    bytes_ += reserved() - before;
    recorded->graph.replay();
    return recorded;
  }

  void make_room() override { allocator::emptyCache(); }
  int64_t bytes() const override { return bytes_; }

 private:
  int64_t reserved() const {
    return allocator::getDeviceStats(device_).reserved_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)].current;
  }

  c10::DeviceIndex device_;
  at::cuda::MempoolId_t pool_;
  int64_t bytes_ = 0;
};

}  // namespace
}  // namespace sf

__attribute__((visibility("default"))) sf::GraphRecorder* sf_graph_recorder_v1(int device) { return new sf::CudaRecorder(device); }
