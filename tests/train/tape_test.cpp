// The rules of the tape, each with its test. Everything is compared with one autograd graph over the same arithmetic.
#include "core/train/tape.hpp"

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>

#include "plugins/sharding/single/single.hpp"
#include "sf/error.hpp"

namespace {

using sf::Phase;
using sf::TapeValue;
using Tensors = std::vector<at::Tensor>;

// Units here are plain ATen; asking for a fused operation would be a mistake in the test.
struct NoOps final : sf::Ops {
  [[noreturn]] static at::Tensor none() { throw std::logic_error("no fused operations in this test"); }
  at::Tensor rms_norm(const at::Tensor&, const at::Tensor&, double) override { none(); }
  Tensors residual_rms_norm(const at::Tensor&, const at::Tensor&, const at::Tensor&, double) override { none(); }
  at::Tensor head_norm_rope(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, double) override { none(); }
  at::Tensor swiglu(const at::Tensor&, const at::Tensor&) override { none(); }
  at::Tensor grouped_convolution(const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t) override { none(); }
  at::Tensor block_attention(const sf::BlockAttention&) override { none(); }
  at::Tensor head_objective(const sf::HeadObjective&, const sf::RowLoss&) override { none(); }
  at::Tensor unroll_attention(const sf::UnrollAttention&) override { none(); }
  sf::VocabularyTeaching vocabulary_teacher(const sf::VocabularyTeacher&) override { none(); }
  sf::DistillResult distill_head(const sf::DistillHead&) override { none(); }
  at::Tensor lookup(const at::Tensor&, const at::Tensor&) override { none(); }
  at::Tensor float8_amax(const at::Tensor&) override { none(); }
  sf::Float8Matrix float8_encode(const sf::Float8Encode&) override { none(); }
  void float8_transpose(const at::Tensor&, const at::Tensor&) override { none(); }
  at::Tensor float8_product(const sf::Float8Product&) override { none(); }
  void add_weight_gradient(const at::Tensor&, const at::Tensor&, const at::Tensor&) override { none(); }
};

struct FunctionUnit final : sf::Unit {
  using Body = std::function<Tensors(sf::UnitContext&, const Tensors&)>;
  explicit FunctionUnit(Body b) : body(std::move(b)) {}
  Tensors forward(sf::UnitContext& context, const Tensors& inputs) override { return body(context, inputs); }
  Body body;
};

// `single` that writes down what the runner asked for.
struct SpySharding final : sf::Sharding {
  sf::SingleSharding inner;
  std::vector<std::string> calls;
  std::vector<std::pair<Phase, std::vector<int64_t>>> plans;
  void build(const std::vector<sf::UnitSpec>& units, const sf::Placement& placement) override { inner.build(units, placement); }
  std::vector<sf::Shard>& shards() override { return inner.shards(); }
  at::Tensor whole(int64_t unit, int64_t parameter) override { return inner.whole(unit, parameter); }
  void take_tables(const Tensors&) override {}
  sf::ShardingMemory memory(const std::vector<sf::UnitSpec>& units, int64_t ranks, at::ScalarType dtype) const override {
    return inner.memory(units, ranks, dtype);
  }
  void plan(Phase phase, const std::vector<int64_t>& order) override { plans.emplace_back(phase, order); }
  void begin_window() override { inner.begin_window(); }
  void begin_evaluation() override { calls.push_back("begin_evaluation"); }
  void end_evaluation() override { calls.push_back("end_evaluation"); }
  void abandon() override { calls.push_back("abandon"); }
  void note(const char* what, int64_t unit, Phase phase, int64_t left) {
    const char* names[] = {"forward", "backward", "evaluate"};
    calls.push_back(std::string(what) + " " + std::to_string(unit) + " " + names[static_cast<int>(phase)] + " " +
                    (left > 1000 ? "?" : std::to_string(left)));
  }
  void before_use(int64_t unit, Phase phase, int64_t left) override { note("before", unit, phase, left); }
  void after_use(int64_t unit, Phase phase, int64_t left) override { note("after", unit, phase, left); }
  void reduce(int64_t unit, const Tensors& gradients) override {
    calls.push_back("reduce " + std::to_string(unit));
    inner.reduce(unit, gradients);
  }
  Tensors end_window() override { return inner.end_window(); }
  at::Tensor gradient_norm(const Tensors& gradients) override { return inner.gradient_norm(gradients); }
};

// What a CUDA graph does, on the CPU: a replay runs the body again and puts its results where the first ones lie.
struct FakeRecorder final : sf::GraphRecorder {
  struct Graph final : sf::RecordedGraph {
    Body body;
    Tensors made;
    void replay() override {
      const Tensors again = body();
      at::NoGradGuard no_grad;
      for (size_t i = 0; i < made.size(); ++i) {
        if (made[i].defined() && made[i].const_data_ptr() != again[i].const_data_ptr()) {
          made[i].copy_(again[i]);
        }
      }
    }
  };
  int recorded = 0, rooms = 0;
  std::unique_ptr<sf::RecordedGraph> record(const Body& body, Tensors& made) override {
    auto graph = std::make_unique<Graph>();
    graph->body = body;
    made = body();
    graph->made = made;  // no allocator may take these addresses again
    ++recorded;
    return graph;
  }
  void make_room() override { ++rooms; }
  int64_t bytes() const override { return 0; }
};

struct Bench {
  std::vector<sf::UnitSpec> specs;
  std::vector<std::unique_ptr<FunctionUnit>> units;
  SpySharding sharding;
  NoOps ops;
  std::unique_ptr<sf::TapeRunner> runner;

