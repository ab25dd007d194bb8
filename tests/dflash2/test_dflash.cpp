#include <doctest/doctest.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <set>

#include "sdk/draft/acceptance.hpp"
#include "sdk/draft/block_rows.hpp"
#include "sdk/draft/selector.hpp"
#include "sf/json.hpp"
#include "tests/dflash2/draft_run.hpp"

using sf::DflashOptions;
using sf::testing::DraftRun;
using sf::testing::StepOutcome;
using sf::testing::tiny_config;
using sf::testing::tiny_problem;
using sf::testing::TinyProblem;
namespace draft = sf::draft;

namespace {

sf::ModelFacts facts_of(const std::string& config) {
  sf::ModelFacts facts;
  facts.draft_config_json = config;
  return facts;
}

double largest_difference(const StepOutcome& a, const StepOutcome& b) {
  REQUIRE(a.gradients.size() == b.gradients.size());
  double worst = 0;
  for (const auto& [name, gradient] : a.gradients) {
    worst = std::max(worst, (gradient - b.gradients.at(name)).abs().max().item<double>());
  }
  return worst;
}

// Draws that do not depend on anything but the position.
std::vector<uint64_t> draws(int64_t count) {
  std::vector<uint64_t> list;
  for (int64_t i = 0; i < count; ++i) {
    list.push_back(static_cast<uint64_t>(i) * 0x9E3779B97F4A7C15u);
  }
  return list;
}

sf::Sample sample_of(const std::vector<int64_t>& mask) {
  sf::Sample sample;
  sample.tokens = static_cast<int64_t>(mask.size());
  sample.tensors["loss_mask"] = at::tensor(at::ArrayRef<int64_t>(mask), at::kLong);
  sample.tensors["input_ids"] = at::arange(sample.tokens, at::kLong);
  return sample;
}

}  // namespace

TEST_CASE("anchors: the positions with the smallest draws, whatever the padding, in ascending order") {
  const at::Tensor mask = at::tensor({0, 1, 1, 0, 1, 1, 1, 1, 0, 1}, at::kLong);
  const std::vector<int64_t> valid = draft::valid_anchors(mask);
  CHECK(valid == std::vector<int64_t>{1, 4, 5, 6});
  CHECK(draft::choose_anchors(valid, draws(10), 9) == valid);
  const std::vector<int64_t> two = draft::choose_anchors(valid, draws(10), 2);
  std::vector<int64_t> by_draw = valid;
  std::sort(by_draw.begin(), by_draw.end(), [](int64_t a, int64_t b) { return draws(10)[static_cast<size_t>(a)] < draws(10)[static_cast<size_t>(b)]; });
  std::vector<int64_t> expected(by_draw.begin(), by_draw.begin() + 2);
  std::sort(expected.begin(), expected.end());
  CHECK(two == expected);
  CHECK(draft::choose_anchors(valid, draws(5000), 2) == two);
  CHECK(draft::valid_anchors(at::tensor({1.0, 0.5, 1.0, 0.51}, at::kFloat)) == std::vector<int64_t>{2});  // supervised means above one half
}

TEST_CASE("anchors: training draws num_anchors, evaluation takes all, a sample without two supervised neighbours is refused with the reason") {
  DflashOptions options;
  options.num_anchors = 3;
  DraftRun run(options, facts_of(tiny_config()), tiny_problem(options, tiny_config()).tables, {});
  sf::SampleContext context;
  std::string stream;
  context.draw = [&](const char* name, int64_t count) {
    stream = name;
    return draws(count);
  };
  sf::Sample sample = sample_of({0, 1, 1, 1, 1, 1, 1, 1, 1, 0});
  CHECK(run.algorithm().prepare(sample, context).empty());
  CHECK(sample.tensors.at("anchors").numel() == 3);
  CHECK(stream == "anchors");
  context.evaluating = true;
  CHECK(run.algorithm().prepare(sample, context).empty());
  CHECK(sample.tensors.at("anchors").numel() == 7);
  CHECK(sample.tensors.at("keep").all().item<bool>());

  sf::Sample bare = sample_of({0, 1, 0, 1, 0});
  CHECK(run.algorithm().prepare(bare, context).find("no two consecutive supervised tokens") != std::string::npos);
}

