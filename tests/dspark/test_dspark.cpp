// What no golden case fixes: the plugin against the definition, one row of the table for each setting; pooling; what is exported.
#include <doctest/doctest.h>

#include <ATen/ATen.h>

#include <functional>
#include <set>

#include "core/train/loader.hpp"
#include "plugins/algorithm/dspark/objective_unit.hpp"
#include "sf/json.hpp"
#include "tests/draft/algorithm_run.hpp"
#include "tests/draft/plain_context.hpp"
#include "tests/dspark/dflash_algorithm.hpp"
#include "tests/dspark/naive_dspark.hpp"
#include "tests/kernels/finite_difference.hpp"

using sf::Dspark;
using sf::DsparkOptions;
using sf::testing::AlgorithmRun;
using sf::testing::DsparkProblem;
using sf::testing::naive_dspark;
using sf::testing::NaiveDspark;
using sf::testing::StepOutcome;
using sf::testing::tiny_dspark_config;
using sf::testing::tiny_dspark_problem;

namespace {

using Edits = std::map<std::string, std::string>;

sf::ModelFacts facts_of(const std::string& config) {
  sf::ModelFacts facts;
  facts.draft_config_json = config;
  return facts;
}

struct Case {
  const char* name;
  Edits config;
  std::function<void(DsparkOptions&)> options = [](DsparkOptions&) {};
};

const std::vector<Case>& cases() {
  static const std::vector<Case> list = {
      {"a gap ends a block, a supervised token 0 and dead slots", {}},
      {"decay from the first drafted token", {}, [](auto& o) { o.loss_decay_gamma = 2; }},
      {"gated head", {{"dflash_config.markov_head_type", "\"gated\""}}, [](auto& o) { o.loss_decay_gamma = 3; }},
      {"recurrent head, rows out of block order", {{"dflash_config.markov_head_type", "\"rnn\""}}, [](auto& o) { o.loss_decay_gamma = 3; }},
      {"confidence without the token before", {{"dflash_config.confidence_head_with_markov", "false"}}},
      {"recurrent head, confidence without the token before", {{"dflash_config.markov_head_type", "\"rnn\""}, {"dflash_config.confidence_head_with_markov", "false"}}},
      {"no confidence head", {{"dflash_config.confidence_head_with_markov", "false"}, {"dflash_config.enable_confidence_head", "false"}}},
      {"no Markov head", {{"dflash_config.markov_rank", "0"}, {"dflash_config.confidence_head_with_markov", "false"}}},
      {"neither head", {{"dflash_config.markov_rank", "0"}, {"dflash_config.confidence_head_with_markov", "false"}, {"dflash_config.enable_confidence_head", "false"}}},
      {"cross-entropy alone", {}, [](auto& o) { o.ce_loss_alpha = 1; o.l1_loss_alpha = 0; o.confidence_head_alpha = 0; }},
      {"distance alone", {}, [](auto& o) { o.ce_loss_alpha = 0; o.l1_loss_alpha = 1; o.confidence_head_alpha = 0; }},
      {"confidence with cross-entropy", {}, [](auto& o) { o.l1_loss_alpha = 0; }},
      {"small chunks of the objective", {}, [](auto& o) { o.objective_chunk_blocks = 1; }},
      {"sliding layers, both ways by key", {{"is_causal", "false"}}},
      {"as many key/value heads as query heads", {{"num_key_value_heads", "2"}, {"dflash_config.attention_mode", "\"mha\""}}},
      {"a block of two", {{"block_size", "2"}}},
  };
  return list;
}

}  // namespace

