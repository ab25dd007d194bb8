#include "core/train/step.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

#include "core/base/error.hpp"
#include "core/base/text.hpp"

namespace sf {

at::Tensor window_seeds(const WindowWeights& weights, Pooling pooling) {
  const at::Tensor live = (weights.pooled_a > 0).sum().to(at::kDouble);
  at::Tensor seeds_a;
  switch (pooling) {
    case Pooling::window: seeds_a = weights.pooled_a.sum().reciprocal().expand_as(weights.own_a); break;
    case Pooling::micro: seeds_a = (live * weights.pooled_a).reciprocal(); break;
    case Pooling::mean: seeds_a = weights.live_ranks_a.sum().reciprocal().expand_as(weights.own_a); break;
  }
  return at::where(weights.own_a > 0, seeds_a, at::zeros_like(weights.own_a)).to(at::kFloat);
}

Trainer::Trainer(Algorithm& algorithm, const Description& description, Sharding& sharding, TapeRunner& runner, AdamW& optimizer,
                 Placement placement)
    : algorithm_(algorithm), description_(description), sharding_(sharding), runner_(runner), optimizer_(optimizer), placement_(placement),
      feed_(description, placement.device, placement.dtype) {}

StepResult Trainer::run(const Window& window, const StepInfo& step, double learning_rate, const Around& around) {
  try {
    return run_window(window, step, learning_rate, around);
  } catch (...) {
    if (runner_.take_weights_back()) {
      optimizer_.write_weights({});
    }
    throw;
  }
}

StepResult Trainer::run_window(const Window& window, const StepInfo& step, double learning_rate, const Around& around) {
  SF_CHECK(!window.batches.empty(), "window {} has no micro-step", window.number);
  // One vector, so that one all-reduce tells every rank all of it: D of each micro-step, who has weight, and some counts.
  const int64_t a = static_cast<int64_t>(window.batches.size());
  std::vector<double> told = window.denominators;
  for (const double denominator : window.denominators) {
    told.push_back(denominator > 0 ? 1 : 0);
  }
  told.insert(told.end(), {around.wants_stop ? 1.0 : 0.0, static_cast<double>(window.samples), static_cast<double>(window.tokens),
                            around.save_settled ? 1.0 : 0.0});
  at::Tensor pooled = at::tensor(told, at::TensorOptions().dtype(at::kDouble));
  if (placement_.device.is_cuda()) {
    pooled = pooled.pin_memory().to(placement_.device, /*non_blocking=*/true);  // from pageable memory the host would wait
  }
  const at::Tensor own_a = placement_.comm != nullptr ? pooled.slice(0, 0, a).clone() : pooled.slice(0, 0, a);
  if (placement_.comm != nullptr) {
    placement_.comm->all_reduce(pooled, Reduction::sum, "denominators")->wait();
  }
  const at::Tensor pooled_a = pooled.slice(0, 0, a), counts = pooled.slice(0, 2 * a);
  const at::Tensor seeds_a = window_seeds({.own_a = own_a, .pooled_a = pooled_a, .live_ranks_a = pooled.slice(0, a, 2 * a)}, description_.pooling);

  mark(StepMark::begin);
  if (fed_window_ != window.number) {
    while (!feed_.empty()) {
      (void)feed_.take();
    }
    feed_.send(window.batches[0]);
  }
  fed_window_ = -1;
  runner_.begin_window(seeds_a[0], step);
  for (int64_t m = 0; m < a; ++m) {
    runner_.begin_micro_step();
    runner_.set_seed(seeds_a[m]);
    const Batch batch = feed_.take();
    if (m + 1 < a) {
      feed_.send(window.batches[static_cast<size_t>(m + 1)]);
    } else if (const Window* next = around.upcoming ? around.upcoming() : nullptr; next != nullptr && placement_.device.is_cuda()) {
      feed_.send(next->batches[0]);
      fed_window_ = next->number;
    }
    algorithm_.micro_step(runner_, batch);
    mark(StepMark::forward_done);
    runner_.backward(/*boundary=*/m + 1 == a);
    mark(StepMark::backward_done);
  }
  const std::vector<at::Tensor> gradients = sharding_.end_window();
  at::Tensor norm = sharding_.gradient_norm(gradients);
  Transforms* transforms = runner_.transforms();
  at::Tensor alarms = transforms != nullptr ? transforms->alarms() : at::Tensor();
  if (alarms.defined()) {
    alarms = alarms.to(at::kDouble);
    if (placement_.comm != nullptr) {
      placement_.comm->all_reduce(alarms, Reduction::max, "alarms")->wait();
    }
    norm = at::where(alarms.any(), at::full({}, std::numeric_limits<float>::quiet_NaN(), norm.options()), norm);  // then there is no update
  }
  mark(StepMark::gradients_reduced);
  const at::Tensor total = pooled_a.sum().to(at::kFloat);
  if (around.before_update) {
    around.before_update();
  }
  if (runner_.take_weights_back()) {
    optimizer_.write_weights(gradients);
  }
  const at::Tensor updated = optimizer_.step(gradients, norm, total, learning_rate, runner_.touched_by_any());
  mark(StepMark::updated);
  if (placement_.comm != nullptr && step.wants_details) {
    runner_.pool_sums(*placement_.comm);
  }

  // The one host read of the window.
  const at::Tensor read = at::cat({at::stack({runner_.loss_sum().to(at::kDouble), norm.to(at::kDouble), total.to(at::kDouble), updated.to(at::kDouble)}), counts,
                                   alarms.defined() ? alarms : at::empty({0}, counts.options())})
                              .cpu();
  const double* values = read.const_data_ptr<double>();
  const std::vector<double> flags(values + 4 + counts.numel(), values + read.numel());
  const bool is_alarmed = std::any_of(flags.begin(), flags.end(), [](double flag) { return flag != 0; });
  return {.loss = values[0],
          .gradient_norm = values[1],
          .denominator = values[2],
          .updated = values[3] != 0,
          .stop = values[4] > 0,
          .samples = static_cast<int64_t>(values[5]),
          .tokens = static_cast<int64_t>(values[6]),
          .saves_settled = static_cast<int64_t>(values[7]),
          .alarm = is_alarmed ? transforms->alarm_text(flags) : std::string()};
}

}  // namespace sf