TEST_CASE("block rows: gaps count as they stand, slots past the end do not, dead blocks leave nothing") {
  const at::Tensor ids = at::arange(10, 18, at::kLong).unsqueeze(0);
  const at::Tensor mask = at::tensor({1, 1, 0, 1, 1, 1, 1, 1}, at::kLong).unsqueeze(0);
  const at::Tensor anchors = at::tensor({0, 6, 3}, at::kLong).unsqueeze(0);
  const at::Tensor keep = at::tensor({1, 1, 0}, at::kLong).to(at::kBool).unsqueeze(0);
  const draft::BlockRows rows = draft::collect_block_rows(ids, mask, anchors, keep, {.block_size = 5});
  // Block 0: slots 1, 2 (gap), 3, 4. Block 1 at 6: slot 1 alone, the rest lies past the end.
  CHECK(at::equal(rows.mask_cp, at::tensor({1, 0, 1, 1, 1, 0, 0, 0}, at::kFloat).view({2, 4})));
  CHECK(at::equal(rows.index_r, at::tensor({1, 2, 3, 4, 6}, at::kLong)));
  CHECK(at::equal(rows.label_r, at::tensor({11, 12, 13, 14, 17}, at::kLong)));
  CHECK(at::equal(rows.predecessor_r, at::tensor({10, 11, 12, 13, 16}, at::kLong)));
  CHECK(at::equal(rows.mask_r, at::tensor({1, 0, 1, 1, 1}, at::kFloat)));
  CHECK(at::equal(rows.anchor_token_c, at::tensor({10, 16}, at::kLong)));

  const draft::BlockRows filled = draft::collect_block_rows(ids, mask, anchors, keep, {.block_size = 5, .multiple = 8});
  CHECK(filled.index_r.size(0) == 8);
  CHECK(filled.mask_r.sum().item<float>() == 4);
  CHECK(filled.cell_r.narrow(0, 5, 3).eq(8).all().item<bool>());

  const draft::BlockRows dead = draft::collect_block_rows(ids, mask, anchors, at::zeros_like(keep), {.block_size = 5, .multiple = 4});
  CHECK(dead.index_r.size(0) == 4);
  CHECK(dead.mask_r.sum().item<float>() == 0);
}

TEST_CASE("acceptance: a chain stops at the first miss or unsupervised slot, a walk jumps over what was accepted") {
  const at::Tensor hit = at::tensor({1, 1, 0, 1, /**/ 1, 1, 1, 1, /**/ 0, 1, 1, 1, /**/ 1, 1, 1, 1}, at::kInt).view({4, 4});
  const at::Tensor mask = at::tensor({1, 1, 1, 1, /**/ 1, 0, 1, 1, /**/ 1, 1, 1, 1, /**/ 0, 0, 0, 0}, at::kFloat).view({4, 4});
  const draft::Chain chain = draft::follow_chain(hit, mask);
  CHECK(at::equal(chain.length_c, at::tensor({2, 1, 0, 0}, at::kFloat)));
  CHECK(at::equal(chain.reached_cp, at::tensor({1, 1, 1, 0, /**/ 1, 0, 0, 0, /**/ 1, 0, 0, 0, /**/ 0, 0, 0, 0}, at::kFloat).view({4, 4})));

  // One sequence, blocks at 2, 3, 5, 9: 2 accepts two and resumes at 5; 3 is jumped over; 5 accepts none and resumes at 6; 9 has nothing supervised.
  const draft::Walk walk = draft::walk_blocks(at::tensor({2, 3, 0, 0}, at::kFloat).unsqueeze(0), at::tensor({1, 1, 1, 0}, at::kInt).to(at::kBool).unsqueeze(0),
                                              at::tensor({2, 3, 5, 9}, at::kLong).unsqueeze(0));
  CHECK(walk.total.item<float>() == 4);
  CHECK(walk.visits.item<float>() == 2);

  const at::Tensor probability = at::tensor({0.5, 0.5, 1.0, /**/ 1.0, 1.0, 0.0}, at::kFloat).view({2, 3});
  CHECK(at::allclose(draft::chain_length(probability, at::tensor({1, 1, 1, 1, 0, 1}, at::kFloat).view({2, 3})), at::tensor({1.0, 1.0}, at::kFloat)));
}