TEST_CASE("dspark: loss, terms, metrics and every gradient of the objective follow the definition in each setting") {
  for (const Case& one : cases()) {
    CAPTURE(one.name);
    DsparkOptions options;
    one.options(options);
    const std::string config = tiny_dspark_config(one.config);
    const DsparkProblem problem = tiny_dspark_problem(options, config);
    Dspark algorithm(options);
    AlgorithmRun run(algorithm, facts_of(config), problem.tables, problem.weights, at::kFloat);
    sf::StepInfo step;
    step.wants_details = true;
    const StepOutcome found = run.train({run.batch(problem.batch)}, step);
    const NaiveDspark expected = naive_dspark(algorithm.config(), options, problem, found.rows);

    // float32 against float64: 1e-5 leaves a factor of ten over what these sizes show.
    CHECK(found.loss == doctest::Approx(expected.loss).epsilon(1e-5));
    CHECK(found.denominator == doctest::Approx(expected.denominator).epsilon(1e-6));
    CHECK(found.metrics.at("ce_loss").numerator.item<double>() == doctest::Approx(expected.ce).epsilon(1e-5));
    CHECK(found.metric("acc") == doctest::Approx(expected.accuracy).epsilon(1e-6));
    CHECK(found.metric("acceptance_length") == doctest::Approx(expected.acceptance_length).epsilon(1e-6));
    if (algorithm.config().needs_teacher(options)) {
      CHECK(found.metrics.at("l1_loss").numerator.item<double>() == doctest::Approx(expected.l1).epsilon(1e-5));
      CHECK(found.metric("tau_probabilistic") == doctest::Approx(expected.tau).epsilon(1e-5));
    } else {
      CHECK(found.metrics.count("l1_loss") == 0);
    }
    const bool trains_confidence = algorithm.config().trains_confidence(options);
    if (trains_confidence) {
      CHECK(found.metrics.at("confidence_loss").numerator.item<double>() == doctest::Approx(expected.confidence).epsilon(1e-5));
      CHECK(found.metric("confidence_bias") == doctest::Approx(expected.bias).epsilon(1e-4));
      CHECK(found.metric("confidence_abs_error") == doctest::Approx(expected.abs_error).epsilon(1e-4));
      CHECK(found.metric("schedule/acceptance_length") == doctest::Approx(expected.schedule_length).epsilon(1e-6));
      CHECK(found.metric("schedule/drafted_tokens") == doctest::Approx(expected.schedule_drafted).epsilon(1e-6));
    }
    for (const auto& [name, gradient] : expected.gradients) {
      CAPTURE(name);
      const bool frozen = name.starts_with("confidence_head.") && !trains_confidence;
      REQUIRE((found.gradients.count(name) == 1) != frozen);
      if (!frozen) {
        const double scale = std::max(1e-6, gradient.norm().item<double>());
        CHECK((found.gradients.at(name).to(at::kDouble) - gradient).norm().item<double>() / scale < 2e-4);
      }
    }
    // Evaluation runs the same units without gradients and says the same.
    CHECK(run.evaluate({run.batch(problem.batch)}).loss == doctest::Approx(found.loss).epsilon(1e-6));
  }
}

TEST_CASE("dspark: a gap counts, a slot after it does not, and keep alone silences a dead block over a supervised token 0") {
  DsparkOptions options;
  const std::string config = tiny_dspark_config();
  DsparkProblem problem = tiny_dspark_problem(options, config);
  Dspark algorithm(options);
  AlgorithmRun run(algorithm, facts_of(config), problem.tables, problem.weights, at::kFloat);
  const sf::Batch batch = run.batch(problem.batch);
  // Blocks at 1 (two slots, then a gap with a supervised one behind), 2 (one), 5 (four), 10 (one, then the end), and at 0 of the second sequence (one).
  CHECK(at::equal(batch.at("grid_mask").cpu(), at::tensor({1, 1, 0, 0, /**/ 1, 0, 0, 0, /**/ 1, 1, 1, 1, /**/ 1, 0, 0, 0, /**/ 1, 0, 0, 0}, at::kFloat).view({5, 4})));
  const NaiveDspark expected = naive_dspark(algorithm.config(), options, problem, run.train({batch}).rows);
  CHECK(batch.at("row_mask").sum().item<double>() == expected.mask_bwj.sum().item<double>());
}

