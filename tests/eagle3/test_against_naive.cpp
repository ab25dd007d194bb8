// The plugin over the real tape against one autograd graph with dense masks, in the cases that no reference number fixes.
#include <doctest/doctest.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <string>
#include <vector>

#include "plugins/algorithm/eagle3/eagle3.hpp"
#include "sf/json.hpp"
#include "tests/eagle3/naive_eagle3.hpp"
#include "tests/draft/algorithm_run.hpp"

using namespace sf;
using namespace sf::testing;

namespace {

constexpr double kTight = 2e-5;  // float32 in another order of summation

struct NaiveCase {
  std::string name;
  Eagle3Options options;
  int64_t hidden = 16, target_hidden = 16, heads = 2, kv_heads = 1, vocab = 24, draft_vocab = 10, tokens = 9;
  bool fc_norm = false, norm_output = true;
  std::string rope = "null";
};

Json config_of(const NaiveCase& p) {
  Json config = Json::parse(R"({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "intermediate_size": 24, "num_hidden_layers": 1,
    "head_dim": 8, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 64, "hidden_act": "silu", "tie_word_embeddings": false})");
  config.set("hidden_size", p.hidden).set("target_hidden_size", p.target_hidden).set("num_attention_heads", p.heads);
  config.set("num_key_value_heads", p.kv_heads).set("vocab_size", p.vocab).set("draft_vocab_size", p.draft_vocab);
  config.set("fc_norm", p.fc_norm).set("norm_output", p.norm_output).set("rope_scaling", Json::parse(p.rope));
  return config;
}

struct Made {
  ModelFacts facts;
  TargetTables tables;
  std::map<std::string, at::Tensor> weights, batch;
  at::Tensor tokens_w;
};

Made make(const NaiveCase& p, int64_t seed = 3) {
  at::manual_seed(static_cast<uint64_t>(seed));
  Made made;
  made.facts.draft_config_json = config_of(p).dump();
  made.facts.target_layer_ids = {1, 2, 3};
  made.facts.bfloat16 = false;
  made.tables = {p.target_hidden == p.hidden ? at::randn({p.vocab, p.hidden}) : at::Tensor(), at::randn({p.vocab, p.target_hidden})};
  Eagle3 algorithm(p.options);
  for (const UnitSpec& unit : algorithm.describe(made.facts).units) {
    for (const ParameterSpec& parameter : unit.parameters) {
      const at::Tensor noise = at::randn(parameter.shape).mul(0.3);
      made.weights[unit.prefix + parameter.name] = parameter.init == Init::ones ? noise.add(1) : noise;
    }
  }
  const int64_t s = p.tokens;
  made.tokens_w = std::get<0>(at::randperm(p.vocab, at::TensorOptions().dtype(at::kLong)).narrow(0, 0, p.draft_vocab).sort());
  made.batch["input_ids"] = at::randint(p.vocab, {2, s}, at::kLong);
  at::Tensor mask = at::ones({2, s}, at::TensorOptions().dtype(at::kLong));
  mask[0][0] = 0;
  mask[0][s / 2] = 0;  // a gap
  mask[1].narrow(0, s - 2, 2).zero_();  // padding
  made.batch["loss_mask"] = mask;
  at::Tensor counted = mask.clone();
  counted[0][s - 1] = 0;
  counted[1][s - 3] = 0;
  made.batch["counted"] = counted;
  made.batch["aux_hidden_state"] = at::randn({2, s, 3 * p.target_hidden});
  made.batch["hidden_state"] = at::randn({2, s, p.target_hidden}).mul(2);
  for (const char* name : {"input_ids", "aux_hidden_state", "hidden_state"}) {
    made.batch[name][1].narrow(0, s - 2, 2).zero_();
  }
  return made;
}

void set_vocabulary(Eagle3& algorithm, const Made& made, const NaiveCase& p) {
  at::Tensor t2d = at::zeros({p.vocab}, at::TensorOptions().dtype(at::kBool));
  t2d.index_fill_(0, made.tokens_w, 1);
  algorithm.set_buffers({{"t2d", t2d}, {"d2t", at::sub(made.tokens_w, at::arange(p.draft_vocab, made.tokens_w.options()))}}, "test");
}

