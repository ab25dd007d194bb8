// core/train/optimizer.hpp: AdamW on float32 masters of the local shards, with clipping by the global norm.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "sf/backend.hpp"

namespace sf {

struct AdamWOptions {
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
  double weight_decay = 0.0;      // decoupled, every trainable parameter
  double max_grad_norm = 0.5;
};

/// Optimizer state of one trainable shard. In a float32 model `master` is the parameter itself.
struct ShardState {
  size_t shard = 0;               // index into Sharding::shards()
  at::Tensor master, exp_avg, exp_avg_sq;
  at::Tensor steps;               // scalar float32: updates this parameter has had (an untouched one is skipped, not decayed)
};

class AdamW {
 public:
  /// Masters are copies of the shards as they are now; call reload_masters when weights change later.
  AdamW(std::vector<Shard>& shards, AdamWOptions options);

  void reload_masters();
  /// Weights from their masters, of all shards that have no gradient; step() writes the others, whether there is an update or not. Empty: all.
  void write_weights(const std::vector<at::Tensor>& gradients);

  /// One update. `gradients` as Sharding::end_window returns them (they are consumed: scaled in place), `norm` the global norm before clipping.
  /// For each parameter with a gradient g * min(1, max_norm / (norm + 1e-6)): p *= 1 - lr * wd; m, v as usual; t += 1;
  /// p -= lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps); then the model's parameter is p rounded to its type.
  /// When the norm or `denominator` is not finite, or the denominator is not positive, nothing changes. No host read.
  /// `touched` as TapeRunner::touched_by_any returns it: where it says no, the parameter keeps everything as if it had no gradient.
  /// Returns a scalar bool on the device: was the update made?
  at::Tensor step(const std::vector<at::Tensor>& gradients, const at::Tensor& norm, const at::Tensor& denominator, double learning_rate,
                  const std::vector<at::Tensor>& touched = {});

  std::vector<ShardState>& states() { return states_; }
  int64_t bytes() const;

 private:
  at::Tensor update(const std::vector<at::Tensor>& gradients, const at::Tensor& norm, const at::Tensor& denominator, double learning_rate);
  bool step_on_kernels(const std::vector<at::Tensor>& gradients, const at::Tensor& norm, const at::Tensor& denominator, const at::Tensor& ok,
                       double learning_rate);

  std::vector<Shard>& shards_;
  AdamWOptions options_;
  std::vector<ShardState> states_;
};

}  // namespace sf
