// core/train/step.hpp: one window, written out top to bottom.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "core/train/loader.hpp"
#include "core/train/optimizer.hpp"
#include "core/train/tape.hpp"
#include "sf/algorithm.hpp"

namespace sf {

/// Seeds of a window's numerators from the denominators of its micro-steps, already summed over ranks. float32 [a] on their device.
///   window  1 / sum of D          micro  1 / (L * D_m)          mean  1 / L
/// L counts micro-steps with D > 0. A micro-step without weight gets seed 0; so does everything when nothing has weight.
at::Tensor window_seeds(const at::Tensor& denominators_a, Pooling pooling);

/// What the host learns from the one read of a window.
struct StepResult {
  double loss = 0, gradient_norm = 0;
  double denominator = 0;   // of the whole window
  bool updated = false;     // false: no sample had weight, or a number was not finite; all state is as it was
};

/// Where a window is, for whoever measures it. Forward and backward come once for each micro-step.
enum class StepMark { begin, forward_done, backward_done, gradients_reduced, updated };

class Trainer {
 public:
  Trainer(Algorithm& algorithm, const Description& description, Sharding& sharding, TapeRunner& runner, AdamW& optimizer,
          Placement placement);

  /// Forward and backward of every micro-step, reduction, clipping, update.
  StepResult run(const Window& window, const StepInfo& step, double learning_rate);
  /// Called as the host passes each mark; the device may be behind, so a listener that wants times records events.
  void on_mark(std::function<void(StepMark)> listener) { on_mark_ = std::move(listener); }

 private:
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
};

}  // namespace sf
