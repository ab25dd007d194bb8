// core/train/step.hpp: one window, written out top to bottom.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "core/train/loader.hpp"
#include "core/train/optimizer.hpp"
#include "core/train/tape.hpp"
#include "sf/algorithm.hpp"

namespace sf {

/// What decides a window's seeds: for each of its micro-steps m the denominator D_m here, the sum of D_m over ranks, and the number of ranks with D_m > 0.
struct WindowWeights {
  at::Tensor own_a, pooled_a, live_ranks_a;   // float64, on one device
};

/// Seeds of the numerators of this rank's micro-steps. float32 [a] on the device of the weights.
///   window  1 / sum of D          micro  1 / (L * D_m)          mean  1 / (pairs of micro-step and rank with D > 0)
/// D is summed over ranks; L counts micro-steps with D > 0 on some rank. A micro-step without weight on this rank gets seed 0.
at::Tensor window_seeds(const WindowWeights& weights, Pooling pooling);

/// What the host learns from the one read of a window.
struct StepResult {
  double loss = 0, gradient_norm = 0;
  double denominator = 0;   // of the whole window, over all ranks
  bool updated = false;     // false: no sample had weight, or a number was not finite; all state is as it was
  bool stop = false;        // some rank wants to stop
  int64_t samples = 0, tokens = 0;  // live ones of all ranks
  int64_t saves_settled = 0;        // ranks that said save_settled
  std::string alarm;                // where a transform met a number that is not finite, the first of all ranks; then updated is false
};

/// Where a window is, for whoever measures it. Forward and backward come once for each micro-step.
enum class StepMark { begin, forward_done, backward_done, gradients_reduced, updated };

class Trainer {
 public:
  Trainer(Algorithm& algorithm, const Description& description, Sharding& sharding, TapeRunner& runner, AdamW& optimizer,
          Placement placement);

  /// What a window is told of the run around it.
  struct Around {
    bool wants_stop = false;                    // this rank was asked to stop; StepResult::stop says whether some rank was
    /// The window that the next call will get, null while it is not ready: its first batch travels to the device while this window still computes.
    std::function<const Window*()> upcoming = {};
    std::function<void()> before_update = {};   // called when all but the update is enqueued: a snapshot of what it changes may be under way
    bool save_settled = false;                  // this rank has done its part of a save's stage; StepResult::saves_settled counts them
  };

  /// Forward and backward of every micro-step, reduction, clipping, update. With ranks there is one all-reduce for denominators (and `wants_stop`, `save_settled`) when the
  /// window starts, and one for loss and metrics at its end when step.wants_details; otherwise `loss` is this rank's part.
  StepResult run(const Window& window, const StepInfo& step, double learning_rate, const Around& around);
  StepResult run(const Window& window, const StepInfo& step, double learning_rate) { return run(window, step, learning_rate, Around()); }
  /// Called as the host passes each mark; the device may be behind, so a listener that wants times records events.
  void on_mark(std::function<void(StepMark)> listener) { on_mark_ = std::move(listener); }

 private:
  StepResult run_window(const Window& window, const StepInfo& step, double learning_rate, const Around& around);
  void mark(StepMark mark) const {
    if (on_mark_) {
      on_mark_(mark);
    }
  }
  std::function<void(StepMark)> on_mark_;
  Algorithm& algorithm_;
  const Description& description_;
  Sharding& sharding_;
  TapeRunner& runner_;
  AdamW& optimizer_;
  Placement placement_;
  DeviceFeed feed_;
  int64_t fed_window_ = -1;   // whose first batch is in the feed
};

}  // namespace sf
