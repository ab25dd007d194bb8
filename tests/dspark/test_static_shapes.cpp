// Static shapes and buckets of DSpark: the same loss and gradients, whatever is padded.
#include <doctest/doctest.h>

#include <ATen/ATen.h>

#include "plugins/algorithm/dspark/dspark.hpp"
#include "tests/draft/padding.hpp"

namespace sf::testing {
namespace {

constexpr int64_t kAnchors = 6, kVocab = 39;

const char* const kConfig = R"({
  "architectures": ["DSparkDraftModel"], "model_type": "qwen3", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
  "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 40, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
  "max_position_embeddings": 512, "block_size": 3, "num_target_layers": 12, "markov_rank": 4, "markov_head_type": "vanilla",
  "enable_confidence_head": true, "confidence_head_with_markov": true,
  "dflash_config": {"target_layer_ids": [2, 7], "mask_token_id": 39}
})";

struct Draft {
  explicit Draft(bool is_static) : algorithm(options()), run(algorithm, facts(is_static), tables(), {}, at::kFloat) {
    // What describe() says is zero at first would hide its gradients.
    at::manual_seed(5);
    for (const UnitSpec& unit : run.description().units) {
      for (const ParameterSpec& parameter : unit.parameters) {
        at::NoGradGuard no_grad;
        run.weight(unit.prefix + parameter.name).add_(at::randn(parameter.shape), 0.2);
      }
    }
  }
  static DsparkOptions options() {
    DsparkOptions options;
    options.num_anchors = kAnchors;
    options.loss_decay_gamma = 2;
    return options;
  }
  static ModelFacts facts(bool is_static) {
    ModelFacts facts;
    facts.draft_config_json = kConfig;
    facts.static_shapes = is_static;
    return facts;
  }
  static TargetTables tables() {
    at::manual_seed(7);
    const at::Tensor embedding = at::randn({40, 16});
    return {embedding, at::randn({40, 16})};
  }
  Batch batch(const std::vector<std::optional<int64_t>>& rows, const BatchShape& shape) {
    return batch_of_samples(algorithm, run.description(), rows, shape, kVocab);
  }

  Dspark algorithm;
  AlgorithmRun run;
};

}  // namespace

TEST_CASE("dspark: static shapes and buckets give the loss and gradients of dynamic ones") {
  Draft dynamic_draft(false), static_draft(true);
  const std::vector<std::optional<int64_t>> rows = {1, 2, std::nullopt};
  const StepOutcome expected = dynamic_draft.run.train({dynamic_draft.batch(rows, {.max_tokens = 64})});
  for (const std::vector<int64_t>& buckets : {std::vector<int64_t>{}, std::vector<int64_t>{16, 32}}) {
    const Batch padded = static_draft.batch(rows, {.max_tokens = 64, .is_static = true, .buckets = buckets});
    CHECK(padded.tokens == (buckets.empty() ? 64 : 16));
    CHECK(padded.slots == kAnchors);
    check_same_step(static_draft.run.train({padded}), expected, 1e-6);
  }
}

TEST_CASE("dspark: what stands in padding, in dead slots and in dead rows changes no bit of loss and gradients") {
  Draft draft(true);
  const Batch batch = draft.batch({2, std::nullopt, 1}, {.max_tokens = 32, .is_static = true});
  const StepOutcome expected = draft.run.train({batch});
  CHECK(expected.loss > 0);
  check_same_bits(draft.run.train({poisoned(draft.algorithm, draft.run.description(), batch)}), expected);
}

}  // namespace sf::testing
