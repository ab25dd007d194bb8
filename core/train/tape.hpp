// core/train/: a run from samples to a trained draft. What comes in: a plan, the created plugins, a feature store. What goes out: checkpoints,
// metrics, an export. This file is its heart: units run one by one, each with a graph of its own, and the tape is the list of what ran.
// Backward is a loop over that list from the end (design: units and the tape).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "core/train/capture.hpp"
#include "core/train/linear.hpp"
#include "core/train/transforms.hpp"
#include "sf/backend.hpp"
#include "sf/unit.hpp"

namespace sf {

/// Does one of the patterns name the unit? A * matches any part of a name, wherever it stands, as in a shell.
[[nodiscard]] bool names_unit(const std::vector<std::string>& patterns, const std::string& name);

/// Numerator and denominator of a metric, summed over a window: float64, scalar or [p]. A count has no denominator.
struct MetricSum {
  at::Tensor numerator, denominator;
};

class TapeRunner final : public Runner {
 public:
  struct Options {
    at::ScalarType gradient_dtype = at::kFloat;
    std::vector<std::string> recompute;  // names of units whose forward runs again in backward; patterns of names_unit()
    GraphRecorder* recorder = nullptr;   // of CUDA graphs for the blocks, which are the units outside the shard group "root"; null: all run eagerly. Outlives the runner
    BlockCapture::Options capture = {};
    Transforms* transforms = nullptr;    // null: the tape computes all linears itself. Outlives the runner
    bool lends_weights = false;          // one process with float32 masters: weights that a transform replaces give their memory away within a window
    std::string plugin = {};             // whose units these are: stands before what they throw; empty: nothing does
  };

  /// `units[i]` implements `specs[i]`; `sharding` has been built from the same specs. All outlive the runner.
  TapeRunner(std::vector<Unit*> units, const std::vector<UnitSpec>& specs, Sharding& sharding, Ops& ops, Placement placement,
             Options options);
  ~TapeRunner();

  /// Zeroes the gradient buffers of touched parameters, the loss and the metrics.
  /// `seed`: scalar float32 on the device.
  void begin_window(const at::Tensor& seed, const StepInfo& step);
  void begin_micro_step();
  /// Of the open micro-step; some poolings have one seed for each.
  void set_seed(const at::Tensor& seed) { seed_ = seed; }
  /// Backward over the tape of this micro-step; at the boundary each unit's gradients go to the sharding backend after its last use.
  void backward(bool boundary);
  /// Evaluation: units run without tape or graph (begin_micro_step for each batch, no backward); metrics and loss add up until the next
  /// begin_window or begin_evaluation.
  void begin_evaluation(const StepInfo& step);
  void end_evaluation();

  /// Scalar float32, sum of add_loss values since the window began.
  const at::Tensor& loss_sum() const { return loss_sum_; }
  const std::map<std::string, MetricSum>& metrics() const { return metrics_; }
  /// Loss and metrics become sums over ranks: one all-reduce. Every rank has the same metrics in the same shapes.
  void pool_sums(Comm& comm);
  /// Names and shapes of the metrics so far, for comparison between ranks.
  std::string metric_names() const;
  /// With several ranks, after the window's last backward and on all of them: did any rank touch it in this window? By parameter, in the order of the shards:
  /// a scalar bool on the device for those declared idle, undefined for the others, whose gradient always counts. One all-reduce, none when nothing is idle.
  /// Empty with one process.
  std::vector<at::Tensor> touched_by_any() const;
  /// Trainable, not declared idle, and never touched in any window so far.
  std::vector<std::string> never_touched() const;
  /// Units in the order of the last complete micro-step, and a hash of it; ranks must agree on it.
  const std::vector<int64_t>& order() const { return order_forward_; }
  uint64_t order_hash() const;
  [[nodiscard]] Transforms* transforms() const { return options_.transforms; }
  /// Memory for the weights that this window has lent, without values: whoever calls writes them from the masters. False: none were lent.
  bool take_weights_back();
  /// Bytes of all gradient buffers.
  int64_t gradient_bytes() const;
  /// How many units are replayed as CUDA graphs, and what that took so far.
  int64_t captured_units() const;
  BlockCapture::Counts capture_counts() const { return capture_ ? capture_->counts() : BlockCapture::Counts(); }

