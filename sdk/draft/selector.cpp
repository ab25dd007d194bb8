#include "sdk/draft/selector.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <vector>

namespace sf::draft {

at::Tensor selector_scores(const at::Tensor& values_rk, const at::Tensor& context_rx, const at::Tensor& candidate_rows_rkx) {
  const at::Tensor dots = at::bmm(candidate_rows_rkx, context_rx.unsqueeze(-1)).squeeze(-1);
  return at::add(values_rk, dots.to(values_rk.scalar_type()));
}

SelectorLoss selector_loss(const at::Tensor& scores_rk, const at::Tensor& ids_rk, const at::Tensor& label_r) {
  const at::Tensor is_label = at::eq(ids_rk, label_r.unsqueeze(1));
  SelectorLoss result;
  result.covered_r = is_label.any(1);
  const at::Tensor target = is_label.to(at::kByte).argmax(1, true);  // 0 when there is none
  result.cross_entropy_r = at::sub(scores_rk.logsumexp(1), scores_rk.gather(1, target).squeeze(1));
  result.hit_r = at::eq(ids_rk.gather(1, scores_rk.detach().argmax(1, true)).squeeze(1), label_r);
  return result;
}

at::Tensor selector_path(const at::Tensor& values_cpk, const at::Tensor& ids_cpk, const at::Tensor& projected_cpx,
                         const at::Tensor& predecessor_table_vx, const at::Tensor& successor_table_vx, const at::Tensor& anchor_token_c) {
  const int64_t c = values_cpk.size(0), p = values_cpk.size(1), k = values_cpk.size(2);
  at::Tensor previous = anchor_token_c;
  std::vector<at::Tensor> path;
  for (int64_t slot = 0; slot < p; ++slot) {
    const at::Tensor ids = ids_cpk.select(1, slot);
    const at::Tensor context = at::mul(predecessor_table_vx.index_select(0, previous), projected_cpx.select(1, slot));
    const at::Tensor rows = successor_table_vx.index_select(0, ids.reshape({-1})).view({c, k, -1});
    const at::Tensor scores = selector_scores(values_cpk.select(1, slot), context, rows);
    previous = ids.gather(1, scores.argmax(1, true)).squeeze(1);
    path.push_back(previous);
  }
  return at::stack(path, 1);
}

double selector_alpha(double alpha, double warmup_ratio, double ramp_ratio, int64_t update, int64_t updates_total) {
  if (updates_total <= 0) {
    return alpha;
  }
  const auto warm = static_cast<int64_t>(static_cast<double>(updates_total) * warmup_ratio);
  const auto ramp = static_cast<int64_t>(static_cast<double>(updates_total) * ramp_ratio);
  if (update < warm) {
    return 0;
  }
  if (ramp <= 0) {
    return alpha;
  }
  return alpha * std::clamp(static_cast<double>(update - warm + 1) / static_cast<double>(ramp), 0.0, 1.0);
}

}  // namespace sf::draft
