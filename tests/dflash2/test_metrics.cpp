// Detailed metrics against their definitions, counted slot by slot over the naive model's numbers.
#include <doctest/doctest.h>

#include <cmath>
#include <functional>

#include <ATen/ATen.h>

#include "tests/dflash2/naive_dflash.hpp"

namespace sf::testing {
namespace {

struct Sums {
  double all_numerator = 0, all_denominator = 0;
  std::vector<double> numerator, denominator;  // by slot, the first after the known token is 0
};

// One block's slots after the known token.
struct Block {
  int64_t row = 0, anchor = 0;
  bool live = false;
  std::vector<double> mask, hit, covered, probability, mass, selected, greedy, weight, overlap, agreement, teacher_mass;
};

std::vector<Block> blocks_of(const NaiveOutcome& naive, const at::Tensor& teacher_log_p_bsv) {
  const int64_t b = naive.mask_bwj.size(0), w = naive.mask_bwj.size(1), j = naive.mask_bwj.size(2), s = teacher_log_p_bsv.size(1);
  std::vector<Block> list;
  for (int64_t r = 0; r < b; ++r) {
    for (int64_t n = 0; n < w; ++n) {
      Block block;
      block.row = r;
      block.anchor = naive.position_bwj[r][n][0].item<int64_t>();
      for (int64_t k = 1; k < j; ++k) {
        const int64_t label = naive.labels_bwj[r][n][k].item<int64_t>();
        const at::Tensor p = naive.log_p_bwjv[r][n][k].exp();
        const at::Tensor strict = naive.strict_bwjk[r][n][k];
        // The state at token t says what comes at t + 1.
        const at::Tensor q = teacher_log_p_bsv[r][std::min(block.anchor + k - 1, s - 1)].exp();
        const bool has_selector = naive.greedy_bwj.defined();
        block.mask.push_back(naive.mask_bwj[r][n][k].item<double>());
        block.live = block.live || block.mask.back() > 0.5;
        block.hit.push_back(p.argmax().item<int64_t>() == label);
        block.covered.push_back((strict == label).any().item<bool>());
        block.probability.push_back(p[label].item<double>());
        block.mass.push_back(p.index_select(0, strict).sum().item<double>());
        block.selected.push_back(has_selector ? naive.selected_bwj[r][n][k].item<double>() : 0);
        block.greedy.push_back(has_selector ? naive.greedy_bwj[r][n][k].item<double>() : block.hit.back());
        block.weight.push_back(naive.weight_bwj[r][n][k].item<double>());
        block.overlap.push_back(1 - 0.5 * (p - q).abs().sum().item<double>());
        block.agreement.push_back(p.argmax().item<int64_t>() == q.argmax().item<int64_t>());
        block.teacher_mass.push_back(q.index_select(0, strict).sum().item<double>());
      }
      list.push_back(std::move(block));
    }
  }
  return list;
}

// Where a chain over these hits is: before each slot, is it still alive and the slot supervised; and after it.
struct Chain {
  std::vector<bool> reached, accepted;
  double length = 0;
};

Chain chain_of(const Block& block, const std::vector<double>& hits) {
  Chain chain;
  bool alive = true;
  for (size_t k = 0; k < hits.size(); ++k) {
    const bool supervised = block.mask[k] > 0.5;
    chain.reached.push_back(alive && supervised);
    alive = alive && supervised && hits[k] > 0;
    chain.accepted.push_back(alive);
    chain.length += alive ? 1 : 0;
  }
  return chain;
}

class Expected {
 public:
  explicit Expected(std::vector<Block> blocks) : blocks_(std::move(blocks)), slots_(blocks_[0].mask.size()) {}

