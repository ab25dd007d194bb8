// DSpark in decoding: a block at the known token, every row of which guesses the token after it, from left to right because the Markov head looks at the
// guess before; the confidence head says how far to try.
//
// Shapes: b sequences · k drafted tokens · h hidden · v vocabulary · x the Markov head's rank
#include "plugins/algorithm/dspark/dspark.hpp"
#include "plugins/algorithm/dspark/markov.hpp"
#include "plugins/algorithm/dspark/objective_unit.hpp"

#include <ATen/ATen.h>

namespace sf {

std::vector<std::string> Dspark::reads() const { return {"hidden_states"}; }

int64_t Dspark::drafted_tokens_at_most() const { return config_.block_size; }

void Dspark::remember(DraftUnits& units, DraftMemory& memory, const SeenTokens& seen) const { backbone_.remember(units, memory, seen); }

DraftAnswer Dspark::propose(DraftUnits& units, const DraftMemory& memory, const DraftQuestion& question) const {
  const at::Tensor rows_bjh = backbone_.draft_rows(units, memory, question);
  const int64_t b = rows_bjh.size(0), k = question.tokens, h = rows_bjh.size(2);
  UnitContext& context = units.context(backbone_.next_unit());
  const at::Tensor out_bkh =
      context.ops().rms_norm(rows_bjh.narrow(1, 0, k).contiguous(), context.parameter("norm.weight"), config_.layers.rms_norm_eps);
  const at::Tensor logits_bkv = at::matmul(out_bkh, backbone_.tables().head_vh.t());
  const bool has_markov = config_.markov_rank > 0, has_confidence = config_.confidence_head;
  at::Tensor previous_b = question.known_ids_b;
  std::vector<at::Tensor> ids, scores, embedded, confidence;
  for (int64_t slot = 0; slot < k; ++slot) {
    at::Tensor score_bv = logits_bkv.select(1, slot);
    if (has_markov) {
      embedded.push_back(context.parameter(kMarkovEmbedding).index_select(0, previous_b));
      // The rows of the block so far: a head with a state goes through them anew, which costs little beside the logits.
      const at::Tensor rows_r = at::arange(b * (slot + 1), previous_b.options());
      const at::Tensor bias = markov_bias(context, config_.markov_head,
                                          {.hidden_rh = out_bkh.narrow(1, 0, slot + 1).reshape({-1, h}),
                                           .embedded_rx = at::stack(embedded, 1).flatten(0, 1),
                                           .cell_r = rows_r,
                                           .c = b,
                                           .p = slot + 1})
                                  .view({b, slot + 1, -1})
                                  .select(1, slot);
      score_bv = at::add(score_bv, at::matmul(bias, context.parameter(kMarkovOutput).t()));
    }
    if (has_confidence) {
      const at::Tensor seen = config_.confidence_with_markov ? at::cat({out_bkh.select(1, slot), embedded.back()}, 1) : out_bkh.select(1, slot);
      confidence.push_back(context.linear(kConfidence, seen).squeeze(1).to(at::kFloat).sigmoid());
    }
    previous_b = score_bv.argmax(-1);
    ids.push_back(previous_b);
    scores.push_back(score_bv);
  }
  DraftAnswer answer;
  answer.ids_bk = at::stack(ids, 1);
  if (has_confidence) {  // the product of confidences is the chance that a guess is reached and right
    answer.advised_b = at::ge(at::stack(confidence, 1).cumprod(1), options_.schedule_threshold).to(at::kLong).cumprod(1).sum(1);
  }
  if (question.wants_scores) {
    answer.scores_bkv = at::stack(scores, 1).to(at::kFloat);
    if (has_confidence) {  // a column more, so that a difference in it shows
      answer.scores_bkv = at::cat({answer.scores_bkv, at::stack(confidence, 1).unsqueeze(2)}, 2);
    }
  }
  return answer;
}

}  // namespace sf
