// sf/backend.hpp: the interface "sf.sharding/1" of a sharding backend: where parameters live and how gradients get to the optimizer.
// All calls are [main]; the engine calls build once, then for each window begin_window, the uses along the tape, reduce, end_window.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "sf/comm.hpp"
#include "sf/unit.hpp"

namespace sf {

/// A rank's part of a parameter: a slice along dimension 0.
struct Shard {
  std::string name;                    // full, as in checkpoints
  std::vector<int64_t> global_shape;
  int64_t row_begin = 0, row_end = 0;  // of dimension 0; equal when this rank holds nothing
  bool trainable = true;
  at::Tensor local;                    // in the model's type, on the device; lives until the backend is destroyed
};

struct Placement {
  at::Device device = at::kCPU;
  at::ScalarType dtype = at::kFloat;
  Comm* comm = nullptr;                // null: one process; outlives the backend
};

class Sharding {
 public:
  /// Allocates every parameter; values come later, through shards().
  virtual void build(const std::vector<UnitSpec>& units, const Placement& placement) = 0;
  /// All shards, units and parameters in the order of build.
  virtual std::vector<Shard>& shards() = 0;

  /// The whole parameter. Valid between before_use and after_use; the address is fixed for the run.
  virtual at::Tensor whole(int64_t unit, int64_t parameter) = 0;
  virtual void begin_window() = 0;
  /// Parameters must be whole when this returns (on the device's stream). uses_left counts this one.
  virtual void before_use(int64_t unit, Phase phase, int64_t uses_left) = 0;
  /// The memory may be given back when no use is left.
  virtual void after_use(int64_t unit, Phase phase, int64_t uses_left) = 0;
  /// After the unit's last backward of the window: one gradient buffer per parameter, undefined for those that nothing touched.
  virtual void reduce(int64_t unit, const std::vector<at::Tensor>& gradients) = 0;
  /// All reduced gradients in place, in the order of shards(); undefined for untouched or frozen ones.
  virtual std::vector<at::Tensor> end_window() = 0;
  /// Euclidean norm over all ranks of what end_window returned: scalar float32 on the device, no host read.
  virtual at::Tensor gradient_norm(const std::vector<at::Tensor>& gradients) = 0;

 protected:
  ~Sharding() = default;
};

inline constexpr const char* kShardingInterface = "sf.sharding/1";

}  // namespace sf