  using Slot = std::function<double(const Block&, const Chain&, size_t)>;
  // Sum of `slot` over all blocks, and by slot; `hits` is what the chain follows.
  Sums sum(const Slot& numerator, const Slot& denominator, const std::vector<double> Block::* hits = &Block::greedy) const {
    Sums sums;
    sums.numerator.resize(slots_);
    sums.denominator.resize(slots_);
    for (const Block& block : blocks_) {
      const Chain chain = chain_of(block, block.*hits);
      for (size_t k = 0; k < slots_; ++k) {
        sums.numerator[k] += numerator(block, chain, k);
        sums.denominator[k] += denominator(block, chain, k);
      }
    }
    for (size_t k = 0; k < slots_; ++k) {
      sums.all_numerator += sums.numerator[k];
      sums.all_denominator += sums.denominator[k];
    }
    return sums;
  }

  double live_blocks() const {
    double count = 0;
    for (const Block& block : blocks_) {
      count += block.live ? 1 : 0;
    }
    return count;
  }

  // 1 + the mean over live blocks of the running product of these factors, which a slot without supervision ends.
  double length(const std::vector<double> Block::* factors) const {
    double total = 0;
    for (const Block& block : blocks_) {
      double running = 1;
      for (size_t k = 0; k < slots_; ++k) {
        running *= block.mask[k] > 0.5 ? (block.*factors)[k] : 0;
        total += running;
      }
    }
    return 1 + total / live_blocks();
  }

  double walk(const std::vector<double> Block::* hits) const {
    double total = 0, visits = 0;
    int64_t row = -1, resume = 0;
    for (const Block& block : blocks_) {  // row by row, in the order of positions; dead blocks come last
      if (block.row != row) {
        row = block.row;
        resume = 0;
      }
      if (block.live && block.anchor >= resume) {
        const double length = chain_of(block, block.*hits).length;
        total += length + 1;
        visits += 1;
        resume = block.anchor + static_cast<int64_t>(length) + 1;
      }
    }
    return total / visits;
  }