  sf::GraphRecorder* recorder = nullptr;   // set before open: units but those of the group "root" are recorded
  sf::BlockCapture::Options capture;

  void add(const std::string& name, std::vector<sf::ParameterSpec> parameters, FunctionUnit::Body body, const std::string& group = "") {
    specs.push_back({.name = name, .prefix = name + ".", .shard_group = group.empty() ? name : group, .parameters = std::move(parameters)});
    units.push_back(std::make_unique<FunctionUnit>(std::move(body)));
  }

  void open(std::vector<std::string> recompute = {}, at::ScalarType dtype = at::kFloat) {
    sharding.build(specs, {.device = at::kCPU, .dtype = dtype});
    at::manual_seed(7);
    for (sf::Shard& shard : sharding.shards()) {
      shard.local.normal_();
    }
    std::vector<sf::Unit*> pointers;
    for (auto& unit : units) {
      pointers.push_back(unit.get());
    }
    runner = std::make_unique<sf::TapeRunner>(pointers, specs, sharding, ops, sf::Placement{at::kCPU, dtype},
                                              sf::TapeRunner::Options{.gradient_dtype = at::kFloat, .recompute = std::move(recompute), .recorder = recorder, .capture = capture});
    window();
  }

  void window() { runner->begin_window(at::ones({}), {}); }
  at::Tensor parameter(size_t shard) { return sharding.shards()[shard].local.detach().clone().requires_grad_(true); }
};

sf::ParameterSpec weight(const std::string& name, std::vector<int64_t> shape) { return {.name = name, .shape = std::move(shape)}; }

at::Tensor random(std::vector<int64_t> shape) { return at::randn(shape); }

FunctionUnit::Body mlp() {
  return [](sf::UnitContext& context, const Tensors& in) -> Tensors { return {at::tanh(context.linear("w", in[0]))}; };
}

FunctionUnit::Body square_sum() {
  return [](sf::UnitContext&, const Tensors& in) -> Tensors { return {in[0].to(at::kFloat).pow(2).sum()}; };
}

}  // namespace

TEST_CASE("tape: two units and a loss give the gradients of one autograd graph, bit for bit") {
  Bench bench;
  bench.add("a", {weight("w.weight", {5, 3}), weight("w.bias", {5})}, mlp());
  bench.add("b", {weight("w.weight", {2, 5})}, mlp());
  bench.add("loss", {}, square_sum());
  bench.open();
  const at::Tensor x = random({4, 3});

  bench.runner->begin_micro_step();
  const auto h = bench.runner->run(0, {bench.runner->constant(x)});
  const auto y = bench.runner->run(1, {h[0]});
  bench.runner->add_loss(bench.runner->run(2, {y[0]})[0]);
  bench.runner->backward(true);
  const Tensors found = bench.sharding.end_window();

  const at::Tensor wa = bench.parameter(0), ba = bench.parameter(1), wb = bench.parameter(2);
  const at::Tensor loss = at::tanh(at::linear(at::tanh(at::linear(x, wa, ba)), wb)).pow(2).sum();
  const auto expected = torch::autograd::grad({loss}, {wa, ba, wb});
  for (size_t i = 0; i < 3; ++i) {
    CHECK(at::equal(found[i], expected[i]));
  }
  CHECK(at::equal(bench.runner->loss_sum(), loss.detach()));
}

