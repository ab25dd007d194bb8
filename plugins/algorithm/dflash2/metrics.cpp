#include "plugins/algorithm/dflash2/metrics.hpp"

#include "plugins/algorithm/dflash2/objective_unit.hpp"
#include "sdk/draft/acceptance.hpp"

#include <ATen/ATen.h>

#include <string>

namespace sf {
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
  draft::BlockMetrics details(runner, in.grid);
  const auto grid = [&](int64_t which) { return in.grids[which]; };
  const std::string top = "top" + std::to_string(candidates);
  const at::Tensor hit = grid(kGridHit), covered = grid(kGridCovered), probability = grid(kGridProbability);
  const draft::Chain unary = details.chain(grid(kGridHit)), oracle = details.chain(grid(kGridCovered));

  const std::string hard = "dflash/hard_label/";
  details.rate(hard + "unary_top1_accuracy", hit);
  details.rate(hard + "unary_probability", probability);
  details.rate(hard + "unary_" + top + "_recall", covered);
  details.rate(hard + "unary_" + top + "_mass", grid(kGridMass));
  details.length(hard + "unary_" + top + "_oracle_accepted_length", oracle.length_c);
  details.length(hard + "unary_gold_probability_chain_length", draft::chain_length(probability, details.mask()));
  details.length(hard + "unary_greedy_accepted_length", unary.length_c);
  details.length(hard + "supervised_prefix_length", details.supervised().cumprod(1).sum(1));
  details.walk(hard + "walk_accepted_length", unary.length_c);
  details.report_chain(hard + "unary_greedy", unary);
  details.report_chain(hard + "unary_" + top + "_oracle", oracle);
  details.count(hard + "supervised_count", details.supervised());
  details.count(hard + "valid_prefix_count", details.supervised().cumprod(1));
  runner.add_count(hard + "block_count", details.blocks());
  // Which part of the loss each slot carries, and how often a chain gets through it.
  const at::Tensor weight = grid(kGridWeight).sum(0);
  runner.add_metric("objective/loss_weight_share", weight, weight.sum().expand_as(weight));

  if (config.dflash2) {
    const draft::Chain greedy = details.chain(grid(kGridGreedy));
    const std::string selector = "dflash2/selector/";
    details.length(selector + "greedy_accepted_length", greedy.length_c);
    details.rate(selector + "self_conditioned_marginal_accuracy", grid(kGridGreedy));
    const at::Tensor covered_mask = at::mul(covered, details.mask());
    details.rate_of(selector + "teacher_forced_covered_accuracy", at::mul(grid(kGridSelected), covered_mask), covered_mask);
    details.walk(selector + "walk_accepted_length", greedy.length_c);
    details.report_chain(selector + "greedy", greedy);
    const at::Tensor reached_covered = at::mul(greedy.reached_cp, covered);
    details.rate_of(selector + "greedy_prefix_unary_top1_accuracy", at::mul(greedy.reached_cp, hit), greedy.reached_cp);
    details.rate_of(selector + "greedy_prefix_" + top + "_recall", reached_covered, greedy.reached_cp);
    details.rate_of(selector + "greedy_prefix_covered_accuracy", greedy.accepted_cp, reached_covered);
    const at::Tensor missed = at::sub(greedy.reached_cp, reached_covered), misranked = at::sub(reached_covered, greedy.accepted_cp);
    details.rate_of(selector + "greedy_prefix_coverage_miss_rate", missed, greedy.reached_cp);
    details.rate_of(selector + "greedy_prefix_ranking_error_rate", misranked, greedy.reached_cp);
    details.count(selector + "greedy_covered_count", reached_covered);
    details.count(selector + "greedy_coverage_miss_count", missed);
    details.count(selector + "greedy_ranking_error_count", misranked);
  }

  if (in.grids.size(0) > kObjectiveGrids) {
    // Against the target's own distribution instead of the stored token: the overlap is what rejection sampling would accept.
    const std::string teacher = "dflash/teacher/";
    const at::Tensor overlap = grid(kGridTeacherOverlap);
    details.rate(teacher + "overlap", overlap);
    details.rate(teacher + "top1_agreement", grid(kGridTeacherAgreement));
    details.rate(teacher + top + "_mass", grid(kGridTeacherMass));
    details.length(teacher + "overlap_chain_length", draft::chain_length(overlap, details.mask()));
  }

  // One definition for all drafts: drafting as decoding does it, over every block that may start.
  details.acceptance(details.chain(grid(kGridGreedy)));
}

}  // namespace sf