TEST_CASE("selector: its factor waits, ramps and stays; without a known total it is there at once") {
  CHECK(draft::selector_alpha(2, 0.1, 0.2, 0, 0) == 2);
  CHECK(draft::selector_alpha(2, 0.1, 0.2, 9, 100) == 0);
  CHECK(draft::selector_alpha(2, 0.1, 0.2, 10, 100) == doctest::Approx(2.0 / 20));
  CHECK(draft::selector_alpha(2, 0.1, 0.2, 29, 100) == 2);
  CHECK(draft::selector_alpha(2, 0.1, 0.2, 99, 100) == 2);
  CHECK(draft::selector_alpha(2, 0.1, 0, 10, 100) == 2);
}

TEST_CASE("dflash2: while the selector's factor is 0 its weights get zero gradients, not none") {
  DflashOptions options;
  options.selector_warmup_ratio = 0.5;
  TinyProblem problem = tiny_problem(options, tiny_config());
  DraftRun run(options, facts_of(tiny_config()), problem.tables, problem.weights);
  sf::StepInfo step;
  step.updates_total = 10;
  const StepOutcome found = run.train({run.batch(problem.batch)}, step);
  const at::Tensor& gradient = found.gradients.at("candidate_selector.successor_codebook");
  CHECK(gradient.abs().max().item<double>() == 0);
  step.update = 7;
  CHECK(run.train({run.batch(problem.batch)}, step).metric("selector_loss_alpha") == 1);
}

TEST_CASE("dflash2: a fresh draft equals plain DFlash with the same weights") {
  DflashOptions options;
  TinyProblem problem = tiny_problem(options, tiny_config());
  DraftRun fresh(options, facts_of(tiny_config()), problem.tables, {});
  DraftRun plain(options, facts_of(tiny_config({{"architectures", "[\"DFlashDraftModel\"]"}})), problem.tables, {});
  const StepOutcome a = fresh.train({fresh.batch(problem.batch)}), b = plain.train({plain.batch(problem.batch)});
  CHECK(at::equal(a.rows, b.rows));
  CHECK(a.metric("ce_loss") == b.metric("ce_loss"));
  CHECK(fresh.evaluate({fresh.batch(problem.batch)}).metric("acceptance_length") ==
        plain.evaluate({plain.batch(problem.batch)}).metric("acceptance_length"));
}

TEST_CASE("dflash2: micro-batches with unequal weight pool to the gradient of one batch; a dead batch adds nothing") {
  DflashOptions options;
  options.loss_decay_gamma = 2;
  const TinyProblem problem = tiny_problem(options, tiny_config());
  DraftRun run(options, facts_of(tiny_config()), problem.tables, problem.weights);
  const auto part = [&](int64_t row) {
    std::map<std::string, at::Tensor> tensors;
    for (const auto& [name, tensor] : problem.batch) {
      tensors[name] = tensor.narrow(0, row, 1).contiguous();
    }
    return run.batch(tensors);
  };
  const StepOutcome whole = run.train({run.batch(problem.batch)});
  const StepOutcome split = run.train({part(0), part(1)});
  CHECK(split.loss == doctest::Approx(whole.loss).epsilon(1e-6));
  CHECK(largest_difference(whole, split) < 2e-6);

  std::map<std::string, at::Tensor> nothing;
  for (const auto& [name, tensor] : problem.batch) {
    nothing[name] = at::zeros_like(tensor);
  }
  sf::Batch dead = run.batch(nothing);
  CHECK(run.algorithm().weigh(dead) == 0);
  const StepOutcome with_dead = run.train({part(0), dead, part(1)});
  CHECK(largest_difference(split, with_dead) == 0);
  for (const auto& [name, gradient] : with_dead.gradients) {
    CAPTURE(name);
    CHECK(gradient.isfinite().all().item<bool>());
  }
}

TEST_CASE("dflash2: static slots change neither loss nor gradients") {
  DflashOptions options;
  const TinyProblem problem = tiny_problem(options, tiny_config());
  DraftRun run(options, facts_of(tiny_config()), problem.tables, problem.weights);
  std::map<std::string, at::Tensor> wide = problem.batch;
  wide["anchors"] = at::cat({problem.batch.at("anchors"), at::zeros({2, 5}, at::kLong)}, 1);
  wide["keep"] = at::cat({problem.batch.at("keep"), at::zeros({2, 5}, at::kBool)}, 1);
  const StepOutcome narrow = run.train({run.batch(problem.batch)}), padded = run.train({run.batch(wide)});
  CHECK(narrow.loss == doctest::Approx(padded.loss).epsilon(1e-6));
  CHECK(largest_difference(narrow, padded) < 1e-6);
}