TEST_CASE("tape: a unit used four times that hands keys on gives the gradients of one autograd graph") {
  const auto step = [](const at::Tensor& wk, const at::Tensor& wx, const at::Tensor& x, const at::Tensor& keys) {
    const at::Tensor key = at::linear(x, wk);
    const at::Tensor all = at::cat({keys, key}, 0);
    return std::pair(at::tanh(at::linear(at::softmax(at::mm(x, all.t()), -1).mm(all), wx)), all);
  };
  Bench bench;
  bench.add("block", {weight("k.weight", {3, 3}), weight("x.weight", {3, 3})},
            [](sf::UnitContext& context, const Tensors& in) -> Tensors {
              const at::Tensor all = at::cat({in[1], context.linear("k", in[0])}, 0);
              return {at::tanh(context.linear("x", at::softmax(at::mm(in[0], all.t()), -1).mm(all))), all};
            });
  bench.add("loss", {}, square_sum());
  bench.open();
  const at::Tensor x = random({4, 3}), keys = random({2, 3});

  bench.runner->begin_micro_step();
  TapeValue h = bench.runner->constant(x), k = bench.runner->constant(keys);
  for (int i = 0; i < 4; ++i) {
    const auto out = bench.runner->run(0, {h, k});
    h = out[0];
    k = out[1];  // the last one gets no gradient
    bench.runner->add_loss(bench.runner->run(1, {h})[0]);
  }
  bench.runner->backward(true);
  const Tensors found = bench.sharding.end_window();

  const at::Tensor wk = bench.parameter(0), wx = bench.parameter(1);
  at::Tensor h2 = x, k2 = keys, loss = at::zeros({});
  for (int i = 0; i < 4; ++i) {
    std::tie(h2, k2) = step(wk, wx, h2, k2);
    loss = loss + h2.pow(2).sum();
  }
  const auto expected = torch::autograd::grad({loss}, {wk, wx});
  CHECK(at::allclose(found[0], expected[0], 1e-6, 1e-6));
  CHECK(at::allclose(found[1], expected[1], 1e-6, 1e-6));
}

TEST_CASE("tape: a tensor that requires grad is refused as a constant") {
  Bench bench;
  bench.add("a", {weight("w.weight", {2, 2})}, mlp());
  bench.open();
  bench.runner->begin_micro_step();
  CHECK_THROWS_WITH_AS((void)bench.runner->constant(at::ones({2, 2}).requires_grad_(true)), doctest::Contains("gradient would be lost"),
                       sf::Error);
  // A value's tensor is a detached leaf that requires grad, so taking it out and back in is refused as well.
  const auto h = bench.runner->run(0, {bench.runner->constant(at::ones({1, 2}))});
  CHECK(h[0].tensor().is_leaf());
  CHECK_THROWS_AS((void)bench.runner->constant(h[0].tensor()), sf::Error);
}

TEST_CASE("tape: an output may be an input, or a view of one") {
  Bench bench;
  bench.add("a", {weight("w.weight", {3, 3})}, mlp());
  bench.add("pass", {}, [](sf::UnitContext&, const Tensors& in) -> Tensors { return {in[0], in[0].slice(0, 0, 1)}; });
  bench.add("loss", {}, [](sf::UnitContext&, const Tensors& in) -> Tensors { return {in[0].pow(2).sum() + in[1].sum()}; });
  bench.open();
  const at::Tensor x = random({4, 3});
  bench.runner->begin_micro_step();
  const auto h = bench.runner->run(0, {bench.runner->constant(x)});
  const auto p = bench.runner->run(1, {h[0]});
  bench.runner->add_loss(bench.runner->run(2, {p[0], p[1]})[0]);
  bench.runner->backward(true);
  const at::Tensor w = bench.parameter(0);
  const at::Tensor y = at::tanh(at::linear(x, w));
  const auto expected = torch::autograd::grad({y.pow(2).sum() + y.slice(0, 0, 1).sum()}, {w});
  CHECK(at::allclose(bench.sharding.end_window()[0], expected[0], 1e-6, 1e-6));
}

