// core/train/speculative.hpp: speculative decoding, greedy and native, of a group of prompts side by side, and plain decoding beside it.
//
// A pass: the draft guesses k tokens behind the last known one; the target looks at all of them at once; the leading guesses that are its own choice are taken,
// and the token that it chose behind them comes on top. So a pass gives 1 to k + 1 tokens, and what comes out is what the target alone would say. "Would say" up to
// rounding: products of another shape round otherwise, and where two tokens are equally good to within that, either is right. judge_difference() tells the two
// cases apart.
//
// Shapes: b sequences · t tokens · k drafted tokens · h hidden · v vocabulary
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/model/prompts.hpp"
#include "core/model/target.hpp"
#include "core/train/loaded_draft.hpp"

namespace sf {

/// A draft that is ready to guess.
struct DecodingDraft {
  std::string name;
  Algorithm* algorithm = nullptr;
  const Drafter* drafter = nullptr;
  DraftUnits* units = nullptr;
  Description description;
  int64_t tokens = 0;          // drafted in a pass
  bool use_schedule = false;
};

struct DecodingLimits {
  int64_t max_new_tokens = 64;
  int64_t context_tokens = 0;  // 0: no limit
  std::vector<int64_t> stop_tokens;
};

/// One pass of the target with one sequence's guesses.
struct SpeculativePass {
  int64_t prompt = 0;
  int64_t judged = 0;          // guesses that the target looked at, without those behind the token that ended the answer: nothing says whether they were right
  int64_t accepted = 0;        // of them; not more than the answer still had room for
  int64_t advised = -1;        // how many the draft would have tried; -1: it does not say
};

struct DecodingResult {
  std::vector<std::vector<int64_t>> answers;   // by prompt, without the prompt, the stop token included
  std::vector<SpeculativePass> passes;         // of a speculative run
  int64_t tokens = 0;                          // by decoding, so without each answer's first, which the prompt's pass gives
  int64_t target_passes = 0;                   // of a batch
  double draft_seconds = 0, target_seconds = 0;
  void add(DecodingResult other);
};

/// Prompts that are decoded together, their prompt pass done once for plain decoding and all drafts.
class PromptGroup {
 public:
  /// `layer_ids`: the target's layers that any draft reads, ascending.
  PromptGroup(const Target& target, std::vector<Prompt> prompts, int64_t first_prompt, const DecodingLimits& limits, std::vector<int64_t> layer_ids,
              int64_t room_tokens);

  [[nodiscard]] DecodingResult plain() const;
  [[nodiscard]] DecodingResult speculative(const DecodingDraft& draft) const;
  [[nodiscard]] const std::vector<Prompt>& prompts() const { return prompts_; }

 private:
  [[nodiscard]] int64_t limit_of(size_t row) const;
  [[nodiscard]] bool is_done(size_t row, const std::vector<int64_t>& answer) const;

  const Target& target_;
  std::vector<Prompt> prompts_;
  int64_t first_prompt_;
  const DecodingLimits& limits_;
  std::vector<int64_t> layer_ids_;
  KeyValueCache cache_;
  std::vector<at::Tensor> layers_bth_;   // of the prompts, by layer_ids_
  at::Tensor prompt_ids_bt_;             // on the CPU
  std::vector<int64_t> first_tokens_;
};

/// The captured states of the layers that a feature consists of, side by side, rounded as features are stored (bfloat16).
[[nodiscard]] at::Tensor feature_of(const std::vector<int64_t>& wanted, const std::vector<int64_t>& layer_ids, const std::vector<at::Tensor>& layers_bth);

/// Where an answer leaves what the target says.
struct Difference {
  int64_t position = 0;                 // in the answer
  int64_t expected = -1, found = -1;    // tokens; -1: the answer ended
  double margin = 0;                    // how much better the target thinks of its best token than of the one found
  double tolerance = 0;                 // what products of another shape may change
  bool is_tie = false;                  // margin within tolerance, and every later token is the target's best to within it
};

/// Nothing when they are equal. Else one whole forward pass of the target over the answer that was found decides.
[[nodiscard]] std::optional<Difference> judge_difference(const Target& target, const Prompt& prompt, const std::vector<int64_t>& expected,
                                                         const std::vector<int64_t>& found);

/// What one draft's answers are beside the target's own.
struct ComparedAnswers {
  std::string draft;
  int64_t answers = 0, exact = 0;                              // answers == exact + differences
  std::vector<std::pair<std::string, Difference>> differences;  // by prompt
};

/// How far the target's own answers, made with a cache, are what whole passes say.
struct WholeCheck {
  int64_t tokens = 0;
  double worst_margin = 0, tolerance = 0;
};

struct LosslessVerdict {
  bool lossless = false;     // no difference but ties, and the whole passes agree
  int64_t answers = 0, exact = 0, ties = 0;
  std::string text;          // a sentence for people
  std::string first;         // the first difference that rounding does not explain; empty: none
};
[[nodiscard]] LosslessVerdict lossless_verdict(const std::vector<ComparedAnswers>& compared, const WholeCheck& whole);

/// One whole forward pass, without cache, over prompts and answers: what the drafts' teacher-forced acceptance is measured on.
struct WholePass {
  std::vector<at::Tensor> layers_bth;   // by layer_ids
  at::Tensor last_state_bth;
  int64_t tokens_checked = 0;           // of the answers
  double worst_margin = 0;              // of their tokens against the target's best
  double tolerance = 0;
};
[[nodiscard]] WholePass whole_pass(const Target& target, const std::vector<Prompt>& prompts, const std::vector<std::vector<int64_t>>& answers,
                                   const std::vector<int64_t>& layer_ids);

/// Teacher-forced acceptance, as training's evaluation measures it, of the drafts on these answers; adds to the runner's metrics.
void evaluate_answers(const DecodingDraft& draft, EvaluationRunner& runner, const std::vector<Prompt>& prompts, const std::vector<std::vector<int64_t>>& answers,
                      const WholePass& pass, const std::vector<int64_t>& layer_ids, at::Device device, at::ScalarType dtype);

}  // namespace sf