TEST_CASE("dflash2: an evaluation of very many blocks takes them in parts and says the same") {
  DflashOptions options;
  const std::string config = tiny_config();
  TinyProblem problem = tiny_problem(options, config);
  const int64_t s = 2200, w = s - 1;  // 2 x 2199 blocks of 4 rows: more than one part
  problem.batch["input_ids"] = at::randint(39, {2, s}, at::kLong);
  problem.batch["loss_mask"] = at::ones({2, s}, at::kLong);
  problem.batch["hidden_states"] = at::randn({2, s, 32});
  problem.batch["anchors"] = at::arange(w, at::kLong).expand({2, w}).contiguous();
  problem.batch["keep"] = at::ones({2, w}, at::kBool);
  DraftRun run(options, facts_of(config), problem.tables, problem.weights);
  const sf::Batch batch = run.batch(problem.batch);
  const StepOutcome trained = run.train({batch}), evaluated = run.evaluate({batch});
  CHECK(evaluated.loss == doctest::Approx(trained.loss).epsilon(1e-6));
  CHECK((evaluated.rows - trained.rows).abs().max().item<double>() < 1e-4);
}

TEST_CASE("dflash2: a draft that knows its labels accepts whole blocks") {
  // The head is made so that each row's best token is its label: hidden rows are taken from the draft itself.
  DflashOptions options;
  options.selector_loss_alpha = 0;
  const std::string config = tiny_config({{"layer_types", "[\"full_attention\", \"full_attention\"]"}});
  TinyProblem problem = tiny_problem(options, config);
  problem.batch["input_ids"].fill_(3);
  problem.weights["candidate_selector.successor_codebook"].zero_();
  DraftRun first(options, facts_of(config), problem.tables, problem.weights);
  const at::Tensor rows = first.normed(first.train({first.batch(problem.batch)}).rows).reshape({-1, 16});
  problem.tables.head_vh.zero_();
  problem.tables.head_vh[3].copy_(rows.mean(0));
  problem.tables.head_vh.narrow(0, 4, 36).copy_(-rows.mean(0).expand({36, 16}));
  DraftRun run(options, facts_of(config), problem.tables, problem.weights);
  const StepOutcome found = run.evaluate({run.batch(problem.batch)});
  const double accuracy = found.metric("acc");
  CHECK(accuracy > 0.6);
  const double length = found.metric("acceptance_length"), possible = found.metric("dflash/hard_label/supervised_prefix_length");
  CHECK(length > 1);
  CHECK(length <= possible);
  CHECK(found.metrics.count("hard_label/unary_top1_accuracy") == 1);
  CHECK(found.metrics.at("hard_label/unary_top1_accuracy").numerator.sizes() == at::IntArrayRef({3}));
}

TEST_CASE("dflash2: every exported name is listed once, and the configuration has each key of the contract") {
  DflashOptions options;
  DraftRun run(options, facts_of(tiny_config()), tiny_problem(options, tiny_config()).tables, {});
  const sf::ExportSpec spec = run.algorithm().export_spec();
  std::set<std::string> names;
  for (const sf::ParameterSpec& tensor : spec.tensors) {
    CHECK(names.insert(tensor.name).second);
  }
  for (const char* name : {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.1.self_attn.q_proj.weight", "layers.0.attention_conv.base_kernel",
                           "layers.0.mlp_conv.kernel_projection.weight", "candidate_selector.predecessor_codebook",
                           "candidate_selector.successor_codebook", "candidate_selector.hidden_projection.weight"}) {
    CAPTURE(name);
    CHECK(names.count(name) == 1);
  }
  CHECK(names.size() == 4 + 2 * (11 + 4) + 2);
  const sf::Json config = sf::Json::parse(spec.config_json);
  for (const std::string& key : spec.required_config_keys) {
    CAPTURE(key);
    const size_t dot = key.find('.');
    const sf::Json& place = dot == std::string::npos ? config : config.at(key.substr(0, dot));
    CHECK(place.contains(dot == std::string::npos ? key : key.substr(dot + 1)));
  }
}