TEST_CASE("tape: a unit without any output gradient is skipped in backward but still counts as used") {
  Bench bench;
  bench.add("a", {weight("w.weight", {3, 3})}, mlp());
  sf::ParameterSpec idle = weight("idle", {3});
  idle.idle = true;
  bench.add("side", {weight("w.weight", {3, 3}), idle}, mlp());
  bench.add("loss", {}, square_sum());
  bench.open();
  bench.runner->begin_micro_step();
  const auto h = bench.runner->run(0, {bench.runner->constant(random({2, 3}))});
  (void)bench.runner->run(1, {h[0]});
  bench.runner->add_loss(bench.runner->run(2, {h[0]})[0]);
  bench.runner->backward(true);
  const Tensors found = bench.sharding.end_window();
  CHECK(found[0].defined());
  CHECK(at::equal(found[1], at::zeros({3, 3})));  // as on a rank where others touched it
  CHECK_FALSE(found[2].defined());
  const auto& calls = bench.sharding.calls;
  CHECK(std::find(calls.begin(), calls.end(), "before 1 backward 1") != calls.end());
  CHECK(std::find(calls.begin(), calls.end(), "reduce 1") != calls.end());
  CHECK(bench.runner->never_touched() == std::vector<std::string>{"side.w.weight"});
}

TEST_CASE("tape: writing to an input is an error that names unit and input") {
  Bench bench;
  bench.add("bad", {weight("w.weight", {3, 3})}, [](sf::UnitContext& context, const Tensors& in) -> Tensors {
    {
      at::NoGradGuard no_grad;
      const_cast<at::Tensor&>(in[0]).mul_(2);
    }
    return {context.linear("w", in[0])};
  });
  bench.open();
  bench.runner->begin_micro_step();
  CHECK_THROWS_WITH(bench.runner->run(0, {bench.runner->constant(random({2, 3}))}), doctest::Contains("wrote to its input 0"));
}

TEST_CASE("tape: a value with more than two consumers sums its gradient in float32 and rounds once") {
  Bench bench;
  bench.add("a", {weight("p", {1})}, [](sf::UnitContext& context, const Tensors&) -> Tensors { return {context.parameter("p") * 1.0}; });
  bench.add("scale", {}, [](sf::UnitContext&, const Tensors& in) -> Tensors { return {(in[0] * in[1]).to(at::kFloat).sum()}; });
  const auto gradient_with = [&](const std::vector<float>& factors) {
    bench.window();
    bench.runner->begin_micro_step();
    const auto h = bench.runner->run(0, {});
    for (const float factor : factors) {
      bench.runner->add_loss(bench.runner->run(1, {h[0], bench.runner->constant(at::full({1}, factor).to(at::kBFloat16))})[0]);
    }
    bench.runner->backward(true);
    return bench.sharding.end_window()[0].item<float>();
  };
  bench.open({}, at::kBFloat16);
  // bf16 has 8 bits: 256 + 1 + 1 is 256 when each sum is rounded, 258 when only the last one is.
  CHECK(gradient_with({1.0f, 1.0f, 256.0f}) == 258.0f);
}

TEST_CASE("tape: gradients add up over micro-steps, and a new window starts from zero") {
  Bench bench;
  bench.add("a", {weight("w.weight", {3, 3})}, mlp());
  bench.add("loss", {}, square_sum());
  bench.open();
  const at::Tensor x = random({2, 3}), y = random({5, 3});
  const auto window = [&](const std::vector<at::Tensor>& inputs) {
    bench.window();
    for (size_t i = 0; i < inputs.size(); ++i) {
      bench.runner->begin_micro_step();
      bench.runner->add_loss(bench.runner->run(1, {bench.runner->run(0, {bench.runner->constant(inputs[i])})[0]})[0]);
      bench.runner->backward(i + 1 == inputs.size());
    }
    return bench.sharding.end_window()[0].clone();
  };
  const at::Tensor gx = window({x}), gy = window({y}), both = window({x, y});
  CHECK(at::allclose(both, gx + gy, 1e-6, 1e-6));
  CHECK(at::equal(window({x}), gx));
}

TEST_CASE("tape: a pattern of units has its * anywhere") {
  using sf::names_unit;
  for (const char* pattern : {"block.3.mlp", "block.*", "*.mlp", "block.*.mlp", "*3*", "*"}) {
    CAPTURE(pattern);
    CHECK(names_unit({"other", pattern}, "block.3.mlp"));
  }
  for (const char* pattern : {"block", "*.ml", "lock.*", "block.*.attention", ""}) {
    CAPTURE(pattern);
    CHECK_FALSE(names_unit({pattern}, "block.3.mlp"));
  }
  CHECK_FALSE(names_unit({}, "block.3.mlp"));
}