 private:
  std::vector<Block> blocks_;
  size_t slots_;
};

double of_mask(const Block& block, const Chain&, size_t k) { return block.mask[k]; }
double reached(const Block&, const Chain& chain, size_t k) { return chain.reached[k] ? 1 : 0; }
double accepted(const Block&, const Chain& chain, size_t k) { return chain.accepted[k] ? 1 : 0; }
double reached_and_covered(const Block& block, const Chain& chain, size_t k) { return chain.reached[k] ? block.covered[k] : 0; }

auto masked(const std::vector<double> Block::* values) {
  return [values](const Block& block, const Chain&, size_t k) { return (block.*values)[k] * block.mask[k]; };
}

// The name of a metric for single slots: without the first part.
std::string family(const std::string& name) { return name.substr(name.find('/') + 1); }

void check_ratio(const StepOutcome& found, const std::string& name, const Sums& sums) {
  CAPTURE(name);
  REQUIRE(found.metrics.count(name) == 1);
  REQUIRE(found.metrics.count(family(name)) == 1);
  CHECK(found.metric(name) == doctest::Approx(sums.all_numerator / std::max(sums.all_denominator, 1e-12)).epsilon(1e-5));
  const Ratio& slots = found.metrics.at(family(name));
  REQUIRE(slots.numerator.numel() == static_cast<int64_t>(sums.numerator.size()));
  for (size_t k = 0; k < sums.numerator.size(); ++k) {
    CAPTURE(k);
    CHECK(slots.numerator[static_cast<int64_t>(k)].item<double>() == doctest::Approx(sums.numerator[k]).epsilon(1e-5));
    CHECK(slots.denominator[static_cast<int64_t>(k)].item<double>() == doctest::Approx(sums.denominator[k]).epsilon(1e-5));
  }
}

void check_count(const StepOutcome& found, const std::string& name, const Sums& sums) {
  CAPTURE(name);
  REQUIRE(found.metrics.count(name) == 1);
  REQUIRE(found.metrics.count(family(name)) == 1);
  CHECK(!found.metrics.at(name).denominator.defined());
  CHECK(found.metrics.at(name).numerator.item<double>() == sums.all_numerator);
  for (size_t k = 0; k < sums.numerator.size(); ++k) {
    CHECK(found.metrics.at(family(name)).numerator[static_cast<int64_t>(k)].item<double>() == sums.numerator[k]);
  }
}

void check_chain(const StepOutcome& found, const std::string& name, const Expected& expected, const std::vector<double> Block::* hits) {
  const Sums sums = expected.sum(accepted, reached, hits);
  check_ratio(found, name + "_prefix_acceptance", sums);
  check_count(found, name + "_reached_count", expected.sum(reached, of_mask, hits));
  check_count(found, name + "_accepted_count", expected.sum(accepted, of_mask, hits));
  check_count(found, name + "_first_failure_count",
              expected.sum([](const Block& b, const Chain& c, size_t k) { return reached(b, c, k) - accepted(b, c, k); }, of_mask, hits));
  const Ratio& survival = found.metrics.at(family(name) + "_prefix_survival");
  for (size_t k = 0; k < sums.numerator.size(); ++k) {
    CHECK(survival.numerator[static_cast<int64_t>(k)].item<double>() == sums.numerator[k]);
    CHECK(survival.denominator[static_cast<int64_t>(k)].item<double>() == expected.live_blocks());
  }
}

struct Setting {
  const char* name;
  std::map<std::string, std::string> config;
  bool repeats_tokens;  // few tokens, so that many slots are hit and covered
};

}  // namespace

TEST_CASE("dflash2: every detailed metric is what its definition counts slot by slot") {
  for (const Setting& setting : {Setting{"DFlash2", {}, true}, Setting{"DFlash2, hardly a hit", {}, false},
                                 Setting{"DFlash2 with multiplier and softcap",
                                         {{"dflash_config.output_multiplier", "0.6"}, {"dflash_config.final_logit_softcapping", "3.0"}},
                                         true},
                                 Setting{"DFlash", {{"architectures", "[\"DFlashDraftModel\"]"}}, true}}) {
    CAPTURE(setting.name);
    DflashOptions options;
    options.loss_decay_gamma = 2;
    const std::string config_text = tiny_config(setting.config);
    TinyProblem problem = tiny_problem(options, config_text);
    if (setting.repeats_tokens) {
      problem.batch["input_ids"] = problem.batch["input_ids"].remainder(3);
      problem.tables.head_vh.narrow(0, 3, problem.tables.head_vh.size(0) - 3).mul_(0.2);
    }
    problem.batch["target_last_hidden_states"] = at::randn({2, 12, 16});
    ModelFacts facts;
    facts.draft_config_json = config_text;
    DraftRun draft(options, facts, problem.tables, problem.weights);
    const StepOutcome found = draft.evaluate({draft.batch(problem.batch)});
    const DflashConfig& config = draft.algorithm().config();

    at::Tensor teacher = at::matmul(problem.batch["target_last_hidden_states"].to(at::kDouble), problem.tables.head_vh.to(at::kDouble).t());
    teacher = teacher * config.output_multiplier;
    if (config.final_logit_softcapping > 0) {
      teacher = at::tanh(teacher / config.final_logit_softcapping) * config.final_logit_softcapping;
    }
    const Expected expected(blocks_of(naive_dflash(config, options, problem, 1), at::log_softmax(teacher, -1)));

    const std::string top = config.dflash2 ? "top5" : "top16", hard = "dflash/hard_label/", taught = "dflash/teacher/";
    check_ratio(found, hard + "unary_top1_accuracy", expected.sum(masked(&Block::hit), of_mask));
    check_ratio(found, hard + "unary_probability", expected.sum(masked(&Block::probability), of_mask));
    check_ratio(found, hard + "unary_" + top + "_recall", expected.sum(masked(&Block::covered), of_mask));
    check_ratio(found, hard + "unary_" + top + "_mass", expected.sum(masked(&Block::mass), of_mask));
    CHECK(found.metric(hard + "unary_" + top + "_oracle_accepted_length") == doctest::Approx(expected.length(&Block::covered)));
    CHECK(found.metric(hard + "unary_gold_probability_chain_length") == doctest::Approx(expected.length(&Block::probability)).epsilon(1e-5));
    CHECK(found.metric(hard + "unary_greedy_accepted_length") == doctest::Approx(expected.length(&Block::hit)));
    CHECK(found.metric(hard + "walk_accepted_length") == doctest::Approx(expected.walk(&Block::hit)));
    CHECK(found.metric("acceptance_length") == doctest::Approx(expected.length(&Block::greedy)));
    check_chain(found, hard + "unary_greedy", expected, &Block::hit);
    check_chain(found, hard + "unary_" + top + "_oracle", expected, &Block::covered);

    const Sums supervised = expected.sum([](const Block& b, const Chain&, size_t k) { return b.mask[k] > 0.5 ? 1.0 : 0.0; }, of_mask);
    check_count(found, hard + "supervised_count", supervised);
    const Sums prefix = expected.sum(
        [](const Block& b, const Chain&, size_t k) {
          bool whole = true;
          for (size_t i = 0; i <= k; ++i) {
            whole = whole && b.mask[i] > 0.5;
          }
          return whole ? 1.0 : 0.0;
        },
        of_mask);
    check_count(found, hard + "valid_prefix_count", prefix);
    CHECK(prefix.all_numerator < supervised.all_numerator);  // the problem has a gap inside a block, or the two say the same
    CHECK(found.metrics.at(hard + "block_count").numerator.item<double>() == expected.live_blocks());
    CHECK(found.metric(hard + "supervised_prefix_length") == doctest::Approx(1 + prefix.all_numerator / expected.live_blocks()));
    const Sums weight = expected.sum([](const Block& b, const Chain&, size_t k) { return b.weight[k]; }, of_mask);
    const Ratio& share = found.metrics.at("objective/loss_weight_share");
    for (size_t k = 0; k < weight.numerator.size(); ++k) {
      const auto slot = static_cast<int64_t>(k);
      CHECK((share.numerator[slot] / share.denominator[slot]).item<double>() == doctest::Approx(weight.numerator[k] / weight.all_numerator).epsilon(1e-5));
    }

    check_ratio(found, taught + "overlap", expected.sum(masked(&Block::overlap), of_mask));
    check_ratio(found, taught + "top1_agreement", expected.sum(masked(&Block::agreement), of_mask));
    check_ratio(found, taught + top + "_mass", expected.sum(masked(&Block::teacher_mass), of_mask));
    CHECK(found.metric(taught + "overlap_chain_length") == doctest::Approx(expected.length(&Block::overlap)).epsilon(1e-5));

    CHECK((found.metrics.count("dflash2/selector/greedy_reached_count") == 1) == config.dflash2);
    if (config.dflash2) {
      const std::string selector = "dflash2/selector/";
      CHECK(found.metric(selector + "greedy_accepted_length") == doctest::Approx(expected.length(&Block::greedy)));
      CHECK(found.metric(selector + "walk_accepted_length") == doctest::Approx(expected.walk(&Block::greedy)));
      check_ratio(found, selector + "self_conditioned_marginal_accuracy", expected.sum(masked(&Block::greedy), of_mask));
      check_ratio(found, selector + "teacher_forced_covered_accuracy",
                  expected.sum([](const Block& b, const Chain&, size_t k) { return b.selected[k] * b.mask[k] * b.covered[k]; },
                               masked(&Block::covered)));
      check_chain(found, selector + "greedy", expected, &Block::greedy);
      check_ratio(found, selector + "greedy_prefix_unary_top1_accuracy",
                  expected.sum([](const Block& b, const Chain& c, size_t k) { return c.reached[k] ? b.hit[k] : 0.0; }, reached));
      check_ratio(found, selector + "greedy_prefix_" + top + "_recall", expected.sum(reached_and_covered, reached));
      check_ratio(found, selector + "greedy_prefix_covered_accuracy", expected.sum(accepted, reached_and_covered));
      const auto missed = [](const Block& b, const Chain& c, size_t k) { return reached(b, c, k) - reached_and_covered(b, c, k); };
      const auto misranked = [](const Block& b, const Chain& c, size_t k) { return reached_and_covered(b, c, k) - accepted(b, c, k); };
      check_ratio(found, selector + "greedy_prefix_coverage_miss_rate", expected.sum(missed, reached));
      check_ratio(found, selector + "greedy_prefix_ranking_error_rate", expected.sum(misranked, reached));
      check_count(found, selector + "greedy_covered_count", expected.sum(reached_and_covered, reached));
      check_count(found, selector + "greedy_coverage_miss_count", expected.sum(missed, reached));
      check_count(found, selector + "greedy_ranking_error_count", expected.sum(misranked, reached));
    }
  }
}

TEST_CASE("dflash2: without the target's last states there is no teacher metric, and with them loss and gradients stay the same bits") {
  DflashOptions options;
  const std::string config = tiny_config();
  TinyProblem problem = tiny_problem(options, config);
  ModelFacts facts;
  facts.draft_config_json = config;
  StepInfo step;
  step.wants_details = true;
  DraftRun without(options, facts, problem.tables, problem.weights);
  const StepOutcome plain = without.train({without.batch(problem.batch)}, step);
  problem.batch["target_last_hidden_states"] = at::randn({2, 12, 16});
  DraftRun with(options, facts, problem.tables, problem.weights);
  const StepOutcome taught = with.train({with.batch(problem.batch)}, step);
  CHECK(plain.metrics.count("dflash/teacher/overlap") == 0);
  CHECK(taught.metrics.count("dflash/teacher/overlap") == 1);
  CHECK(plain.loss == taught.loss);
  for (const auto& [name, gradient] : plain.gradients) {
    CAPTURE(name);
    CHECK(at::equal(gradient, taught.gradients.at(name)));
  }
}

TEST_CASE("dflash2: a target that is the draft itself overlaps wholly") {
  // Every teacher row is the draft's own normed row of the slot it belongs to; one block, so that no two slots ask for the same token.
  DflashOptions options;
  const std::string config = tiny_config();
  TinyProblem problem = tiny_problem(options, config);
  problem.batch["anchors"] = at::tensor({2, 1}, at::kLong).view({2, 1});
  problem.batch["keep"] = at::ones({2, 1}, at::kBool);
  problem.batch["loss_mask"].fill_(1);
  ModelFacts facts;
  facts.draft_config_json = config;
  DraftRun draft(options, facts, problem.tables, problem.weights);
  const at::Tensor rows_bjh = draft.normed(draft.evaluate({draft.batch(problem.batch)}).rows);
  at::Tensor states = at::randn({2, 12, 16});
  for (int64_t r = 0; r < 2; ++r) {
    const int64_t anchor = problem.batch["anchors"][r][0].item<int64_t>();
    for (int64_t k = 1; k < 4; ++k) {
      states[r][anchor + k - 1].copy_(rows_bjh[r][k]);
    }
  }
  problem.batch["target_last_hidden_states"] = states;
  const StepOutcome found = draft.evaluate({draft.batch(problem.batch)});
  CHECK(found.metric("dflash/teacher/overlap") == doctest::Approx(1).epsilon(1e-5));
  CHECK(found.metric("dflash/teacher/top1_agreement") == 1);
  CHECK(found.metric("dflash/teacher/overlap_chain_length") == doctest::Approx(4).epsilon(1e-5));
}

}  // namespace sf::testing
