#include "plugins/algorithm/dspark/metrics.hpp"

#include "plugins/algorithm/dspark/objective_unit.hpp"

#include <ATen/ATen.h>

namespace sf {

void report_sums(Runner& runner, const DsparkMetrics& in, const DsparkConfig& config, const DsparkOptions& options) {
  const auto sum = [&](int64_t which) { return in.sums[which]; };
  runner.add_metric("acc", sum(kSumHit), sum(kSumMask));
  runner.add_metric("ce_loss", sum(kSumToken), sum(kSumWeight));
  runner.add_metric("draft_top1_prob", sum(kSumDraftTop), sum(kSumMask));
  if (config.needs_teacher(options)) {
    runner.add_metric("l1_loss", sum(kSumDistance), sum(kSumWeight));
    runner.add_metric("teacher_agreement", sum(kSumAgreement), sum(kSumMask));
    runner.add_metric("teacher_top1_prob", sum(kSumTeacherTop), sum(kSumMask));
  }
  if (config.trains_confidence(options)) {
    runner.add_metric("confidence_loss", sum(kSumConfidence), sum(kSumWeight));
    runner.add_metric("confidence_abs_error", sum(kSumConfidenceError), sum(kSumWeight));
    runner.add_metric("confidence_bias", sum(kSumConfidenceBias), sum(kSumWeight));
  }
}

void report_details(Runner& runner, const DsparkMetrics& in, const DsparkConfig& config, const DsparkOptions& options) {
  draft::BlockMetrics details(runner, in.grid);
  const auto grid = [&](int64_t which) { return in.grids[which]; };
  const at::Tensor& supervised = details.supervised();
  const auto per_place = [&](const std::string& name, const at::Tensor& values_cp) {
    runner.add_metric(name, at::mul(values_cp, supervised).sum(0), supervised.sum(0));
  };
  per_place("ce", grid(kGridToken));
  per_place("accuracy", grid(kGridHit));
  // Along a chain of hits the token before each slot is the stored one, so the Markov head's own draft is what teacher forcing gives, up to and
  // with the first miss: the accepted length needs no second pass.
  const draft::Chain chain = details.chain(grid(kGridHit));
  details.walk("dspark/hard_label/walk_accepted_length", chain.length_c);
  if (config.needs_teacher(options)) {
    per_place("accept", grid(kGridAccept));
    details.length("tau_probabilistic", draft::chain_length(grid(kGridAccept), details.mask()));
  }
  if (config.trains_confidence(options)) {
    const at::Tensor confidence = grid(kGridConfidence);
    per_place("confidence/mean", confidence);
    per_place("confidence/bias", at::sub(confidence, grid(kGridAccept)));
    // Drafting stops before the first token whose chance to be reached and accepted, the product of confidences, lies below the threshold.
    const at::Tensor survival = confidence.cumprod(1);
    const at::Tensor drafted = at::mul(at::ge(survival, options.schedule_threshold), supervised).cumprod(1);
    const at::Tensor accepted = at::mul(chain.accepted_cp, drafted);
    details.length("confidence/expected_acceptance_length", draft::chain_length(confidence, details.mask()));
    details.length("schedule/acceptance_length", accepted.sum(1));
    runner.add_metric("schedule/drafted_tokens", drafted.sum(), details.blocks());
    runner.add_metric("schedule/hit_rate", accepted.sum(), drafted.sum());
  }
  details.acceptance(chain);
}

}  // namespace sf