TEST_CASE("tape: recompute gives the same bits as eager, and keeps no graph between forward and backward") {
  const auto gradients = [](std::vector<std::string> recompute) {
    Bench bench;
    bench.add("block.0", {weight("w.weight", {3, 3})}, mlp());
    bench.add("block.1", {weight("w.weight", {3, 3})}, mlp());
    bench.add("loss", {}, square_sum());
    bench.open(std::move(recompute));
    at::manual_seed(3);
    bench.runner->begin_micro_step();
    const auto h = bench.runner->run(0, {bench.runner->constant(random({4, 3}))});
    bench.runner->add_loss(bench.runner->run(2, {bench.runner->run(1, {h[0]})[0]})[0]);
    bench.runner->backward(true);
    return bench.sharding.end_window();
  };
  const Tensors eager = gradients({}), again = gradients({"block.*"});
  CHECK(at::equal(eager[0], again[0]));
  CHECK(at::equal(eager[1], again[1]));
}

TEST_CASE("tape: the number of uses left is known from the last micro-step on") {
  Bench bench;
  bench.add("a", {weight("w.weight", {3, 3})}, mlp());
  bench.add("loss", {}, square_sum());
  bench.open();
  const auto micro_step = [&](bool boundary) {
    bench.runner->begin_micro_step();
    const auto h = bench.runner->run(0, {bench.runner->constant(random({2, 3}))});
    const auto i = bench.runner->run(0, {h[0]});
    bench.runner->add_loss(bench.runner->run(1, {i[0]})[0]);
    bench.runner->backward(boundary);
  };
  micro_step(false);
  CHECK(bench.sharding.calls.front() == "before 0 forward ?");
  CHECK(std::count(bench.sharding.calls.begin(), bench.sharding.calls.end(), "reduce 0") == 0);
  bench.sharding.calls.clear();
  micro_step(true);
  const std::vector<std::string> expected = {
      "before 0 forward 2",  "after 0 forward 2",  "before 0 forward 1",  "after 0 forward 1",  "before 1 forward 1",
      "after 1 forward 1",   "before 1 backward 1", "after 1 backward 1", "reduce 1",           "before 0 backward 2",
      "after 0 backward 2",  "before 0 backward 1", "after 0 backward 1", "reduce 0"};
  CHECK(bench.sharding.calls == expected);
  REQUIRE(bench.sharding.plans.size() == 1);  // told once, when the first micro-step is complete
  CHECK(bench.sharding.plans[0].first == Phase::forward);
  CHECK(bench.sharding.plans[0].second == std::vector<int64_t>{0, 0, 1});
}

TEST_CASE("tape: a change in the order of units ends the run") {
  Bench bench;
  bench.add("a", {weight("w.weight", {3, 3})}, mlp());
  bench.add("loss", {}, square_sum());
  bench.open();
  const auto micro_step = [&](int uses) {
    bench.runner->begin_micro_step();
    TapeValue h = bench.runner->constant(random({2, 3}));
    for (int i = 0; i < uses; ++i) {
      h = bench.runner->run(0, {h})[0];
    }
    bench.runner->add_loss(bench.runner->run(1, {h})[0]);
    bench.runner->backward(true);
  };
  micro_step(1);
  const uint64_t hash = bench.runner->order_hash();
  micro_step(1);
  CHECK(bench.runner->order_hash() == hash);
  CHECK_THROWS_WITH(micro_step(2), doctest::Contains("order of units changed"));
}

