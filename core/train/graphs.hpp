// core/train/graphs.hpp: CUDA graphs as the engine sees them. Who records lives in libsf_graphs_cuda.so, which needs LibTorch's CUDA half and is opened
// only when a recipe asks for it; here is what that library offers, without a CUDA header.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace sf {

/// What a recording left: the same kernels on the same addresses, in one launch on the current stream.
class RecordedGraph {
 public:
  virtual ~RecordedGraph() = default;
  virtual void replay() = 0;
};

class GraphRecorder {
 public:
  /// Enqueues work on the current stream and returns the tensors that hold its results. Runs once while it is recorded; may not wait for the device.
  using Body = std::function<std::vector<at::Tensor>()>;

  virtual ~GraphRecorder() = default;
  /// Records `body` and runs the recording once. `made` gets what body returned; every replay leaves its results at those addresses. Memory that body
  /// takes comes from one pool for all graphs of this recorder: what one has given back, one that is recorded later may use. So graphs are replayed in
  /// the order in which they were recorded. Throws what body throws.
  virtual std::unique_ptr<RecordedGraph> record(const Body& body, std::vector<at::Tensor>& made) = 0;
  /// Memory that is cached for others and in no use goes back to the device, so that the pool can have it. Waits for the device.
  virtual void make_room() = 0;
  /// Bytes of the pool.
  virtual int64_t bytes() const = 0;
};

/// Opens libsf_graphs_cuda.so and a recorder for the GPU; also leaves the default stream, on which nothing can be recorded: from here on this thread
/// enqueues on a stream of its own. Throws Error(kDevice) when the library can't be opened.
[[nodiscard]] std::unique_ptr<GraphRecorder> open_graph_recorder(at::Device device);

}  // namespace sf

/// The one symbol of libsf_graphs_cuda.so.
extern "C" sf::GraphRecorder* sf_graph_recorder_v1(int device);
