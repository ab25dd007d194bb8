// sf/unit.hpp: what an algorithm is made of. A unit is the smallest piece that is sharded, recomputed, captured or transformed as a
// whole; a micro-step is ordinary code that calls units through the runner, which keeps the tape.
//
// In: the shapes that describe() returns. Out: values on the tape. All calls are [main].
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "sf/ops.hpp"

namespace sf {

enum class Phase { forward, backward, evaluate };

enum class Init {
  zeros,
  ones,
  normal,
  first_tap,        // 1 where the last index but one is 0, else 0
  target_embedding  // a copy of the target's table
};

struct ParameterSpec {
  std::string name;              // below the unit's prefix: "self_attn.q_proj.weight"
  std::vector<int64_t> shape;
  Init init = Init::normal;
  double init_std = 0.02;        // of Init::normal
  bool trainable = true;         // false: frozen by the recipe; no gradient, no optimizer state, still saved
  bool idle = false;             // true: may stay without gradient for a whole window, on all ranks, and is then left as it is; what only some ranks touch is summed
};

struct UnitSpec {
  std::string name;              // "block.0", unique; errors and logs use it
  std::string prefix;            // of its parameters' names in checkpoints and exports: "layers.0."
  std::string shard_group;       // units of one group are gathered and reduced together; a block is its own, the rest is "root"
  std::vector<ParameterSpec> parameters;
  int64_t saved_columns = 0;     // elements that a use keeps of each of its rows until backward, for size estimates; 0: from the parameters' shapes
};

/// What a unit's forward may touch.
class UnitContext {
 public:
  /// The whole parameter as a leaf. Products go through linear() instead, so that transforms can take them over.
  virtual const at::Tensor& parameter(std::string_view name) = 0;
  /// x @ W^T (+ bias when the unit has NAME.bias). x [..., in] -> [..., out]. Its weight gradient goes straight into the gradient buffer.
  virtual at::Tensor linear(std::string_view name, const at::Tensor& x) = 0;
  /// Several products that read the same x, in the order of the names: x is prepared once and its gradient is one sum.
  virtual std::vector<at::Tensor> linears(std::initializer_list<std::string_view> names, const at::Tensor& x) {
    std::vector<at::Tensor> products;
    for (const std::string_view name : names) {
      products.push_back(linear(name, x));
    }
    return products;
  }
  /// Where an operation that forms a parameter's gradient in its forward pass adds it (Ops::distill_head); then nothing of it may go through autograd.
  /// Undefined while nothing is recorded and for a frozen parameter. Once a forward.
  virtual at::Tensor gradient_buffer(std::string_view name) = 0;
  virtual bool has(std::string_view name) const = 0;
  virtual Ops& ops() = 0;
  virtual Phase phase() const = 0;

 protected:
  ~UnitContext() = default;
};

/// No randomness, no clock, no state: forward twice gives the same bits. Never writes to an input.
class Unit {
 public:
  virtual ~Unit() = default;
  virtual std::vector<at::Tensor> forward(UnitContext& context, const std::vector<at::Tensor>& inputs) = 0;
};

struct ValueNode {
  at::Tensor tensor;
  int64_t place = -1;  // on the tape; -1 for a constant
};

/// A place on the tape, not a tensor.
class TapeValue {
 public:
  TapeValue() = default;
  explicit TapeValue(std::shared_ptr<ValueNode> node) : node_(std::move(node)) {}
  /// A detached leaf. Nothing differentiable may happen between units; the runner refuses what comes back with a graph.
  const at::Tensor& tensor() const { return node_->tensor; }
  const std::shared_ptr<ValueNode>& node() const { return node_; }
  explicit operator bool() const { return node_ != nullptr; }

 private:
  std::shared_ptr<ValueNode> node_;
};

struct StepInfo {
  int64_t update = 0;          // optimizer updates done before this one
  int64_t updates_total = 0;   // of the schedule
  bool wants_details = false;  // metrics that cost something are wanted for this window
};

class Runner {
 public:
  /// Runs unit `index` of describe(). Same order of calls on every rank and for every batch.
  virtual std::vector<TapeValue> run(int64_t index, const std::vector<TapeValue>& inputs) = 0;
  /// Ids, masks, features, frozen tables: no gradient. A tensor that requires grad is refused.
  virtual TapeValue constant(const at::Tensor& tensor) = 0;
  /// A scalar float32 to differentiate with gradient 1: numerator * seed(). Its sum over a window and the ranks is the loss.
  virtual void add_loss(const TapeValue& numerator) = 0;
  /// numerator / denominator, summed each over window and ranks. No gradient flows through a metric. Same shape: scalar, or [p] for one figure per position,
  /// reported as position_1/NAME, position_2/NAME ... (slot 0 is the known token and has none).
  virtual void add_metric(std::string_view name, const at::Tensor& numerator, const at::Tensor& denominator) = 0;
  /// A sum over window and ranks, reported as it is: how many rows, blocks or tokens a figure rests on. Scalar, or [p] as above.
  virtual void add_count(std::string_view name, const at::Tensor& count) = 0;
  /// Scalar float32 on the device: what the pooling makes of the window's denominators. 1 while evaluating.
  virtual const at::Tensor& seed() const = 0;
  virtual Phase phase() const = 0;  // forward or evaluate
  virtual const StepInfo& step() const = 0;

 protected:
  ~Runner() = default;
};

}  // namespace sf