TEST_CASE("dspark: a row asks the teacher for the state one before its label, and each state is asked for once in a chunk") {
  DsparkOptions options;
  const std::string config = tiny_dspark_config();
  DsparkProblem problem = tiny_dspark_problem(options, config);
  Dspark algorithm(options);
  AlgorithmRun run(algorithm, facts_of(config), problem.tables, problem.weights, at::kFloat);
  const sf::Batch batch = run.batch(problem.batch);
  const at::Tensor places = batch.at("teacher_places"), index = batch.at("teacher_index"), mask = batch.at("row_mask"), label = batch.at("row_label");
  REQUIRE(places.size(0) == 1);
  const at::Tensor ids = problem.batch.at("input_ids").reshape({-1});
  std::set<int64_t> distinct;
  int64_t rows = 0;
  for (int64_t r = 0; r < index.numel(); ++r) {
    if (mask[r].item<float>() > 0) {
      const int64_t state = places[0][index[r].item<int64_t>()].item<int64_t>();
      distinct.insert(state);
      CHECK(ids[state + 1].item<int64_t>() == label[r].item<int64_t>());
      CHECK(ids[state].item<int64_t>() == batch.at("row_predecessor")[r].item<int64_t>());
      ++rows;
    }
  }
  // Positions 1, 2 (twice), 5, 6, 7, 8 and 10 of the first sequence and 0 of the second.
  CHECK(rows == 9);
  CHECK(distinct == std::set<int64_t>{1, 2, 5, 6, 7, 8, 10, 12});
  std::set<int64_t> listed;
  for (int64_t t = 0; t <= index.max().item<int64_t>(); ++t) {
    CHECK(listed.insert(places[0][t].item<int64_t>()).second);
  }
  CHECK(listed == distinct);
}

TEST_CASE("dspark: several micro-steps give the mean of their own ratios, and a dead one does not count") {
  DsparkOptions options;
  options.loss_decay_gamma = 2;
  const std::string config = tiny_dspark_config();
  const DsparkProblem problem = tiny_dspark_problem(options, config);
  Dspark algorithm(options);
  AlgorithmRun run(algorithm, facts_of(config), problem.tables, problem.weights, at::kFloat);
  const auto part = [&](int64_t row) {
    std::map<std::string, at::Tensor> tensors;
    for (const auto& [name, tensor] : problem.batch) {
      tensors[name] = tensor.narrow(0, row, 1).contiguous();
    }
    return run.batch(tensors);
  };
  std::map<std::string, at::Tensor> nothing;
  for (const auto& [name, tensor] : problem.batch) {
    nothing[name] = at::zeros_like(tensor);
  }
  const sf::Batch dead = run.batch(nothing);
  CHECK(algorithm.weigh(dead) == 0);
  const StepOutcome first = run.train({part(0)}), second = run.train({part(1)});
  REQUIRE(first.denominator != doctest::Approx(second.denominator));
  const StepOutcome both = run.train({part(0), dead, part(1)});
  CHECK(both.loss == doctest::Approx((first.loss + second.loss) / 2).epsilon(1e-5));
  for (const auto& [name, gradient] : both.gradients) {
    CAPTURE(name);
    const at::Tensor mean = (first.gradients.at(name) + second.gradients.at(name)) / 2;
    CHECK(gradient.isfinite().all().item<bool>());
    CHECK((gradient - mean).norm().item<double>() <= 1e-5 * std::max(1e-3, mean.norm().item<double>()));
  }
}

TEST_CASE("dspark: static slots change neither loss nor gradients") {
  DsparkOptions options;
  const std::string config = tiny_dspark_config({{"dflash_config.markov_head_type", "\"rnn\""}});
  const DsparkProblem problem = tiny_dspark_problem(options, config);
  Dspark algorithm(options);
  AlgorithmRun run(algorithm, facts_of(config), problem.tables, problem.weights, at::kFloat);
  std::map<std::string, at::Tensor> wide = problem.batch;
  wide["anchors"] = at::cat({problem.batch.at("anchors"), at::zeros({2, 5}, at::kLong)}, 1);
  wide["keep"] = at::cat({problem.batch.at("keep"), at::zeros({2, 5}, at::kBool)}, 1);
  const StepOutcome narrow = run.train({run.batch(problem.batch)}), padded = run.train({run.batch(wide)});
  CHECK(narrow.loss == doctest::Approx(padded.loss).epsilon(1e-6));
  for (const auto& [name, gradient] : narrow.gradients) {
    CHECK((gradient - padded.gradients.at(name)).abs().max().item<double>() < 1e-6);
  }
}

