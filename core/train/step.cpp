#include "core/train/step.hpp"

#include <ATen/ATen.h>

#include "core/base/error.hpp"

namespace sf {

at::Tensor window_seeds(const at::Tensor& denominators_a, Pooling pooling) {
  const at::Tensor d_a = denominators_a.to(at::kDouble);
  const at::Tensor has_weight_a = d_a > 0;
  const at::Tensor live = has_weight_a.sum().to(at::kDouble);
  at::Tensor seeds_a;
  switch (pooling) {
    case Pooling::window: seeds_a = d_a.sum().reciprocal().expand_as(d_a); break;
    case Pooling::micro: seeds_a = (live * d_a).reciprocal(); break;
    case Pooling::mean: seeds_a = live.reciprocal().expand_as(d_a); break;
  }
  return at::where(has_weight_a, seeds_a, at::zeros_like(d_a)).to(at::kFloat);
}

Trainer::Trainer(Algorithm& algorithm, const Description& description, Sharding& sharding, TapeRunner& runner, AdamW& optimizer,
                 Placement placement)
    : algorithm_(algorithm), description_(description), sharding_(sharding), runner_(runner), optimizer_(optimizer), placement_(placement) {}

StepResult Trainer::run(const Window& window, const StepInfo& step, double learning_rate) {
  SF_CHECK(!window.batches.empty(), "window {} has no micro-step", window.number);
  const at::Tensor denominators_a =
      at::tensor(window.denominators, at::TensorOptions().dtype(at::kDouble)).to(placement_.device);
  const at::Tensor seeds_a = window_seeds(denominators_a, description_.pooling);

  mark(StepMark::begin);
  runner_.begin_window(seeds_a[0], step);
  for (size_t m = 0; m < window.batches.size(); ++m) {
    runner_.begin_micro_step();
    runner_.set_seed(seeds_a[static_cast<int64_t>(m)]);
    algorithm_.micro_step(runner_, to_device(window.batches[m], description_, placement_.device, placement_.dtype));
    mark(StepMark::forward_done);
    runner_.backward(/*boundary=*/m + 1 == window.batches.size());
    mark(StepMark::backward_done);
  }
  const std::vector<at::Tensor> gradients = sharding_.end_window();
  const at::Tensor norm = sharding_.gradient_norm(gradients);
  mark(StepMark::gradients_reduced);
  const at::Tensor total = denominators_a.sum().to(at::kFloat);
  const at::Tensor updated = optimizer_.step(gradients, norm, total, learning_rate);
  mark(StepMark::updated);

  // The one host read of the window.
  const at::Tensor read =
      at::stack({runner_.loss_sum().to(at::kDouble), norm.to(at::kDouble), total.to(at::kDouble), updated.to(at::kDouble)}).cpu();
  const double* values = read.const_data_ptr<double>();
  return {.loss = values[0], .gradient_norm = values[1], .denominator = values[2], .updated = values[3] != 0};
}

}  // namespace sf
