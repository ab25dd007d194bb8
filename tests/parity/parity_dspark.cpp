// DSpark against numbers of the reference trainer, through the plugin's own algorithm and the real tape.
#include <doctest/doctest.h>

#include <string>

#include "plugins/algorithm/dspark/dspark.hpp"
#include "sf/json.hpp"
#include "tests/parity/draft_parity.hpp"

using sf::testing::check_gradients;
using sf::testing::check_number;
using sf::testing::GoldenCase;
using sf::testing::kGradientError;
using sf::testing::kHiddenError;
using sf::testing::kLossError;
using sf::testing::relative_error;
using sf::testing::StepOutcome;

namespace {

sf::DsparkOptions options_of(const GoldenCase& golden) {
  const sf::Json stored = sf::Json::parse(golden.text("options"));
  sf::DsparkOptions options;
  const sf::Json& gamma = stored.at("loss_decay_gamma");
  options.loss_decay_gamma = gamma.is_null() ? 0 : gamma.as_double();
  options.num_anchors = stored.at("num_anchors").as_int();
  options.ce_loss_alpha = stored.at("dspark_ce_loss_alpha").as_double();
  options.l1_loss_alpha = stored.at("dspark_l1_loss_alpha").as_double();
  options.confidence_head_alpha = stored.at("dspark_confidence_head_alpha").as_double();
  return options;
}

struct Outcome {
  StepOutcome step;
  at::Tensor draft_hidden;
};

Outcome run(const GoldenCase& golden) {
  const at::Tensor features = golden.at("in.hidden_states");
  sf::Dspark algorithm(options_of(golden));
  const auto weights = sf::testing::golden_weights(golden);
  sf::testing::AlgorithmRun draft(algorithm, sf::testing::golden_facts(golden), sf::testing::golden_tables(golden), weights, features.scalar_type(), {},
                                  sf::testing::golden_device());
  sf::testing::check_places(draft.description(), weights);
  const sf::Batch batch = draft.batch({{"input_ids", golden.at("in.input_ids")},
                                       {"loss_mask", golden.at("in.loss_mask")},
                                       {"hidden_states", features},
                                       {"target_last_hidden_states", golden.at("in.target_last_hidden_states")},
                                       {"anchors", golden.at("in.anchors")},
                                       {"keep", golden.at("in.keep")}});
  sf::StepInfo step;
  step.wants_details = true;
  Outcome outcome{draft.train({batch}, step), {}};
  outcome.draft_hidden = draft.normed(outcome.step.rows, algorithm.config().layers.rms_norm_eps);
  return outcome;
}

// Numerator and denominator of a metric, whole or for each place in a block.
void check_ratio(const GoldenCase& golden, const StepOutcome& step, const std::string& stored, const std::string& reported, double tolerance) {
  CAPTURE(stored);
  REQUIRE(step.metrics.count(reported) == 1);
  const auto& ratio = step.metrics.at(reported);
  for (const auto& [part, found] : {std::pair<const char*, const at::Tensor*>{".num", &ratio.numerator}, {".den", &ratio.denominator}}) {
    CAPTURE(part);
    const at::Tensor expected = golden.at("out.metric." + stored + part).to(at::kDouble);
    CHECK((found->reshape_as(expected) - expected).abs().max().item<double>() <= tolerance * std::max(1.0, expected.abs().max().item<double>()));
  }
}

}  // namespace

