#include "sdk/draft/objective.hpp"

#include <ATen/ATen.h>

#include <limits>

namespace sf::draft {

at::Tensor position_decay(const at::Tensor& slot_r, double gamma) {
  if (gamma <= 0) {
    return at::ones(slot_r.sizes(), slot_r.options().dtype(at::kFloat));
  }
  return slot_r.sub(1).to(at::kFloat).div(-gamma).exp();
}

at::Tensor dpace_weights(const at::Tensor& probability_cp, const at::Tensor& mask_cp, double alpha, Dpace kind) {
  const at::Tensor p = probability_cp.detach();
  const at::Tensor s = at::where(at::gt(mask_cp, 0), at::mul(p, 1 - alpha).add(alpha), at::ones_like(p));
  const at::Tensor before = s.cumprod(1);
  if (kind == Dpace::confidence) {
    return at::mul(before, mask_cp);
  }
  const at::Tensor after = at::mul(before, mask_cp).flip({1}).cumsum(1).flip({1});
  if (kind == Dpace::both) {
    return at::mul(after, mask_cp);
  }
  return at::div(after, before.clamp_min(std::numeric_limits<float>::min())).mul(mask_cp);
}

at::Tensor lambda_weight(const at::Tensor& probability_sum, const at::Tensor& mask_sum, double kl_scale, double kl_decay) {
  return at::div(probability_sum, mask_sum.clamp_min(1)).detach().mul(-kl_decay).exp().mul(kl_scale);
}

at::Tensor token_objective(const at::Tensor& nll_r, const at::Tensor& weight_r, Lk kind, const at::Tensor& kl_weight) {
  if (kind == Lk::none || kind == Lk::alpha) {
    return at::mul(nll_r, weight_r).sum();
  }
  const at::Tensor variation = at::mul(nll_r.neg().exp().neg().add(1), weight_r).sum();
  if (kind == Lk::total_variation) {
    return variation;
  }
  return at::add(at::mul(at::mul(nll_r, weight_r).sum(), kl_weight), at::mul(variation, kl_weight.neg().add(1)));
}

}  // namespace sf::draft
