// Gradients of the objective against central differences in float64. What is taken without gradient has to stand still in the differences, too: D-PACE's
// weights and the lambda mix's factor follow the draft, so D-PACE is compared with autograd elsewhere (test_against_naive.cpp) and the mix is held here.
#include <doctest/doctest.h>

#include <ATen/ATen.h>

#include <functional>

#include "plugins/algorithm/dflash2/objective_unit.hpp"
#include "tests/dflash2/draft_run.hpp"
#include "tests/draft/plain_context.hpp"
#include "tests/kernels/finite_difference.hpp"

using sf::DflashOptions;

TEST_CASE("dflash2: each token objective and the selector's loss have the gradients of finite differences") {
  struct Row {
    const char* name;
    std::function<void(DflashOptions&)> options;
  };
  for (const Row& row : {Row{"cross-entropy alone", [](auto& o) { o.selector_loss_alpha = 0; }},
                         Row{"total variation alone", [](auto& o) { o.selector_loss_alpha = 0; o.lk = sf::draft::Lk::total_variation; }},
                         Row{"a mix that stands still", [](auto& o) { o.selector_loss_alpha = 0; o.lk = sf::draft::Lk::lambda; o.kl_scale = 0.4; o.kl_decay = 0; }},
                         Row{"strict selector", [](auto& o) { o.loss_decay_gamma = 2; }},
                         Row{"selector with the label put in", [](auto& o) { o.insert_gold = true; }}}) {
    CAPTURE(row.name);
    DflashOptions options;
    row.options(options);
    const std::string config = sf::testing::tiny_config({{"hidden_size", "8"}, {"vocab_size", "11"}, {"dflash_config.mask_token_id", "10"}});
    sf::testing::TinyProblem problem = sf::testing::tiny_problem(options, config);
    problem.batch["input_ids"] = problem.batch["input_ids"].remainder(3);  // labels that are often candidates
    problem.tables.head_vh.narrow(0, 3, 8).mul_(0.3);
    sf::ModelFacts facts;
    facts.draft_config_json = config;
    sf::testing::DraftRun run(options, facts, problem.tables, problem.weights);
    const sf::Batch batch = run.batch(problem.batch);
    sf::ObjectiveUnit unit(run.algorithm().config(), options);
    std::vector<std::string> names;
    std::vector<at::Tensor> inputs = {at::randn({2, 16, 8}, at::kDouble)};
    for (const auto& [name, tensor] : problem.weights) {
      if (name == "norm.weight" || (options.selector_loss_alpha > 0 && name.starts_with("candidate_selector."))) {
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
      for (const char* name : {"row_index", "row_label", "row_predecessor", "row_mask", "row_weight"}) {
        given.push_back(batch.at(name));
      }
      given.push_back(at::full({}, 0.25, at::kFloat));
      given.push_back(at::full({}, 0.7, at::kFloat));
      return unit.forward(context, given)[0];
    };
    CHECK(sf::test::gradient_error(function, inputs) < 1e-6);
  }
}