TEST_CASE("tape: evaluation leaves no tape, no graph and no gradient") {
  Bench bench;
  bench.add("a", {weight("w.weight", {3, 3})}, mlp());
  bench.add("loss", {}, square_sum());
  bench.open();
  const at::Tensor x = random({2, 3});
  bench.runner->begin_evaluation({});
  for (int i = 0; i < 2; ++i) {
    bench.runner->begin_micro_step();
    const auto h = bench.runner->run(0, {bench.runner->constant(x)});
    CHECK_FALSE(h[0].tensor().requires_grad());
    bench.runner->add_loss(bench.runner->run(1, {h[0]})[0]);
    bench.runner->add_metric("hits", at::full({}, 2.0), at::full({}, 4.0));
  }
  bench.runner->end_evaluation();
  const at::Tensor y = at::tanh(at::linear(x, bench.parameter(0))).detach();
  CHECK(bench.runner->loss_sum().item<float>() == doctest::Approx(2 * y.pow(2).sum().item<float>()));
  CHECK(bench.runner->metrics().at("hits").numerator.item<double>() == 4.0);
  CHECK(bench.runner->metrics().at("hits").denominator.item<double>() == 8.0);
  CHECK(bench.runner->never_touched().size() == 1);
}

TEST_CASE("tape: when a unit throws, the error names unit, use and phase, and no gradient of the window is left") {
  Bench bench;
  bool fail = false;
  bench.add("a", {weight("w.weight", {3, 3})}, [&](sf::UnitContext& context, const Tensors& in) -> Tensors {
    if (fail) {
      throw sf::Error(sf::ExitCode::kData, "no such luck");
    }
    return {at::tanh(context.linear("w", in[0]))};
  });
  bench.add("loss", {}, square_sum());
  bench.open();
  bench.runner->begin_micro_step();
  bench.runner->add_loss(bench.runner->run(1, {bench.runner->run(0, {bench.runner->constant(random({2, 3}))})[0]})[0]);
  bench.runner->backward(false);
  fail = true;
  bench.runner->begin_micro_step();
  CHECK_THROWS_WITH_AS(bench.runner->run(0, {bench.runner->constant(random({2, 3}))}), "unit 'a', use 0, forward: no such luck", sf::Error);
  fail = false;
  bench.runner->begin_micro_step();
  const at::Tensor zero = at::zeros({1, 3});
  bench.runner->add_loss(bench.runner->run(1, {bench.runner->run(0, {bench.runner->constant(zero)})[0]})[0]);
  bench.runner->backward(true);
  CHECK(at::equal(bench.sharding.end_window()[0], at::zeros({3, 3})));
}

TEST_CASE("tape: a unit that runs out of memory is an error of the device, with what can be turned in training and in evaluating") {
  Bench bench;
  bench.add("a", {weight("w.weight", {3, 3})}, [](sf::UnitContext&, const Tensors&) -> Tensors { return {at::empty({int64_t{1} << 50})}; });
  bench.open();
  const auto told = [&] {
    try {
      bench.runner->begin_micro_step();
      (void)bench.runner->run(0, {bench.runner->constant(at::zeros({2, 3}))});
    } catch (const sf::Error& error) {
      CHECK(error.code() == sf::ExitCode::kDevice);
      CHECK(std::string(error.what()).find("unit 'a', use 0, ") == 0);
      CHECK(std::string(error.what()).find("out of memory") != std::string::npos);
      return std::string(error.hint());
    }
    return std::string();
  };
  CHECK(told().find("training.recompute") != std::string::npos);
  bench.runner->begin_evaluation({});
  const std::string hint = told();
  CHECK(hint.find("how many samples are evaluated at once") != std::string::npos);
  CHECK(hint.find("recompute") == std::string::npos);
}

TEST_CASE("tape: a value of an earlier micro-step is refused") {
  Bench bench;
  bench.add("a", {weight("w.weight", {3, 3})}, mlp());
  bench.add("loss", {}, square_sum());
  bench.open();
  bench.runner->begin_micro_step();
  const auto old = bench.runner->run(0, {bench.runner->constant(random({2, 3}))});
  bench.runner->add_loss(bench.runner->run(1, {old[0]})[0]);
  bench.runner->backward(true);
  bench.runner->begin_micro_step();
  CHECK_THROWS_WITH(bench.runner->run(1, {old[0]}), doctest::Contains("another micro-step"));
}

TEST_CASE("tape: a frozen parameter gets no gradient and lets gradient through") {
  Bench bench;
  bench.add("a", {weight("w.weight", {3, 3})}, mlp());
  sf::ParameterSpec frozen = weight("w.weight", {3, 3});
  frozen.trainable = false;
  bench.add("b", {frozen}, mlp());
  bench.add("loss", {}, square_sum());
  bench.open();
  bench.runner->begin_micro_step();
  const auto h = bench.runner->run(0, {bench.runner->constant(random({2, 3}))});
  bench.runner->add_loss(bench.runner->run(2, {bench.runner->run(1, {h[0]})[0]})[0]);
  bench.runner->backward(true);
  const Tensors found = bench.sharding.end_window();
  CHECK(found[0].abs().sum().item<float>() > 0);
  CHECK_FALSE(found[1].defined());
  CHECK(bench.runner->never_touched().empty());
}

