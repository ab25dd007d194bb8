#include "core/train/optimizer.hpp"

#include <ATen/ATen.h>

#include "core/base/error.hpp"
#include "core/kernels/cuda_library.hpp"

namespace sf {

AdamW::AdamW(std::vector<Shard>& shards, AdamWOptions options) : shards_(shards), options_(options) {
  for (size_t i = 0; i < shards_.size(); ++i) {
    if (!shards_[i].trainable) {
      continue;
    }
    const at::Tensor& local = shards_[i].local;
    ShardState state;
    state.shard = i;
    state.master = local.scalar_type() == at::kFloat ? local : local.to(at::kFloat);
    state.exp_avg = at::zeros_like(state.master);
    state.exp_avg_sq = at::zeros_like(state.master);
    state.steps = at::zeros({}, state.master.options());
    states_.push_back(std::move(state));
  }
}

void AdamW::reload_masters() {
  for (ShardState& state : states_) {
    const at::Tensor& local = shards_[state.shard].local;
    if (!state.master.is_same(local)) {
      state.master.copy_(local);
    }
  }
}

void AdamW::write_weights(const std::vector<at::Tensor>& gradients) {
  at::NoGradGuard no_grad;
  for (const ShardState& state : states_) {
    at::Tensor& local = shards_[state.shard].local;
    if (!state.master.is_same(local) && (gradients.empty() || !gradients[state.shard].defined())) {
      local.copy_(state.master);
    }
  }
}

at::Tensor AdamW::step(const std::vector<at::Tensor>& gradients, const at::Tensor& norm, const at::Tensor& denominator, double learning_rate,
                       const std::vector<at::Tensor>& touched) {
  at::NoGradGuard no_grad;
  struct Kept {
    at::Tensor tensor, before, is_touched;
  };
  std::vector<Kept> kept;  // of parameters that may turn out to have no gradient; few and small ones are declared idle
  for (ShardState& state : states_) {
    if (touched.empty() || !touched[state.shard].defined() || !gradients[state.shard].defined()) {
      continue;
    }
    at::Tensor& local = shards_[state.shard].local;
    std::vector<at::Tensor> tensors = {state.exp_avg, state.exp_avg_sq, state.steps, state.master};
    if (!state.master.is_same(local)) {
      tensors.push_back(local);
    }
    for (const at::Tensor& tensor : tensors) {
      kept.push_back({.tensor = tensor, .before = tensor.clone(), .is_touched = touched[state.shard]});
    }
  }
  const at::Tensor ok = update(gradients, norm, denominator, learning_rate);
  for (Kept& one : kept) {
    one.tensor.copy_(at::where(one.is_touched, one.tensor, one.before));
  }
  return ok;
}

at::Tensor AdamW::update(const std::vector<at::Tensor>& gradients, const at::Tensor& norm, const at::Tensor& denominator, double learning_rate) {
  SF_CHECK(gradients.size() == shards_.size(), "{} gradients for {} shards", gradients.size(), shards_.size());
  const at::Tensor ok = at::isfinite(norm).logical_and(at::isfinite(denominator)).logical_and(denominator > 0);
  if (step_on_kernels(gradients, norm, denominator, ok, learning_rate)) {
    return ok;
  }
  const at::Tensor skip = ok.logical_not().to(at::kFloat);
  // The fused kernel divides gradients by a scale: 1 / clip. Never below 1, so a bad norm can't make it overflow before it is skipped.
  const at::Tensor scale = at::nan_to_num(((norm + 1e-6) / options_.max_grad_norm).clamp_min(1.0), 1.0, 1.0);

  std::vector<at::Tensor> masters, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, updated_steps;
  std::vector<const ShardState*> updated;
  for (const ShardState& state : states_) {
    const at::Tensor& gradient = gradients[state.shard];
    if (!gradient.defined()) {
      continue;
    }
    steps.push_back(state.steps);
    if (gradient.numel() == 0) {  // this rank holds nothing of it; its update counts all the same
      continue;
    }
    masters.push_back(state.master);
    grads.push_back(gradient.scalar_type() == at::kFloat ? gradient : gradient.to(at::kFloat));
    exp_avgs.push_back(state.exp_avg);
    exp_avg_sqs.push_back(state.exp_avg_sq);
    updated_steps.push_back(state.steps);
    updated.push_back(&state);
  }
  if (steps.empty()) {
    return ok;
  }
  at::_foreach_add_(steps, 1.0 - skip);
  if (masters.empty()) {
    return ok;
  }
  at::_fused_adamw_(masters, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, updated_steps, learning_rate, options_.beta1, options_.beta2,
                    options_.weight_decay, options_.eps, /*amsgrad=*/false, /*maximize=*/false, /*grad_scale=*/scale,
                    /*found_inf=*/skip);
  for (const ShardState* state : updated) {
    at::Tensor& local = shards_[state->shard].local;
    if (!state->master.is_same(local)) {
      local.copy_(state->master);
    }
  }
  return ok;
}

// One pass over memory. False when the shards are not on a GPU with kernels.
bool AdamW::step_on_kernels(const std::vector<at::Tensor>& gradients, const at::Tensor& norm, const at::Tensor& denominator, const at::Tensor& ok,
                            double learning_rate) {
  std::vector<cuda::AdamwTensor> tensors;
  std::vector<at::Tensor> alive;    // made here, until the launch
  std::vector<at::Tensor> counted;  // of shards of which this rank holds nothing; their updates count all the same, and rank 0 saves the count
  for (ShardState& state : states_) {
    const at::Tensor& gradient = gradients[state.shard];
    if (!gradient.defined()) {
      continue;
    }
    if (gradient.numel() == 0) {
      counted.push_back(state.steps);
      continue;
    }
    at::Tensor& local = shards_[state.shard].local;
    const bool is_master = state.master.is_same(local);
    if (!has_kernels({state.master}) || !state.master.is_contiguous() || (!is_master && (local.scalar_type() != at::kBFloat16 || !local.is_contiguous()))) {
      return false;
    }
    alive.push_back(whole(gradient.to(at::kFloat)));
    tensors.push_back({.count = state.master.numel(), .master = state.master.data_ptr<float>(), .gradient = alive.back().const_data_ptr<float>(),
                       .exp_avg = state.exp_avg.data_ptr<float>(), .exp_avg_sq = state.exp_avg_sq.data_ptr<float>(),
                       .steps = state.steps.data_ptr<float>(), .weight = is_master ? nullptr : local.mutable_data_ptr()});
  }
  if (tensors.empty()) {
    return false;
  }
  const at::Tensor norm_float = norm.to(at::kFloat), denominator_float = denominator.to(at::kFloat);
  check_launch("optimizer step",
               cuda_launchers()->adamw({.tensors = tensors.data(), .tensors_count = static_cast<int64_t>(tensors.size()),
                                        .norm = norm_float.const_data_ptr<float>(), .denominator = denominator_float.const_data_ptr<float>(),
                                        .max_norm = options_.max_grad_norm, .learning_rate = learning_rate, .beta1 = options_.beta1, .beta2 = options_.beta2,
                                        .eps = options_.eps, .weight_decay = options_.weight_decay},
                                       stream_of(norm_float)));
  if (!counted.empty()) {
    at::_foreach_add_(counted, ok.to(at::kFloat));
  }
  return true;
}

int64_t AdamW::bytes() const {
  int64_t bytes = 0;
  for (const ShardState& state : states_) {
    const bool owns_master = !state.master.is_same(shards_[state.shard].local);
    bytes += static_cast<int64_t>(state.exp_avg.nbytes() + state.exp_avg_sq.nbytes() + (owns_master ? state.master.nbytes() : 0));
  }
  return bytes;
}

}  // namespace sf