NaiveDraft naive_of(const NaiveCase& p, const Made& made, const Eagle3& algorithm) {
  NaiveDraft naive;
  naive.heads = p.heads;
  naive.kv_heads = p.kv_heads;
  naive.uses = p.options.ttt_length;
  naive.inverse_frequencies = algorithm.config().layers.rope.inverse_frequencies;
  naive.attention_scaling = algorithm.config().layers.rope.attention_scaling;
  naive.fc_norm = p.fc_norm;
  naive.norm_output = p.norm_output;
  naive.loss = p.options.loss;
  naive.kl_scale = p.options.kl_scale;
  naive.kl_decay = p.options.kl_decay;
  naive.weights = made.weights;
  if (!p.options.train_embedding) {
    naive.weights["embed_tokens.weight"] = made.tables.embedding_vh;
  }
  naive.target_head_vx = made.tables.head_vh;
  naive.tokens_w = made.tokens_w;
  return naive;
}

NaiveBatch naive_batch(const Made& made) {
  return {made.batch.at("input_ids"), made.batch.at("counted"), made.batch.at("aux_hidden_state"), made.batch.at("hidden_state")};
}

void compare(const NaiveCase& p) {
  CAPTURE(p.name);
  const Made made = make(p);
  Eagle3 algorithm(p.options);
  AlgorithmRun run(algorithm, made.facts, made.tables, made.weights, at::kFloat);
  set_vocabulary(algorithm, made, p);
  const StepOutcome found = run.train({run.batch(made.batch)});

  at::AutoGradMode record(true);
  NaiveDraft naive = naive_of(p, made, algorithm);
  std::vector<at::Tensor> leaves;
  std::vector<std::string> names;
  for (auto& [name, weight] : naive.weights) {
    if (name != "embed_tokens.weight" || p.options.train_embedding) {
      weight = weight.detach().clone().requires_grad_();
      leaves.push_back(weight);
      names.push_back(name);
    }
  }
  const NaiveResult expected = naive_unroll(naive, naive_batch(made));
  CHECK(found.loss == doctest::Approx(expected.loss.item<double>()).epsilon(kTight));
  for (size_t k = 0; k < expected.step_losses.size(); ++k) {
    const std::string suffix = "_" + std::to_string(k);
    CHECK(found.metric("ploss" + suffix) == doctest::Approx(expected.step_losses[k].item<double>()).epsilon(kTight));
    CHECK(found.metric("acceptance_rate" + suffix) == doctest::Approx(expected.acceptance[k]).epsilon(kTight));
    CHECK(found.numerator_of("acc" + suffix) == expected.correct[k]);
    CHECK(found.denominator_of("acc" + suffix) == expected.count[k]);
  }
  const auto gradients = torch::autograd::grad({expected.loss}, leaves, {}, false, false, /*allow_unused=*/true);
  for (size_t i = 0; i < leaves.size(); ++i) {
    CAPTURE(names[i]);
    if (!gradients[i].defined()) {
      CHECK(found.gradients.count(names[i]) == 0);
      continue;
    }
    REQUIRE(found.gradients.count(names[i]) == 1);
    CHECK((found.gradients.at(names[i]) - gradients[i]).norm().item<double>() <= 1e-4 * std::max(1e-3, gradients[i].norm().item<double>()));
  }
}

}  // namespace

TEST_CASE("eagle3: loss, each use and every gradient equal a dense graph's, in every kind of draft") {
  const auto uses = [](int64_t n, DistillLoss loss = DistillLoss::kl) {
    Eagle3Options options;
    options.ttt_length = n;
    options.loss = loss;
    options.kl_scale = 0.9;
    options.kl_decay = 2;
    return options;
  };
  compare({.name = "plain", .options = uses(3)});
  compare({.name = "alpha", .options = uses(3, DistillLoss::alpha)});
  compare({.name = "lambda", .options = uses(3, DistillLoss::lambda)});
  compare({.name = "one use", .options = uses(1)});
  compare({.name = "more uses than tokens", .options = uses(7), .tokens = 5});
  compare({.name = "whole vocabulary", .options = uses(2), .draft_vocab = 24});
  compare({.name = "one token", .options = uses(2), .draft_vocab = 1});
  compare({.name = "MHA", .options = uses(3), .kv_heads = 2});
  compare({.name = "GQA of four", .options = uses(2), .heads = 4, .kv_heads = 2});
  compare({.name = "eagle3.1", .options = uses(3), .fc_norm = true, .norm_output = false});
  compare({.name = "linear rope", .options = uses(2), .rope = R"({"rope_type": "linear", "factor": 4.0})"});
  compare({.name = "yarn", .options = uses(2), .rope = R"({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16})"});
  Eagle3Options trained = uses(3);
  trained.train_embedding = true;
  compare({.name = "trained embedding", .options = trained});
  compare({.name = "another hidden size", .options = trained, .target_hidden = 20});
  compare({.name = "another hidden size, eagle3.1", .options = trained, .target_hidden = 12, .fc_norm = true, .norm_output = false});
  Eagle3Options compact = uses(3);
  compact.teacher_chunk_columns = 5;
  compact.objective_chunk_rows = 3;
  compare({.name = "small chunks", .options = compact});
}