TEST_CASE("dspark: the same sample and seed give the anchors that DFlash draws") {
  DsparkOptions options;
  options.num_anchors = 3;
  Dspark dspark(options);
  for (int64_t index = 0; index < 5; ++index) {
    const auto sample = [&] {
      sf::Sample made;
      made.index = index;
      made.tokens = 40;
      made.tensors["loss_mask"] = at::ones({40}, at::kLong);
      made.tensors["input_ids"] = at::arange(40, at::kLong);
      return made;
    };
    sf::Sample mine = sample(), other = sample();
    CHECK(dspark.prepare(mine, sf::sample_context(42, 1, index, false)).empty());
    CHECK(sf::testing::dflash_prepare(3, other, sf::sample_context(42, 1, index, false)).empty());
    CHECK(mine.tensors.at("anchors").numel() == 3);
    CHECK(at::equal(mine.tensors.at("anchors"), other.tensors.at("anchors")));
  }
}

TEST_CASE("dspark: bfloat16 weights and computation stay within bfloat16's noise of the definition") {
  DsparkOptions options;
  const std::string config = tiny_dspark_config();
  DsparkProblem problem = tiny_dspark_problem(options, config, at::kBFloat16);
  for (auto& [name, weight] : problem.weights) {
    weight = weight.to(at::kBFloat16);  // so that both start from the same numbers
  }
  Dspark algorithm(options);
  AlgorithmRun run(algorithm, facts_of(config), problem.tables, problem.weights, at::kBFloat16);
  const StepOutcome found = run.train({run.batch(problem.batch)});
  const NaiveDspark expected = naive_dspark(algorithm.config(), options, problem, found.rows);
  CHECK(found.loss == doctest::Approx(expected.loss).epsilon(2e-2));
  for (const auto& [name, gradient] : expected.gradients) {
    CAPTURE(name);
    const at::Tensor other = found.gradients.at(name).to(at::kDouble);
    CHECK(((other * gradient).sum() / (other.norm() * gradient.norm()).clamp_min(1e-30)).item<double>() > 0.98);
  }
}

