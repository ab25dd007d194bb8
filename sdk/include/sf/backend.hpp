// sf/backend.hpp: the interface "sf.sharding/1" of a sharding backend: where parameters live and how gradients get to the optimizer.
// All calls are [main]; the engine calls build and take_tables once, then for each window begin_window, the uses along the tape, reduce,
// end_window; an evaluation is begin_evaluation, uses, end_evaluation. memory() may be asked before build.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "sf/comm.hpp"
#include "sf/transform.hpp"
#include "sf/unit.hpp"

namespace sf {

/// A rank's part of a parameter: elements [begin, end) of the row-major whole.
struct Shard {
  std::string name;                    // full, as in checkpoints
  std::vector<int64_t> global_shape;
  int64_t begin = 0, end = 0;          // equal when this rank holds nothing
  bool trainable = true;
  bool is_saved = true;                // false: another rank holds the same elements and saves them
  at::Tensor local;                    // shape as local_shape says, contiguous, in the model's type, on the device; lives as long as the backend
};

/// Shape of a part: [rows, ...] when it is whole rows, else [end - begin].
inline std::vector<int64_t> local_shape(const std::vector<int64_t>& global_shape, int64_t begin, int64_t end) {
  int64_t row = 1, all = 1;
  for (size_t d = 0; d < global_shape.size(); ++d) {
    row *= d > 0 ? global_shape[d] : 1;
    all *= global_shape[d];
  }
  if (begin == 0 && end == all) {
    return global_shape;
  }
  if (global_shape.empty() || row == 0 || begin % row != 0 || end % row != 0) {
    return {end - begin};
  }
  std::vector<int64_t> shape = global_shape;
  shape[0] = (end - begin) / row;
  return shape;
}

/// What a rank will hold, in bytes, from shapes alone; of the rank that holds most.
struct ShardingMemory {
  int64_t weights = 0;              // its own part of the parameters
  int64_t whole = 0;                // whole parameters beside them, at most
  int64_t buffers = 0;              // of gathers and reductions, and reduced gradients
  int64_t trainable_elements = 0;   // what the optimizer gets: masters and moments
  bool shards_tables = false;       // the target's frozen tables are cut over the ranks between windows
  std::string detail;               // "shards 1/4, 3 slots for 6 groups"
};

struct Placement {
  at::Device device = at::kCPU;
  at::ScalarType dtype = at::kFloat;
  Comm* comm = nullptr;                // null: one process; outlives the backend
};

class Sharding {
 public:
  /// How some parameters travel, before build; outlives the backend. Only a backend that provides `gather-codec` is asked.
  virtual void take_codec(GatherCodec& codec) { (void)codec; }
  /// Allocates every parameter; values come later, through shards().
  virtual void build(const std::vector<UnitSpec>& units, const Placement& placement) = 0;
  /// All shards, units and parameters in the order of build.
  virtual std::vector<Shard>& shards() = 0;

  /// The target's frozen tables, after the algorithm has been bound to them. A backend may cut them over the ranks: then they hold their values
  /// from begin_window to end_window and from begin_evaluation to end_evaluation, and no memory outside.
  virtual void take_tables(const std::vector<at::Tensor>& tables) = 0;
  virtual ShardingMemory memory(const std::vector<UnitSpec>& units, int64_t ranks, at::ScalarType dtype) const = 0;

  /// The whole parameter: the same tensor for the run, whole between before_use and after_use. With `stable-parameters` its address is
  /// fixed once plan() has been called for the forward phase.
  virtual at::Tensor whole(int64_t unit, int64_t parameter) = 0;
  /// The order of uses in every micro-step from now on (forward; backward is its reverse) or in every evaluated batch. Called between two
  /// micro-steps, once for each of the two phases, when the tape has seen one. Without a plan nothing is given back early.
  virtual void plan(Phase phase, const std::vector<int64_t>& order) = 0;
  virtual void begin_window() = 0;
  virtual void begin_evaluation() = 0;
  virtual void end_evaluation() = 0;
  /// Parameters must be whole when this returns (on the device's stream). uses_left counts this one.
  virtual void before_use(int64_t unit, Phase phase, int64_t uses_left) = 0;
  /// The memory may be given back when no use is left.
  virtual void after_use(int64_t unit, Phase phase, int64_t uses_left) = 0;
  /// After the unit's last backward of the window: one gradient buffer per parameter, undefined for frozen ones; zeros where nothing touched it on this
  /// rank. In one process those declared idle are undefined, too, in a window that does not touch them. So with several ranks all give the same ones.
  virtual void reduce(int64_t unit, const std::vector<at::Tensor>& gradients) = 0;
  /// All reduced gradients in place, in the order of shards(); undefined for those that reduce() got undefined.
  virtual std::vector<at::Tensor> end_window() = 0;
  /// Euclidean norm over all ranks of what end_window returned: scalar float32 on the device, no host read.
  virtual at::Tensor gradient_norm(const std::vector<at::Tensor>& gradients) = 0;
  /// After a failure inside a window or an evaluation: forgets it. The host waits for nothing. Parameters keep their values, and the next
  /// begin_window starts clean.
  virtual void abandon() = 0;

 protected:
  ~Sharding() = default;
};

inline constexpr const char* kShardingInterface = "sf.sharding/1";

}  // namespace sf