TEST_CASE("eagle3: acceptance is that of greedy drafting, guess by guess, over every token that may start") {
  NaiveCase p{.name = "few tokens", .options = {}, .vocab = 24, .draft_vocab = 3, .tokens = 40};
  p.options.ttt_length = 4;
  int64_t several = 0;
  for (int64_t seed = 0; seed < 4; ++seed) {
    Made made = make(p, seed);
    // Stored tokens are the draft's own three, so that a third of the guesses hit.
    made.batch["input_ids"] = made.tokens_w.index_select(0, at::randint(3, {2 * p.tokens}, at::kLong)).view({2, p.tokens});
    Eagle3 algorithm(p.options);
    AlgorithmRun run(algorithm, made.facts, made.tables, made.weights, at::kFloat);
    set_vocabulary(algorithm, made, p);
    const StepOutcome found = run.evaluate({run.batch(made.batch)});

    const NaiveDraft naive = naive_of(p, made, algorithm);
    const NaiveBatch batch = naive_batch(made);
    const auto *ids = made.batch.at("input_ids").const_data_ptr<int64_t>(), *mask = made.batch.at("loss_mask").const_data_ptr<int64_t>();
    double starts = 0, accepted = 0;
    std::vector<double> survived(static_cast<size_t>(p.options.ttt_length), 0);
    for (int64_t row = 0; row < 2; ++row) {
      const auto supervised = [&](int64_t t) { return t < p.tokens && mask[row * p.tokens + t] != 0; };
      for (int64_t anchor = 1; anchor + 1 < p.tokens; ++anchor) {
        if (!supervised(anchor) || !supervised(anchor + 1)) {
          continue;
        }
        ++starts;
        const std::vector<int64_t> guesses = naive_greedy(naive, batch, row, anchor);
        int64_t hits = 0;
        while (hits < p.options.ttt_length && supervised(anchor + 1 + hits) &&
               guesses[static_cast<size_t>(hits)] == ids[row * p.tokens + anchor + 1 + hits]) {
          survived[static_cast<size_t>(hits)] += 1;
          ++hits;
        }
        accepted += static_cast<double>(hits);
        several += hits >= 2 ? 1 : 0;
      }
    }
    CHECK(found.denominator_of("acceptance_length") == starts);
    CHECK(found.numerator_of("acceptance_length") == starts + accepted);
    const Ratio& survival = found.metrics.at("acceptance/prefix_survival");
    for (int64_t k = 0; k < p.options.ttt_length; ++k) {
      CHECK(survival.numerator[k].item<double>() == survived[static_cast<size_t>(k)]);
    }
  }
  CHECK(several > 5);  // or the test would say little about the second guess
}

TEST_CASE("eagle3: more padding changes the divisor and nothing else") {
  NaiveCase p{.name = "padding", .options = {}};
  p.options.ttt_length = 3;
  const Made made = make(p);
  Eagle3 algorithm(p.options);
  AlgorithmRun run(algorithm, made.facts, made.tables, made.weights, at::kFloat);
  set_vocabulary(algorithm, made, p);
  const StepOutcome found = run.train({run.batch(made.batch)});
  std::map<std::string, at::Tensor> padded;
  for (const auto& [name, tensor] : made.batch) {
    padded[name] = tensor.dim() == 2 ? at::constant_pad_nd(tensor, {0, 5}) : at::constant_pad_nd(tensor, {0, 0, 0, 5});
  }
  const StepOutcome longer = run.train({run.batch(padded)});
  const double ratio = static_cast<double>(p.tokens) / static_cast<double>(p.tokens + 5);
  CHECK(longer.loss == doctest::Approx(found.loss * ratio).epsilon(kTight));
  CHECK(longer.metric("acceptance_rate") == doctest::Approx(found.metric("acceptance_rate")).epsilon(kTight));
  for (const auto& [name, gradient] : found.gradients) {
    CAPTURE(name);
    CHECK((longer.gradients.at(name) - gradient * ratio).norm().item<double>() <= 1e-5 * gradient.norm().item<double>());
  }
}

