// What no golden case fixes: the plugin against the definition, one row of the table for each setting.
#include <doctest/doctest.h>

#include <functional>

#include <ATen/ATen.h>

#include "tests/dflash2/naive_dflash.hpp"

using sf::DflashOptions;
using sf::LossType;
using sf::testing::DraftRun;
using sf::testing::naive_dflash;
using sf::testing::NaiveOutcome;
using sf::testing::StepOutcome;
using sf::testing::tiny_config;
using sf::testing::tiny_problem;
using sf::testing::TinyProblem;
namespace Lk = sf::draft;

namespace {

using Edits = std::map<std::string, std::string>;

struct Case {
  const char* name;
  Edits config;
  std::function<void(DflashOptions&)> options = [](DflashOptions&) {};
  std::function<void(TinyProblem&)> problem = [](TinyProblem&) {};
};

// A vocabulary of few tokens and a head that prefers them: many covered and many right.
void few_tokens(TinyProblem& problem) {
  problem.batch["input_ids"] = problem.batch["input_ids"].remainder(3);
  problem.tables.head_vh.narrow(0, 3, problem.tables.head_vh.size(0) - 3).mul_(0.2);
}

const std::vector<Case>& cases() {
  static const std::vector<Case> list = {
      {"a gap inside a block, strict selector", {}},
      {"many covered and many right", {}, [](auto& o) { o.loss_decay_gamma = 2; }, few_tokens},
      {"many covered, label inserted where missing", {}, [](auto& o) { o.insert_gold = true; o.loss_decay_gamma = 3; }, few_tokens},
      {"D-PACE, weighted per sequence, live selector and sliding layer", {}, [](auto& o) { o.loss_type = LossType::kDpace; }, few_tokens},
      {"D-PACE, confidence alone", {}, [](auto& o) { o.loss_type = LossType::kDpaceConfidence; o.dpace_alpha = 0.2; }, few_tokens},
      {"D-PACE, continuation alone", {}, [](auto& o) { o.loss_type = LossType::kDpaceContinuation; o.dpace_alpha = 0.8; }, few_tokens},
      {"D-PACE, older normalisation", {}, [](auto& o) { o.loss_type = LossType::kDpace; o.dpace_per_sequence = false; }, few_tokens},
      {"total variation", {}, [](auto& o) { o.lk = Lk::Lk::total_variation; }, few_tokens},
      {"lambda mix", {}, [](auto& o) { o.lk = Lk::Lk::lambda; o.kl_scale = 0.9; o.kl_decay = 2; }, few_tokens},
      {"lambda mix under D-PACE", {}, [](auto& o) { o.lk = Lk::Lk::lambda; o.loss_type = LossType::kDpace; }, few_tokens},
      {"alpha objective is cross-entropy", {}, [](auto& o) { o.lk = Lk::Lk::alpha; }},
      {"selector without gradient into the draft", {}, [](auto& o) { o.selector_stop_gradient = true; }, few_tokens},
      {"selector frozen", {}, [](auto& o) { o.selector_loss_alpha = 0; }, few_tokens},
      {"small chunks of the objective", {}, [](auto& o) { o.objective_chunk_blocks = 1; o.loss_type = LossType::kDpace; }, few_tokens},
      {"plain DFlash", {{"architectures", "[\"DFlashDraftModel\"]"}}, [](auto& o) { o.loss_decay_gamma = 2; }, few_tokens},
      {"causal everywhere by key", {{"is_causal", "true"}}},
      {"both ways everywhere by key", {{"is_causal", "false"}}},
      {"window shorter than a block", {{"sliding_window", "2"}}},
      {"window shorter than a block, both ways", {{"sliding_window", "2"}, {"is_causal", "false"}}},
      {"three taps", {{"dflash_config.conv_kernel_size", "3"}}},
      {"as many taps as slots, two groups", {{"dflash_config.conv_kernel_size", "4"}, {"dflash_config.conv_group_size", "8"}}},
      {"biases in attention", {{"attention_bias", "true"}}},
      {"multiplier and softcap", {{"dflash_config.output_multiplier", "0.6"}, {"dflash_config.final_logit_softcapping", "3.0"}}, [](auto&) {}, few_tokens},
      {"scaled rope", {{"rope_scaling", R"({"rope_type": "linear", "factor": 4.0})"}}},
      {"mask values between 0 and 1", {}, [](auto&) {}, [](TinyProblem& problem) {
         problem.batch["loss_mask"] = problem.batch["loss_mask"].to(at::kFloat).mul(at::linspace(0.6, 1.4, 12));
         few_tokens(problem);
       }},
      {"a sequence without any block", {}, [](auto& o) { o.loss_type = LossType::kDpace; }, [](TinyProblem& problem) {
         problem.batch["keep"][1].fill_(false);
         few_tokens(problem);
       }},
      {"sequence shorter than a block", {}, [](auto&) {}, [](TinyProblem& problem) {
         for (const char* name : {"input_ids", "loss_mask", "hidden_states"}) {
           problem.batch[name] = problem.batch[name].narrow(1, 0, 3).contiguous();
         }
         problem.batch["loss_mask"].fill_(1);
         problem.batch["anchors"] = at::tensor({0, 1, 0, 0, 0, 0, 0, 0}, at::kLong).view({2, 4});
         problem.batch["keep"] = at::tensor({1, 1, 0, 0, 1, 0, 0, 0}, at::kLong).view({2, 4}).to(at::kBool);
       }},
  };
  return list;
}

}  // namespace

