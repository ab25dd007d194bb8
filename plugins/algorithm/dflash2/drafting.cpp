// DFlash and DFlash2 in decoding: a block at the known token, whose other slots are the guesses; DFlash2's selector walks from slot to slot.
//
// Shapes: b sequences · k drafted tokens · h hidden · v vocabulary · c candidates · x the selector's rank
#include "plugins/algorithm/dflash2/dflash.hpp"
#include "plugins/algorithm/dflash2/objective_unit.hpp"
#include "sdk/draft/selector.hpp"

#include <ATen/ATen.h>

namespace sf {

std::vector<std::string> Dflash::reads() const { return {"hidden_states"}; }

int64_t Dflash::drafted_tokens_at_most() const { return config_.block_size - 1; }

void Dflash::remember(DraftUnits& units, DraftMemory& memory, const SeenTokens& seen) const { backbone_.remember(units, memory, seen); }

DraftAnswer Dflash::propose(DraftUnits& units, const DraftMemory& memory, const DraftQuestion& question) const {
  const at::Tensor rows_bjh = backbone_.draft_rows(units, memory, question);
  const int64_t b = rows_bjh.size(0), k = question.tokens;
  UnitContext& context = units.context(backbone_.next_unit());
  const at::Tensor out_bkh =
      context.ops().rms_norm(rows_bjh.narrow(1, 1, k).contiguous(), context.parameter("norm.weight"), config_.layers.rms_norm_eps);
  at::Tensor logits_bkv = at::matmul(out_bkh, backbone_.tables().head_vh.t()).to(at::kFloat).mul_(config_.output_multiplier);
  if (config_.final_logit_softcapping > 0) {
    logits_bkv = at::tanh(logits_bkv / config_.final_logit_softcapping).mul_(config_.final_logit_softcapping);
  }
  DraftAnswer answer;
  if (!config_.dflash2) {
    answer.ids_bk = logits_bkv.argmax(-1);
  } else {
    const auto [values_bkc, ids_bkc] = logits_bkv.topk(config_.selector_top_k, -1);
    const at::Tensor projected_bkx = context.linear(kProjection, out_bkh);
    const at::Tensor &before = context.parameter(kPredecessor), &after = context.parameter(kSuccessor);
    answer.ids_bk = draft::selector_path(values_bkc, ids_bkc, projected_bkx, before, after, question.known_ids_b);
    if (question.wants_scores) {  // the candidates' own, with the tokens before them that the path has taken
      const at::Tensor previous = at::cat({question.known_ids_b.unsqueeze(1), answer.ids_bk.narrow(1, 0, k - 1)}, 1).reshape({-1});
      const int64_t c = ids_bkc.size(2);
      const at::Tensor scores = draft::selector_scores(values_bkc.reshape({-1, c}), before.index_select(0, previous) * projected_bkx.flatten(0, 1),
                                                       after.index_select(0, ids_bkc.reshape({-1})).view({b * k, c, -1}));
      logits_bkv.scatter_(2, ids_bkc, scores.view({b, k, c}));
    }
  }
  if (question.wants_scores) {
    answer.scores_bkv = logits_bkv;
  }
  return answer;
}

}  // namespace sf