TEST_CASE("eagle3: micro-steps weigh alike, a dead one weighs nothing, and a dead row leaves the mean of the others alone") {
  NaiveCase p{.name = "pooling", .options = {}};
  p.options.ttt_length = 2;
  const Made first = make(p, 3);
  Made second = make(p, 4);
  Eagle3 algorithm(p.options);
  AlgorithmRun run(algorithm, first.facts, first.tables, first.weights, at::kFloat);
  set_vocabulary(algorithm, first, p);
  const Batch one = run.batch(first.batch), two = run.batch(second.batch);
  const StepOutcome alone = run.train({one}), other = run.train({two}), both = run.train({one, two});
  CHECK(both.loss == doctest::Approx((alone.loss + other.loss) / 2).epsilon(kTight));

  std::map<std::string, at::Tensor> dead;
  for (const auto& [name, tensor] : first.batch) {
    dead[name] = at::zeros_like(tensor);
  }
  const Batch nothing = run.batch(dead, {-1, -1});
  CHECK(algorithm.weigh(nothing) == 0);
  const StepOutcome with_dead = run.train({one, nothing});
  CHECK(with_dead.loss == alone.loss);
  for (const auto& [name, gradient] : alone.gradients) {
    CHECK(at::equal(with_dead.gradients.at(name), gradient));
  }

  std::map<std::string, at::Tensor> half;
  for (const auto& [name, tensor] : first.batch) {
    half[name] = tensor.clone();
    half[name][1].zero_();
  }
  const StepOutcome half_dead = run.train({run.batch(half, {0, -1})});
  std::map<std::string, at::Tensor> single;
  for (const auto& [name, tensor] : first.batch) {
    single[name] = tensor.narrow(0, 0, 1).contiguous();
  }
  CHECK(half_dead.loss == doctest::Approx(run.train({run.batch(single)}).loss).epsilon(kTight));
}

TEST_CASE("eagle3: rows beyond every supervised position cost nothing and a micro-step whose targets are all outside the draft's tokens is zero") {
  NaiveCase p{.name = "outside", .options = {}};
  p.options.ttt_length = 2;
  const Made made = make(p);
  Eagle3 algorithm(p.options);
  AlgorithmRun run(algorithm, made.facts, made.tables, made.weights, at::kFloat);
  // The draft knows one token, and it is never the target's best.
  Made other = made;
  const at::Tensor z = at::matmul(made.batch.at("hidden_state"), made.tables.head_vh.t());
  at::Tensor is_best = at::zeros({p.vocab}, at::TensorOptions().dtype(at::kBool));
  is_best.index_fill_(0, z.argmax(-1).view({-1}), 1);
  NaiveCase q = p;
  q.draft_vocab = 2;
  Made few = make(q);
  few.batch = made.batch;
  few.tables = made.tables;
  few.tokens_w = is_best.logical_not().nonzero().view({-1}).narrow(0, 0, 2);
  Eagle3 small(q.options);
  AlgorithmRun small_run(small, few.facts, few.tables, few.weights, at::kFloat);
  set_vocabulary(small, few, q);
  const StepOutcome found = small_run.train({small_run.batch(few.batch)});
  CHECK(found.loss == 0);
  CHECK(found.metric("acc_0") == 0);
  CHECK(found.denominator_of("acc_0") > 0);
  for (const auto& [name, gradient] : found.gradients) {
    CAPTURE(name);
    CHECK(gradient.abs().max().item<double>() == 0);
  }
}

TEST_CASE("eagle3: recomputing units changes no bit; the objective, which forms its gradient going forward, adds it up in the other order") {
  NaiveCase p{.name = "recompute", .options = {}};
  p.options.ttt_length = 3;
  const Made made = make(p);
  Eagle3 plain(p.options);
  AlgorithmRun run(plain, made.facts, made.tables, made.weights, at::kFloat);
  set_vocabulary(plain, made, p);
  const StepOutcome found = run.train({run.batch(made.batch)});
  for (const std::vector<std::string>& units : {std::vector<std::string>{"fusion", "midlayer"}, std::vector<std::string>{"*"}}) {
    Eagle3 again(p.options);
    AlgorithmRun recomputing(again, made.facts, made.tables, made.weights, at::kFloat, {.recompute = units});
    set_vocabulary(again, made, p);
    const StepOutcome other = recomputing.train({recomputing.batch(made.batch)});
    CHECK(other.loss == found.loss);
    CHECK(other.gradients.size() == found.gradients.size());
    for (const auto& [name, gradient] : found.gradients) {
      CAPTURE(name);
      if (name == "lm_head.weight" && units.size() == 1) {
        CHECK((other.gradients.at(name) - gradient).norm().item<double>() <= 1e-6 * gradient.norm().item<double>());
      } else {
        CHECK(at::equal(other.gradients.at(name), gradient));
      }
    }
  }
}
