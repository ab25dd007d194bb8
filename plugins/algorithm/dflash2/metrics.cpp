#include "plugins/algorithm/dflash2/metrics.hpp"

#include "plugins/algorithm/dflash2/objective_unit.hpp"
#include "sdk/draft/acceptance.hpp"

#include <ATen/ATen.h>

#include <string>

namespace sf {
namespace {

// A ratio over all slots, and the same for each slot: "a/b/c" is reported per position as "b/c".
void report_slots(Runner& runner, const std::string& name, const at::Tensor& numerator_cp, const at::Tensor& denominator_cp) {
  runner.add_metric(name, numerator_cp.sum(), denominator_cp.sum());
  runner.add_metric(name.substr(name.find('/') + 1), numerator_cp.sum(0), denominator_cp.sum(0));
}

class Details {
 public:
  Details(Runner& runner, const MetricInputs& in) : runner_(runner), in_(in) {
    supervised_cp_ = at::gt(in.mask_cp, 0.5).to(at::kFloat);
    live_c_ = supervised_cp_.amax(1);
    blocks_ = live_c_.sum();
  }

  [[nodiscard]] at::Tensor grid(int64_t which) const { return in_.grids[which]; }
  [[nodiscard]] const at::Tensor& mask() const { return in_.mask_cp; }
  [[nodiscard]] const at::Tensor& supervised() const { return supervised_cp_; }
  [[nodiscard]] const at::Tensor& blocks() const { return blocks_; }
  [[nodiscard]] draft::Chain chain(int64_t which) const { return draft::follow_chain(grid(which), mask()); }

  // Share of M.
  void rate(const std::string& name, const at::Tensor& values_cp) { report_slots(runner_, name, at::mul(values_cp, mask()), mask()); }
  void rate_of(const std::string& name, const at::Tensor& numerator_cp, const at::Tensor& denominator_cp) {
    report_slots(runner_, name, numerator_cp, denominator_cp);
  }
  // 1 + mean number of accepted slots over blocks that have something to accept.
  void length(const std::string& name, const at::Tensor& accepted_c) {
    runner_.add_metric(name, at::add(blocks_, at::mul(accepted_c, live_c_).sum()), blocks_);
  }
  void walk(const std::string& name, const at::Tensor& accepted_c) {
    const int64_t b = in_.anchors_bw.size(0), w = in_.anchors_bw.size(1);
    // Blocks that fill up point at block 0 and are not live: they add nothing there.
    at::Tensor accepted = at::zeros({b * w}, accepted_c.options());
    at::Tensor live = at::zeros({b * w}, accepted_c.options());
    accepted.index_add_(0, in_.block_c, at::mul(accepted_c, live_c_));
    live.index_add_(0, in_.block_c, live_c_);
    const draft::Walk walked = draft::walk_blocks(accepted.view({b, w}), at::gt(live, 0).view({b, w}), in_.anchors_bw);
    runner_.add_metric(name, walked.total, walked.visits);
  }

