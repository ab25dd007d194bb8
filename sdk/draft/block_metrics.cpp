#include "sdk/draft/block_metrics.hpp"

#include <ATen/ATen.h>

namespace sf::draft {

BlockMetrics::BlockMetrics(Runner& runner, const BlockGrid& grid) : runner_(runner), grid_(grid) {
  supervised_cp_ = at::gt(grid.mask_cp, 0.5).to(at::kFloat);
  live_c_ = supervised_cp_.amax(1);
  blocks_ = live_c_.sum();
}

void BlockMetrics::rate_of(const std::string& name, const at::Tensor& numerator_cp, const at::Tensor& denominator_cp) {
  runner_.add_metric(name, numerator_cp.sum(), denominator_cp.sum());
  runner_.add_metric(name.substr(name.find('/') + 1), numerator_cp.sum(0), denominator_cp.sum(0));
}

void BlockMetrics::rate(const std::string& name, const at::Tensor& values_cp) { rate_of(name, at::mul(values_cp, mask()), mask()); }

void BlockMetrics::count(const std::string& name, const at::Tensor& values_cp) {
  runner_.add_count(name, values_cp.sum());
  runner_.add_count(name.substr(name.find('/') + 1), values_cp.sum(0));
}

void BlockMetrics::report_chain(const std::string& name, const Chain& chain) {
  rate_of(name + "_prefix_acceptance", chain.accepted_cp, chain.reached_cp);
  count(name + "_reached_count", chain.reached_cp);
  count(name + "_accepted_count", chain.accepted_cp);
  count(name + "_first_failure_count", at::sub(chain.reached_cp, chain.accepted_cp));
  const at::Tensor survived = chain.accepted_cp.sum(0);
  runner_.add_metric(name.substr(name.find('/') + 1) + "_prefix_survival", survived, blocks_.expand_as(survived));
}

void BlockMetrics::length(const std::string& name, const at::Tensor& accepted_c) {
  runner_.add_metric(name, at::add(blocks_, at::mul(accepted_c, live_c_).sum()), blocks_);
}

void BlockMetrics::walk(const std::string& name, const at::Tensor& accepted_c) {
  const int64_t b = grid_.anchors_bw.size(0), w = grid_.anchors_bw.size(1);
  // Blocks that fill up point at block 0 and are not live: they add nothing there.
  at::Tensor accepted = at::zeros({b * w}, accepted_c.options());
  at::Tensor live = at::zeros({b * w}, accepted_c.options());
  accepted.index_add_(0, grid_.block_c, at::mul(accepted_c, live_c_));
  live.index_add_(0, grid_.block_c, live_c_);
  const Walk walked = walk_blocks(accepted.view({b, w}), at::gt(live, 0).view({b, w}), grid_.anchors_bw);
  runner_.add_metric(name, walked.total, walked.visits);
}

void BlockMetrics::acceptance(const Chain& drafted) {
  length("acceptance_length", drafted.length_c);
  runner_.add_metric("acceptance/prefix_survival", drafted.accepted_cp.sum(0), blocks_.expand({drafted.accepted_cp.size(1)}));
  walk("acceptance/walk_length", drafted.length_c);
}

}  // namespace sf::draft