TEST_CASE("dspark: each loss term alone and all together have the gradients of finite differences, for each Markov head") {
  struct Terms {
    const char* name;
    double ce, l1, confidence;
  };
  for (const Terms& terms : {Terms{"cross-entropy", 1, 0, 0}, Terms{"distance", 0, 1, 0}, Terms{"confidence and a little cross-entropy", 1e-3, 0, 1},
                             Terms{"all", 0.1, 0.9, 1}}) {
    for (const char* head : {"\"vanilla\"", "\"gated\"", "\"rnn\""}) {
      CAPTURE(terms.name);
      CAPTURE(head);
      DsparkOptions options;
      options.ce_loss_alpha = terms.ce;
      options.l1_loss_alpha = terms.l1;
      options.confidence_head_alpha = terms.confidence;
      options.loss_decay_gamma = 2;
      const std::string config = tiny_dspark_config({{"dflash_config.markov_head_type", head}, {"hidden_size", "6"}, {"vocab_size", "7"}, {"dflash_config.mask_token_id", "6"}});
      const DsparkProblem problem = tiny_dspark_problem(options, config);
      Dspark algorithm(options);
      AlgorithmRun run(algorithm, facts_of(config), problem.tables, problem.weights, at::kFloat);
      const sf::Batch batch = run.batch(problem.batch);
      sf::DsparkObjective unit(algorithm.config(), options);
      std::vector<std::string> names;
      std::vector<at::Tensor> inputs = {at::randn({2, 16, 6}, at::kDouble)};
      for (const auto& [name, tensor] : problem.weights) {
        const bool trained = name == "norm.weight" || name.starts_with("markov_head.") || (terms.confidence > 0 && name.starts_with("confidence_head."));
        if (trained) {
          names.push_back(name);
          inputs.push_back(tensor.to(at::kDouble));
        }
      }
      const auto function = [&](const std::vector<at::Tensor>& in) {
        std::map<std::string, at::Tensor> parameters;
        for (size_t i = 0; i < names.size(); ++i) {
          parameters[names[i]] = in[i + 1];
        }
        sf::testing::PlainContext context(parameters);
        std::vector<at::Tensor> given = {in[0], problem.tables.head_vh.to(at::kDouble)};
        for (const char* name : {"row_index", "row_label", "row_predecessor", "row_mask", "row_weight", "row_cell", "grid_mask"}) {
          given.push_back(batch.at(name));
        }
        given.push_back(at::full({}, 0.25, at::kFloat));
        if (algorithm.config().needs_teacher(options)) {
          given.push_back(problem.batch.at("target_last_hidden_states").to(at::kDouble));
          given.push_back(batch.at("teacher_places"));
          given.push_back(batch.at("teacher_index"));
        }
        return unit.forward(context, given)[0];
      };
      if (terms.confidence == 0) {
        CHECK(sf::test::gradient_error(function, inputs) < 1e-6);
        continue;
      }
      // The acceptance that the confidence learns is taken as it is, without gradient, and differences would see it move with the draft: so only the
      // confidence head itself is moved. The rest of that term's gradient is compared with autograd's above.
      std::vector<at::Tensor> moving;
      for (size_t i = 0; i < names.size(); ++i) {
        if (names[i].starts_with("confidence_head.")) {
          moving.push_back(inputs[i + 1]);
        }
      }
      const auto confidence_alone = [&](const std::vector<at::Tensor>& in) {
        std::vector<at::Tensor> all = inputs;
        for (size_t i = 0, next = 0; i < names.size(); ++i) {
          if (names[i].starts_with("confidence_head.")) {
            all[i + 1] = in[next++];
          }
        }
        return function(all);
      };
      CHECK(sf::test::gradient_error(confidence_alone, moving) < 1e-6);
    }
  }
}

TEST_CASE("dspark: every exported name is listed once, and the configuration has each key of the contract, the head's in both places") {
  DsparkOptions options;
  Dspark algorithm(options);
  (void)algorithm.describe(facts_of(tiny_dspark_config({{"dflash_config.markov_head_type", "\"gated\""}})));
  const sf::ExportSpec spec = algorithm.export_spec();
  std::map<std::string, std::vector<int64_t>> shapes;
  for (const sf::ParameterSpec& tensor : spec.tensors) {
    CHECK(shapes.emplace(tensor.name, tensor.shape).second);
  }
  CHECK(shapes.at("markov_head.markov_w1.weight") == std::vector<int64_t>{20, 3});
  CHECK(shapes.at("markov_head.markov_w2.weight") == std::vector<int64_t>{20, 3});
  CHECK(shapes.at("markov_head.gate_proj.weight") == std::vector<int64_t>{3, 19});
  CHECK(shapes.at("markov_head.gate_proj.bias") == std::vector<int64_t>{3});
  CHECK(shapes.at("confidence_head.proj.weight") == std::vector<int64_t>{1, 19});
  CHECK(shapes.at("confidence_head.proj.bias") == std::vector<int64_t>{1});
  CHECK(shapes.size() == 3 + 2 * 11 + 4 + 2);
  const sf::Json config = sf::Json::parse(spec.config_json);
  for (const std::string& key : spec.required_config_keys) {
    CAPTURE(key);
    const size_t dot = key.find('.');
    const sf::Json& place = dot == std::string::npos ? config : config.at(key.substr(0, dot));
    CHECK(place.contains(dot == std::string::npos ? key : key.substr(dot + 1)));
  }
  for (const char* key : {"markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov", "mask_token_id", "target_layer_ids"}) {
    CAPTURE(key);
    CHECK(config.at(key) == config.at("dflash_config").at(key));
  }
}