 private:
  Runner& runner_;
  const MetricInputs& in_;
  at::Tensor supervised_cp_, live_c_, blocks_;
};

}  // namespace

void report_sums(Runner& runner, const MetricInputs& in, const DflashConfig& config, const DflashOptions& options) {
  const auto sum = [&](int64_t which) { return in.sums[which]; };
  const at::Tensor one = at::ones({}, in.sums.options());
  runner.add_metric("acc", sum(kSumHit), sum(kSumMask));
  runner.add_metric("target_probability", sum(kSumProbability), sum(kSumMask));
  runner.add_metric(options.lk == draft::Lk::none ? "ce_loss" : "lk_loss", sum(kSumToken), in.denominator);
  if (options.lk == draft::Lk::lambda) {
    runner.add_metric("objective/lk_kl_weight", sum(kSumKlWeight), one);
  }
  if (config.dflash2 && options.selector_loss_alpha > 0) {
    runner.add_metric("dflash2/selector/loss", sum(kSumSelector), sum(kSumSelectorWeight));
    runner.add_metric("dflash2/objective/weighted_covered_accuracy", sum(kSumSelectorHit), sum(kSumSelectorWeight));
    runner.add_metric("dflash2/selector/teacher_forced_covered_gold_probability", sum(kSumCoveredProbability), sum(kSumCovered));
    runner.add_metric("dflash2/selector/covered", sum(kSumCovered), sum(kSumMask));
    runner.add_metric("selector_loss_alpha", in.alpha, one);
  }
}

void report_details(Runner& runner, const MetricInputs& in, const DflashConfig& config, int64_t candidates) {
  Details details(runner, in);
  const std::string top = "top" + std::to_string(candidates);
  const at::Tensor hit = details.grid(kGridHit), covered = details.grid(kGridCovered), probability = details.grid(kGridProbability);
  const draft::Chain unary = details.chain(kGridHit), oracle = details.chain(kGridCovered);

  const std::string hard = "dflash/hard_label/";
  details.rate(hard + "unary_top1_accuracy", hit);
  details.rate(hard + "unary_probability", probability);
  details.rate(hard + "unary_" + top + "_recall", covered);
  details.rate(hard + "unary_" + top + "_mass", details.grid(kGridMass));
  details.length(hard + "unary_" + top + "_oracle_accepted_length", oracle.length_c);
  details.length(hard + "unary_gold_probability_chain_length", draft::chain_length(probability, details.mask()));
  details.length(hard + "unary_greedy_accepted_length", unary.length_c);
  details.length(hard + "supervised_prefix_length", details.supervised().cumprod(1).sum(1));
  details.walk(hard + "walk_accepted_length", unary.length_c);
  details.rate_of(hard + "unary_greedy_prefix_acceptance", unary.accepted_cp, unary.reached_cp);
  details.rate_of(hard + "unary_" + top + "_oracle_prefix_acceptance", oracle.accepted_cp, oracle.reached_cp);
  // Which part of the loss each slot carries, and how often a chain gets through it.
  const at::Tensor weight = details.grid(kGridWeight).sum(0);
  runner.add_metric("objective/loss_weight_share", weight, weight.sum().expand_as(weight));

  if (config.dflash2) {
    const draft::Chain greedy = details.chain(kGridGreedy);
    const std::string selector = "dflash2/selector/";
    details.length(selector + "greedy_accepted_length", greedy.length_c);
    details.rate(selector + "self_conditioned_marginal_accuracy", details.grid(kGridGreedy));
    const at::Tensor covered_mask = at::mul(covered, details.mask());
    details.rate_of(selector + "teacher_forced_covered_accuracy", at::mul(details.grid(kGridSelected), covered_mask), covered_mask);
    details.walk(selector + "walk_accepted_length", greedy.length_c);
    details.rate_of(selector + "greedy_prefix_acceptance", greedy.accepted_cp, greedy.reached_cp);
    const at::Tensor reached_covered = at::mul(greedy.reached_cp, covered);
    details.rate_of(selector + "greedy_prefix_unary_top1_accuracy", at::mul(greedy.reached_cp, hit), greedy.reached_cp);
    details.rate_of(selector + "greedy_prefix_" + top + "_recall", reached_covered, greedy.reached_cp);
    details.rate_of(selector + "greedy_prefix_covered_accuracy", greedy.accepted_cp, reached_covered);
    details.rate_of(selector + "greedy_prefix_coverage_miss_rate", at::sub(greedy.reached_cp, reached_covered), greedy.reached_cp);
    details.rate_of(selector + "greedy_prefix_ranking_error_rate", at::sub(reached_covered, greedy.accepted_cp), greedy.reached_cp);
  }

  // One definition for all drafts: drafting as decoding does it, over every block that may start.
  const draft::Chain drafted = details.chain(kGridGreedy);
  details.length("acceptance_length", drafted.length_c);
  runner.add_metric("acceptance/prefix_survival", drafted.accepted_cp.sum(0), details.blocks().expand({drafted.accepted_cp.size(1)}));
}

}  // namespace sf