TEST_CASE("dflash2: loss, metrics and every gradient follow the definition in each setting") {
  for (const Case& one : cases()) {
    CAPTURE(one.name);
    DflashOptions options;
    one.options(options);
    const std::string config = tiny_config(one.config);
    TinyProblem problem = tiny_problem(options, config);
    one.problem(problem);
    sf::ModelFacts facts;
    facts.draft_config_json = config;
    DraftRun draft(options, facts, problem.tables, problem.weights);
    sf::StepInfo step;
    step.wants_details = true;
    const StepOutcome found = draft.train({draft.batch(problem.batch)}, step);
    const NaiveOutcome expected = naive_dflash(draft.algorithm().config(), options, problem, options.selector_loss_alpha);

    // float32 against float64: 1e-5 leaves a factor of ten over what these sizes show.
    CHECK(found.loss == doctest::Approx(expected.loss).epsilon(1e-5));
    CHECK(found.denominator == doctest::Approx(expected.denominator).epsilon(1e-6));
    CHECK(found.metric("acc") == doctest::Approx(expected.accuracy).epsilon(1e-6));
    CHECK(found.metric("acceptance_length") == doctest::Approx(expected.acceptance_length).epsilon(1e-6));
    if (draft.algorithm().config().dflash2 && options.selector_loss_alpha > 0) {
      CHECK(found.metric("dflash2/selector/covered") == doctest::Approx(expected.covered).epsilon(1e-6));
      CHECK(found.metric("dflash2/selector/loss") == doctest::Approx(expected.selector_loss).epsilon(1e-5));
    }
    for (const auto& [name, gradient] : expected.gradients) {
      CAPTURE(name);
      const bool frozen = options.selector_loss_alpha == 0 && name.rfind("candidate_selector.", 0) == 0;
      REQUIRE((found.gradients.count(name) == 1) != frozen);
      if (!frozen) {
        const double scale = std::max(1e-6, gradient.norm().item<double>());
        CHECK((found.gradients.at(name).to(at::kDouble) - gradient).norm().item<double>() / scale < 2e-4);
      }
    }
    // Evaluation runs the same units without gradients and says the same.
    CHECK(draft.evaluate({draft.batch(problem.batch)}).loss == doctest::Approx(found.loss).epsilon(1e-6));
  }
}

TEST_CASE("dflash2: bfloat16 weights and computation stay within bfloat16's noise of the definition") {
  DflashOptions options;
  options.loss_decay_gamma = 2;
  const std::string config = tiny_config();
  TinyProblem problem = tiny_problem(options, config, at::kBFloat16);
  for (auto& [name, weight] : problem.weights) {
    weight = weight.to(at::kBFloat16);  // so that both start from the same numbers
  }
  few_tokens(problem);
  sf::ModelFacts facts;
  facts.draft_config_json = config;
  DraftRun draft(options, facts, problem.tables, problem.weights, at::kBFloat16);
  const StepOutcome found = draft.train({draft.batch(problem.batch)});
  const NaiveOutcome expected = naive_dflash(draft.algorithm().config(), options, problem, 1);
  CHECK(found.loss == doctest::Approx(expected.loss).epsilon(2e-2));
  for (const auto& [name, gradient] : expected.gradients) {
    CAPTURE(name);
    const at::Tensor other = found.gradients.at(name).to(at::kDouble);
    // A tiny net in bfloat16: directions agree, single elements may be off by some per cent.
    const double cosine = ((other * gradient).sum() / (other.norm() * gradient.norm()).clamp_min(1e-30)).item<double>();
    CHECK(cosine > 0.98);
  }
}

TEST_CASE("dflash2: settings of the table differ where they should, so a setting that is ignored is noticed") {
  const auto loss_of = [](const Edits& edits) {
    DflashOptions options;
    const std::string config = tiny_config(edits);
    TinyProblem problem = tiny_problem(options, tiny_config());
    problem.batch["anchors"] = at::tensor({1, 2, 5, 8, 0, 0, 0, 0}, at::kLong).view({2, 4});
    sf::ModelFacts facts;
    facts.draft_config_json = config;
    DraftRun draft(options, facts, problem.tables, problem.weights);
    return draft.train({draft.batch(problem.batch)}).loss;
  };
  const double plain = loss_of({});
  for (const Edits& edits : {Edits{{"is_causal", "true"}}, Edits{{"is_causal", "false"}}, Edits{{"sliding_window", "2"}},
                             Edits{{"rope_scaling", R"({"rope_type": "linear", "factor": 4.0})"}},
                             Edits{{"dflash_config.output_multiplier", "0.6"}}, Edits{{"dflash_config.final_logit_softcapping", "3.0"}}}) {
    CAPTURE(edits.begin()->first);
    CHECK(std::abs(loss_of(edits) - plain) > 1e-5);
  }
}