TEST_CASE("dspark parity: loss, terms, rows and every gradient equal the reference's, for each Markov head") {
  for (const char* name : {"dspark_vanilla", "dspark_gated", "dspark_rnn", "dspark_nodecay"}) {
    CAPTURE(name);
    const GoldenCase golden(name);
    const Outcome found = run(golden);
    check_number(golden, "out.loss", found.step.loss, kLossError);
    check_number(golden, "out.accuracy", found.step.metric("acc"), kLossError);
    check_number(golden, "out.metric.accuracy_denom", found.step.metrics.at("acc").denominator.item<double>(), kLossError);
    check_number(golden, "out.metric.ce_loss.den", found.step.denominator, kLossError);
    for (const char* same : {"acc", "ce_loss", "l1_loss", "confidence_loss", "confidence_abs_error", "teacher_agreement", "teacher_top1_prob",
                             "draft_top1_prob", "tau_probabilistic"}) {
      check_ratio(golden, found.step, same, same, kLossError);
    }
    check_ratio(golden, found.step, "accuracy_position", "accuracy", kLossError);
    check_ratio(golden, found.step, "ce_position", "ce", kLossError);
    CHECK((found.draft_hidden - golden.at("out.draft_hidden")).abs().max().item<double>() <= kHiddenError);
    check_gradients(golden, found.step, kGradientError);
  }
}

TEST_CASE("dspark parity: bfloat16 weights and features stay within bfloat16's noise of the reference's bfloat16 run") {
  // An exact computation on these inputs differs from the reference by about 1e-3 in loss and up to 0.15 in the gradient of markov_w2, where the
  // distance's gradient changes signs.
  const GoldenCase golden("dspark_bf16");
  const Outcome found = run(golden);
  check_number(golden, "out.loss", found.step.loss, 5e-3);
  check_gradients(golden, found.step, 0.2);
  CHECK(relative_error(found.draft_hidden, golden.at("out.draft_hidden")) <= 2e-2);
}

TEST_CASE("dspark on a GPU: bfloat16 on kernels stays within bfloat16's noise of the float32 twin on the CPU") {
  constexpr int64_t kTokens = 160, kBlocks = 14, kVocab = 1003, kHidden = 256;
  sf::ModelFacts facts;
  facts.draft_config_json = R"({
    "architectures": ["DSparkDraftModel"], "model_type": "qwen3", "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1003, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "max_position_embeddings": 512, "block_size": 7, "num_target_layers": 12, "markov_rank": 32, "markov_head_type": "vanilla",
    "enable_confidence_head": true, "confidence_head_with_markov": true,
    "dflash_config": {"target_layer_ids": [2, 7], "mask_token_id": 1002}
  })";
  sf::DsparkOptions options;
  options.num_anchors = kBlocks;
  options.loss_decay_gamma = 4;
  at::manual_seed(4);
  const auto weights = sf::testing::random_weights(sf::Dspark(options).describe(facts), 0.04);
  const sf::TargetTables tables{sf::testing::rounded(at::randn({kVocab, kHidden})), sf::testing::rounded(at::randn({kVocab, kHidden}).mul(0.1))};
  const at::Tensor features = sf::testing::rounded(at::randn({2, kTokens, 2 * kHidden})), last = sf::testing::rounded(at::randn({2, kTokens, kHidden}));
  const at::Tensor ids = at::randint(kVocab - 1, {2, kTokens}, at::kLong), mask = at::ones({2, kTokens}, at::kLong), keep = at::ones({2, kBlocks}, at::kBool);
  const at::Tensor anchors = at::stack({at::arange(kBlocks, at::kLong).mul(10).add(1), at::arange(kBlocks, at::kLong).mul(9).add(20)});
  sf::testing::compare_bfloat16_on_gpu(
      [&](at::Device device, at::ScalarType type) {
        sf::ModelFacts own = facts;
        own.bfloat16 = type == at::kBFloat16;
        sf::Dspark algorithm(options);
        sf::testing::AlgorithmRun draft(algorithm, own, {tables.embedding_vh.to(type), tables.head_vh.to(type)}, weights, type, {}, device);
        return draft.train({draft.batch({{"input_ids", ids}, {"loss_mask", mask}, {"hidden_states", features.to(type)}, {"target_last_hidden_states", last.to(type)},
                                         {"anchors", anchors}, {"keep", keep}})});
      },
      {{"markov_head.markov_w2.weight", 0.2}, {"markov_w2.weight", 0.2}});  // its gradient of the distance flips signs
}
