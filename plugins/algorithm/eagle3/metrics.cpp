#include "plugins/algorithm/eagle3/metrics.hpp"

#include "sdk/draft/block_metrics.hpp"

#include <ATen/ATen.h>

namespace sf {

void report_uses(Runner& runner, const UnrollOutcome& outcome) {
  const at::Tensor& weight = outcome.divisor;
  for (size_t k = 0; k < outcome.uses.size(); ++k) {
    const UseOutcome& use = outcome.uses[k];
    const std::string suffix = "_" + std::to_string(k);
    const at::Tensor correct = at::mul(at::eq(use.guess_r, outcome.teacher_r), use.mask_r).sum(), count = use.mask_r.sum();
    runner.add_metric("acc" + suffix, correct, count);
    runner.add_metric("acc", correct, count);
    runner.add_metric("ploss" + suffix, at::mul(use.step_loss, weight), weight);
    runner.add_metric("acceptance_rate" + suffix, at::mul(use.acceptance, weight), weight);
    runner.add_metric("acceptance_rate", at::mul(use.acceptance, weight), weight);
  }
}

void report_chains(Runner& runner, const UnrollOutcome& outcome, const ChainPlaces& chains) {
  std::vector<at::Tensor> hits;
  for (size_t k = 0; k < outcome.uses.size(); ++k) {
    hits.push_back(at::eq(outcome.uses[k].guess_r, chains.label_r).index_select(0, chains.row_cp.select(1, static_cast<int64_t>(k))));
  }
  const draft::Chain chain = draft::follow_chain(at::stack(hits, 1), chains.mask_cp);
  const at::Tensor every_place = at::arange(chains.s, chains.place_c.options()).expand({chains.b, chains.s});
  const draft::BlockGrid grid{.mask_cp = chains.mask_cp, .block_c = chains.place_c, .anchors_bw = every_place};
  draft::BlockMetrics(runner, grid).acceptance(chain);
}

void derive_unroll_metrics(std::map<std::string, double>& metrics, int64_t uses) {
  double survival = 1, length = 0;
  for (int64_t k = 0; k < uses; ++k) {
    const auto found = metrics.find("acc_" + std::to_string(k));
    if (found == metrics.end()) {
      return;
    }
    survival *= found->second;
    length += survival;
  }
  metrics["simulated_acc_len"] = length;
}

}  // namespace sf
