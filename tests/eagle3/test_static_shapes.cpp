// Static shapes and buckets of EAGLE3: the same sums, over the positions of the padded batch.
#include <doctest/doctest.h>

#include <ATen/ATen.h>

#include "plugins/algorithm/eagle3/eagle3.hpp"
#include "tests/draft/padding.hpp"

namespace sf::testing {
namespace {

constexpr int64_t kVocab = 40;

ModelFacts facts_of(bool is_static) {
  ModelFacts facts;
  facts.draft_config_json = R"({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 40, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "max_position_embeddings": 64, "hidden_act": "silu", "draft_vocab_size": 40})";
  facts.target_layer_ids = {1, 2, 3};
  facts.static_shapes = is_static;
  return facts;
}

TargetTables tables() {
  at::manual_seed(7);
  const at::Tensor embedding = at::randn({kVocab, 16});
  return {embedding, at::randn({kVocab, 16})};
}

struct Draft {
  explicit Draft(bool is_static) : algorithm(options()), run(algorithm, facts_of(is_static), tables(), {}, at::kFloat) {}
  static Eagle3Options options() {
    Eagle3Options options;
    options.ttt_length = 3;
    return options;
  }
  Batch batch(const std::vector<std::optional<int64_t>>& rows, const BatchShape& shape) {
    return batch_of_samples(algorithm, run.description(), rows, shape, kVocab);
  }

  Eagle3 algorithm;
  AlgorithmRun run;
};

}  // namespace

TEST_CASE("eagle3: a padded batch has the same sums and divides them by its own number of positions") {
  Draft dynamic_draft(false), static_draft(true);
  const std::vector<std::optional<int64_t>> rows = {1, 2, std::nullopt};
  const Batch dynamic = dynamic_draft.batch(rows, {.max_tokens = 64});
  CHECK(dynamic.tokens == 13);
  const StepOutcome plain = dynamic_draft.run.train({dynamic});
  CHECK(plain.loss > 0);
  for (const std::vector<int64_t>& buckets : {std::vector<int64_t>{}, std::vector<int64_t>{16, 32}}) {
    const Batch padded = static_draft.batch(rows, {.max_tokens = 64, .is_static = true, .buckets = buckets});
    CHECK(padded.tokens == (buckets.empty() ? 64 : 16));
    StepOutcome expected = plain;
    const double share = 13.0 / static_cast<double>(padded.tokens);
    expected.loss *= share;
    for (auto& [name, gradient] : expected.gradients) {
      gradient = gradient * share;
    }
    check_same_step(static_draft.run.train({padded}), expected, 1e-6);
  }
}

TEST_CASE("eagle3: what stands in padding and in dead rows changes no bit of loss and gradients") {
  Draft draft(true);
  const Batch batch = draft.batch({2, std::nullopt, 1}, {.max_tokens = 32, .is_static = true});
  const StepOutcome expected = draft.run.train({batch});
  check_same_bits(draft.run.train({poisoned(draft.algorithm, draft.run.description(), batch)}), expected);
}

}  // namespace sf::testing