TEST_CASE("tape: a gradient that is formed going forward is added to its buffer once a use, and nowhere while evaluating") {
  Bench bench;
  bool had_buffer = false;
  // y = sum(w * x) with d/dw = x written at once; autograd sees only x.
  bench.add("a", {weight("w.weight", {3})}, [&](sf::UnitContext& context, const Tensors& in) -> Tensors {
    const at::Tensor w = context.parameter("w.weight").detach();
    at::Tensor buffer = context.gradient_buffer("w.weight");
    had_buffer = buffer.defined();
    if (had_buffer) {
      buffer.add_(in[0].detach());
    }
    return {at::mul(in[0], w).sum()};
  });
  bench.add("source", {weight("v.weight", {3})}, [](sf::UnitContext& context, const Tensors&) -> Tensors { return {context.parameter("v.weight").mul(2)}; });
  for (const bool recomputes : {false, true}) {
    bench.open(recomputes ? std::vector<std::string>{"a"} : std::vector<std::string>{});
    bench.runner->begin_micro_step();
    const auto x = bench.runner->run(1, {});
    bench.runner->add_loss(bench.runner->run(0, {x[0]})[0]);
    bench.runner->add_loss(bench.runner->run(0, {x[0]})[0]);
    CHECK(had_buffer == !recomputes);
    bench.runner->backward(true);
    CHECK(had_buffer);
    const Tensors found = bench.sharding.end_window();
    CHECK(at::equal(found[0], x[0].tensor().detach().mul(2)));
    CHECK(at::equal(found[1], bench.parameter(0).detach().mul(4)));
    CHECK(bench.runner->never_touched().empty());
  }
  at::NoGradGuard no_grad;
  bench.runner->begin_evaluation({});
  bench.runner->begin_micro_step();
  (void)bench.runner->run(0, {bench.runner->run(1, {})[0]});
  CHECK_FALSE(had_buffer);
  bench.runner->end_evaluation();
}

namespace {

// A draft in small: a context for all blocks, blocks that hand keys on and are used twice, an objective. The last keys get no gradient.
struct SmallDraft {
  Bench bench;
  FakeRecorder recorder;
  int forwards = 0;

  SmallDraft(bool records, std::vector<std::string> recompute, at::ScalarType dtype, int64_t shapes_at_most = 6) {
    bench.add("context", {weight("w.weight", {4, 3})}, mlp(), "root");
    for (const char* name : {"block.0", "block.1"}) {
      bench.add(name, {weight("k.weight", {4, 4}), weight("x.weight", {4, 4}), weight("scale", {4})},
                [this](sf::UnitContext& context, const Tensors& in) -> Tensors {
                  ++forwards;
                  const at::Tensor key = at::add(context.linear("k", in[0]), in[2]);
                  const at::Tensor h = at::tanh(context.linear("x", at::add(at::mul(in[0], context.parameter("scale")), in[1].mean(0))));
                  return {at::add(h, key), key};
                });
    }
    bench.add("loss", {}, square_sum(), "root");
    if (records) {
      bench.recorder = &recorder;
      bench.capture.shapes_at_most = shapes_at_most;
    }
    bench.open(std::move(recompute), dtype);
  }

