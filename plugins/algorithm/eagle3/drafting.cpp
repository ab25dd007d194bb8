// EAGLE3 in decoding (unroll_rows.hpp says what stands where): keys and values of the first use are kept for every token that the target has gone through; a
// chain starts on the last of these rows and takes its own output and its own guesses from then on.
//
// Shapes: b sequences · t tokens · h hidden · k uses · w draft vocabulary
#include "plugins/algorithm/eagle3/eagle3.hpp"
#include "plugins/algorithm/eagle3/units.hpp"
#include "sdk/draft/block.hpp"
#include "sdk/draft/draft_memory.hpp"
#include "sdk/draft/unroll_chain.hpp"

#include <ATen/ATen.h>

namespace sf {
namespace {

constexpr const char* kFeatures = "aux_hidden_state";
constexpr const char* kKeys = "keys";
constexpr const char* kValues = "values";
constexpr const char* kState = "state";  // of the last token that the target has gone through, [b, h]

}  // namespace

std::vector<std::string> Eagle3::reads() const { return {kFeatures}; }

int64_t Eagle3::drafted_tokens_at_most() const { return 0; }

at::Tensor Eagle3::embedded(DraftUnits& units, const at::Tensor& ids) const {
  if (options_.train_embedding) {
    return units.run(kEmbedding, {ids})[0];
  }
  std::vector<int64_t> shape = ids.sizes().vec();
  shape.push_back(config_.layers.hidden_size);
  return tables_.embedding_vh.index_select(0, ids.reshape({-1})).view(shape);
}

void Eagle3::remember(DraftUnits& units, DraftMemory& memory, const SeenTokens& seen) const {
  const at::Tensor states_bth = units.run(kFusion, {seen.features.at(kFeatures)})[0];
  const at::Tensor positions_bt = at::add(seen.starts_b.unsqueeze(1), at::arange(states_bth.size(1), seen.starts_b.options())).to(states_bth.device());
  const draft::Angles angles = draft::rope_angles(positions_bt, inverse_frequencies_, config_.layers.rope.attention_scaling);
  const draft::UnrollKeys made = draft::unroll_keys(units.context(kMidlayer), draft::unroll_block_shape(config_.layers), states_bth,
                                                    embedded(units, seen.next_ids_bt), angles.cos, angles.sin);
  draft::put_rows(memory, kKeys, made.keys_btme, seen);
  draft::put_rows(memory, kValues, made.values_btme, seen);
  memory.tensors[kState] = draft::last_rows(states_bth, seen.counts_b);
}

DraftAnswer Eagle3::propose(DraftUnits& units, const DraftMemory& memory, const DraftQuestion& question) const {
  UnitContext& objective = units.context(kObjective);
  const int64_t longest = question.positions_b.max().item<int64_t>();
  draft::ChainSight sight{.keys_bcme = memory.tensors.at(kKeys).narrow(1, 0, longest),
                          .values_bcme = memory.tensors.at(kValues).narrow(1, 0, longest),
                          .counts_b = question.positions_b};
  at::Tensor states = memory.tensors.at(kState).unsqueeze(1), ids_b = question.known_ids_b;
  std::vector<at::Tensor> ids, scores;
  for (int64_t use = 0; use < question.tokens; ++use) {
    const at::Tensor position_b1 = at::add(question.positions_b, use - 1).unsqueeze(1);
    const draft::Angles angles = draft::rope_angles(position_b1, inverse_frequencies_, config_.layers.rope.attention_scaling);
    states = draft::unroll_row(units.context(kMidlayer), draft::unroll_block_shape(config_.layers), states, embedded(units, ids_b.unsqueeze(1)), angles.cos,
                               angles.sin, use == 0, sight);
    const at::Tensor rows = config_.norm_output
                                ? objective.ops().rms_norm(states.squeeze(1).contiguous(), objective.parameter("norm.weight"), config_.layers.rms_norm_eps)
                                : states.squeeze(1);
    const at::Tensor logits_bw = objective.linear("lm_head", rows);
    ids_b = kept_w_.index_select(0, logits_bw.argmax(-1));
    ids.push_back(ids_b);
    if (question.wants_scores) {
      scores.push_back(logits_bw.to(at::kFloat));
    }
  }
  DraftAnswer answer;
  answer.ids_bk = at::stack(ids, 1);
  if (question.wants_scores) {
    answer.scores_bkv = at::stack(scores, 1);
  }
  return answer;
}

}  // namespace sf