  std::vector<TapeValue> run(int64_t index, const std::vector<TapeValue>& inputs) override;
  TapeValue constant(const at::Tensor& tensor) override;
  void add_loss(const TapeValue& numerator) override;
  void add_metric(std::string_view name, const at::Tensor& numerator, const at::Tensor& denominator) override;
  void add_count(std::string_view name, const at::Tensor& count) override;
  const at::Tensor& seed() const override { return seed_; }
  Phase phase() const override { return phase_; }
  const StepInfo& step() const override { return step_; }

 private:
  struct UnitState;
  class Context;

  // One use of a unit. Before its backward it keeps the graph (or, for recompute, the inputs alone).
  struct Use {
    int64_t unit = 0;
    int64_t use = 0;                                  // how many uses of this unit came before in the micro-step
    std::vector<std::shared_ptr<ValueNode>> inputs;
    std::vector<std::shared_ptr<ValueNode>> outputs;
    std::vector<at::Tensor> graph_outputs;            // with grad_fn; empty under recompute
    bool recompute = false;
    int64_t captured = -1;                            // place among the recorded uses of the micro-step; -1: ran eagerly
  };

  // A differentiable value: where its gradient is summed.
  struct Place {
    std::weak_ptr<ValueNode> node;
    int64_t consumers = 0;  // uses that take it as an input
    at::Tensor gradient;
  };

  void lend_weights(UnitState& unit);
  void take_leaves(UnitState& unit);
  void encode_weights(UnitState& unit);
  std::vector<at::Tensor> forward(UnitState& unit, int64_t use, const std::vector<at::Tensor>& inputs);
  std::vector<at::Tensor> differentiate(UnitState& unit, const std::vector<at::Tensor>& graph_outputs, const std::vector<at::Tensor>& output_gradients,
                                        const std::vector<at::Tensor>& wanted_inputs);
  CapturedUnit captured_unit(UnitState& unit, int64_t use);
  void add_gradient(const ValueNode& node, const at::Tensor& gradient);
  void add_sum(std::string_view name, const at::Tensor& numerator, const at::Tensor& denominator);
  void backward_use(Use& use, int64_t uses_left, bool boundary);
  void finish_evaluated();
  void check_order(std::vector<int64_t>& known, const char* phase);
  void abandon();
  int64_t uses_left(const std::vector<int64_t>& planned, int64_t unit) const;
  std::vector<at::Tensor> gradients_of(UnitState& unit) const;

  std::vector<std::unique_ptr<UnitState>> units_;
  Sharding& sharding_;
  Ops& ops_;
  Placement placement_;
  std::string where(int64_t unit, int64_t use, const char* phase) const;

  Options options_;

  std::unique_ptr<BlockCapture> capture_;
  Phase phase_ = Phase::forward;
  StepInfo step_;
  at::Tensor seed_, loss_sum_;
  std::map<std::string, MetricSum> metrics_;

  std::vector<Use> tape_;
  std::vector<Place> places_;
  std::vector<int64_t> losses_;               // places
  std::set<const c10::StorageImpl*> owned_;   // memory of the backend's own parts, once it is asked for
  std::vector<int64_t> used_;                 // per unit, in this micro-step
  std::vector<int64_t> order_;                // of this micro-step so far
  std::vector<int64_t> order_forward_, order_evaluate_;
  std::vector<int64_t> planned_forward_, planned_evaluate_;  // uses per unit in the last micro-step; empty: unknown
};

}  // namespace sf
