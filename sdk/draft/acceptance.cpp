#include "sdk/draft/acceptance.hpp"

#include <ATen/ATen.h>

namespace sf::draft {

Chain follow_chain(const at::Tensor& hit_cp, const at::Tensor& mask_cp) {
  const at::Tensor supervised = at::gt(mask_cp, 0.5);
  Chain chain;
  chain.accepted_cp = at::logical_and(hit_cp.to(at::kBool), supervised).to(at::kFloat).cumprod(1);
  const int64_t c = chain.accepted_cp.size(0), p = chain.accepted_cp.size(1);
  const at::Tensor before = at::cat({at::ones({c, 1}, chain.accepted_cp.options()), chain.accepted_cp.narrow(1, 0, p - 1)}, 1);
  chain.reached_cp = at::mul(before, supervised);
  chain.length_c = chain.accepted_cp.sum(1);
  return chain;
}

at::Tensor chain_length(const at::Tensor& probability_cp, const at::Tensor& mask_cp) {
  return at::mul(probability_cp, at::gt(mask_cp, 0.5)).cumprod(1).sum(1);
}

Walk walk_blocks(const at::Tensor& length_bw, const at::Tensor& supervised_bw, const at::Tensor& anchors_bw) {
  const int64_t b = length_bw.size(0), w = length_bw.size(1);
  at::Tensor resume = at::zeros({b}, anchors_bw.options());
  Walk walk{at::zeros({}, length_bw.options()), at::zeros({}, length_bw.options())};
  for (int64_t slot = 0; slot < w; ++slot) {
    const at::Tensor anchor = anchors_bw.select(1, slot);
    const at::Tensor visit = at::logical_and(supervised_bw.select(1, slot), at::ge(anchor, resume));
    const at::Tensor step = length_bw.select(1, slot).add(1);
    walk.total.add_(at::mul(step, visit).sum());
    walk.visits.add_(visit.sum());
    resume = at::where(visit, anchor.add(step.to(at::kLong)), resume);
  }
  return walk;
}

}  // namespace sf::draft