  void micro_step(const at::Tensor& x, const at::Tensor& features, bool boundary) {
    sf::TapeRunner& runner = *bench.runner;
    runner.begin_micro_step();
    const TapeValue context = runner.run(0, {runner.constant(features)})[0];
    TapeValue h = runner.constant(x), keys = runner.constant(at::zeros_like(x));
    for (const int64_t block : {1, 2, 1, 2}) {
      const auto made = runner.run(block, {h, context, keys});
      h = made[0];
      keys = made[1];
      runner.add_loss(runner.run(3, {h})[0]);
    }
    runner.backward(boundary);
  }
};

void compare_with_eager(const std::vector<std::string>& recompute, at::ScalarType dtype) {
  SmallDraft eager(false, recompute, dtype), recorded(true, recompute, dtype);
  at::manual_seed(11);
  for (int window = 0; window < 3; ++window) {
    eager.bench.window();
    recorded.bench.window();
    for (int micro = 0; micro < 3; ++micro) {
      const int64_t rows = window == 2 && micro == 1 ? 7 : 5;  // another shape in between
      const at::Tensor x = random({rows, 4}).to(dtype), features = random({6, 3}).to(dtype);
      eager.micro_step(x, features, micro == 2);
      recorded.micro_step(x, features, micro == 2);
    }
    CHECK(at::equal(eager.bench.runner->loss_sum(), recorded.bench.runner->loss_sum()));
    const Tensors expected = eager.bench.sharding.end_window(), found = recorded.bench.sharding.end_window();
    REQUIRE(expected.size() == found.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      CAPTURE(window);
      CAPTURE(i);
      CHECK(at::isfinite(expected[i]).all().item<bool>());
      CHECK(at::equal(expected[i], found[i]));
    }
    for (size_t i = 0; i < expected.size(); ++i) {  // as an optimizer would: in place
      at::NoGradGuard no_grad;
      eager.bench.sharding.shards()[i].local.mul_(0.9).add_(0.01);
      recorded.bench.sharding.shards()[i].local.mul_(0.9).add_(0.01);
    }
  }
  const sf::BlockCapture::Counts counts = recorded.bench.runner->capture_counts();
  CHECK(counts.shapes == 1);     // the other one was met once, and ran eagerly
  CHECK(counts.uses == 4);
  CHECK(counts.graphs == 8);
  CHECK(counts.replays == 6 * 8);
  CHECK(recorded.recorder.recorded == 8);
  CHECK(recorded.bench.runner->captured_units() == 2);
  CHECK(eager.bench.sharding.calls == recorded.bench.sharding.calls);
}

}  // namespace

TEST_CASE("capture: recorded blocks give the losses and gradients of eager ones, bit for bit, over windows and shapes") {
  compare_with_eager({}, at::kFloat);
  compare_with_eager({}, at::kBFloat16);
}

TEST_CASE("capture: a block that is recomputed is recorded with its second forward") {
  compare_with_eager({"block.*"}, at::kFloat);
  compare_with_eager({"block.1"}, at::kFloat);
}

TEST_CASE("capture: a shape too many ends the run and says what to do (K3)") {
  SmallDraft draft(true, {}, at::kFloat, 2);
  for (const int64_t rows : {3, 4, 3, 4, 3}) {
    draft.micro_step(random({rows, 4}), random({6, 3}), false);
  }
  CHECK_THROWS_WITH_AS(draft.micro_step(random({5, 4}), random({6, 3}), false), doctest::Contains("[K3] training.compile_blocks: unit 'block.0' meets shape number 3, and 2 are recorded at most"),
                       sf::Error);
  draft.bench.window();
  draft.micro_step(random({4, 4}), random({6, 3}), true);  // what was recorded before still serves
  CHECK(draft.bench.runner->capture_counts().shapes == 2);
}

TEST_CASE("capture: evaluation is never recorded") {
  SmallDraft draft(true, {}, at::kFloat);
  sf::TapeRunner& runner = *draft.bench.runner;
  runner.begin_evaluation({});
  for (int batch = 0; batch < 3; ++batch) {
    runner.begin_micro_step();
    const TapeValue context = runner.run(0, {runner.constant(random({6, 3}))})[0];
    (void)runner.run(1, {runner.constant(random({5, 4})), context, runner.constant(random({5, 4}))});
  }
  runner.end_evaluation();
  CHECK(draft.recorder.recorded == 0);
}

TEST_CASE("capture: inputs of another form behind a known first block are an error, not another draft's values") {
  SmallDraft draft(true, {}, at::kFloat);
  for (int i = 0; i < 3; ++i) {
    draft.micro_step(random({5, 4}), random({6, 3}), false);
  }
  sf::TapeRunner& runner = *draft.bench.runner;
  runner.begin_micro_step();
  const TapeValue context = runner.run(0, {runner.constant(random({6, 3}))})[0];
  const auto made = runner.run(1, {runner.constant(random({5, 4})), context, runner.constant(random({5, 4}))});
  CHECK_THROWS_WITH_AS((void)runner.run(2, {runner.constant(random({7, 4})), context, made[1]}), doctest::Contains("has other inputs than in earlier micro-steps"), sf::Error);
}
