#include "sdk/testing/small_draft.hpp"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>
#include <stdexcept>

#include "core/kernels/ops.hpp"
#include "core/train/initialize.hpp"
#include "plugins/sharding/single/single.hpp"

namespace sf::testing {
namespace {

using Tensors = std::vector<at::Tensor>;

struct FunctionUnit final : Unit {
  using Body = std::function<Tensors(UnitContext&, const Tensors&)>;
  explicit FunctionUnit(Body b) : body(std::move(b)) {}
  Tensors forward(UnitContext& context, const Tensors& inputs) override { return body(context, inputs); }
  Body body;
};

struct ThrowInBackward : torch::autograd::Function<ThrowInBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list) {
    throw std::runtime_error("on purpose");
  }
};

Tensors context_forward(UnitContext& unit, const Tensors& in) { return {at::tanh(unit.linear("fc", in[0])) * unit.parameter("scale")}; }

Tensors block_forward(UnitContext& unit, const Tensors& in) {
  at::Tensor h = at::tanh(unit.linear("up", in[0] + 0.5 * in[1]));
  h = unit.linear("down", h * unit.parameter("gain"));
  if (unit.has("frozen.weight")) {
    h = unit.linear("frozen", h);
  }
  const at::Tensor& mix = unit.parameter("mix");
  return {in[0] + at::matmul(h, mix.reshape({mix.size(-1), mix.size(-1)}))};
}

Tensors objective_forward(UnitContext& unit, const Tensors& in) {
  return {at::linear(in[0], unit.parameter("head.weight")).to(at::kFloat).pow(2).sum()};
}

Tensors frozen_forward(UnitContext& unit, const Tensors& in) { return {in[0] * unit.parameter("weight")}; }

}  // namespace

std::vector<UnitSpec> draft_specs(const DraftShape& shape) {
  const int64_t hidden = shape.hidden, inner = shape.inner;
  std::vector<UnitSpec> specs;
  specs.push_back({.name = "context", .prefix = "", .shard_group = "root",
                   .parameters = {{.name = "fc.weight", .shape = {hidden, 5}, .init_std = 0.4},
                                  {.name = "fc.bias", .shape = {hidden}, .init = Init::zeros},
                                  {.name = "scale", .shape = {1}, .init = Init::ones}}});
  for (int64_t b = 0; b < shape.blocks; ++b) {
    UnitSpec block{.name = "block." + std::to_string(b), .prefix = "layers." + std::to_string(b) + ".", .shard_group = "block." + std::to_string(b),
                   .parameters = {{.name = "up.weight", .shape = {inner, hidden}, .init_std = 0.4},
                                  {.name = "up.bias", .shape = {inner}, .init = Init::zeros},
                                  {.name = "gain", .shape = {inner}, .init = Init::ones},
                                  {.name = "down.weight", .shape = {hidden, inner}, .init_std = 0.4},
                                  {.name = "mix", .shape = {2, hidden / 2, hidden}, .init_std = 0.4},
                                  {.name = "idle", .shape = {3, 2}, .idle = true}}};
    if (shape.has_frozen && b == 1) {
      block.parameters.push_back({.name = "frozen.weight", .shape = {hidden, hidden}, .init_std = 0.4, .trainable = false});
    }
    if (shape.has_rare && b == 1) {
      block.parameters.push_back({.name = "rare", .shape = {7, hidden}, .init_std = 0.4, .idle = shape.rare_is_idle});
    }
    specs.push_back(std::move(block));
  }
  specs.push_back({.name = "objective", .prefix = "", .shard_group = "root", .parameters = {{.name = "head.weight", .shape = {7, hidden}, .init_std = 0.4}}});
  if (shape.has_frozen) {
    specs.push_back({.name = "frozen", .prefix = "frozen.", .shard_group = "frozen",
                     .parameters = {{.name = "weight", .shape = {hidden}, .init_std = 1.0, .trainable = false}}});
  }
  return specs;
}

void DraftRun::train(Sharding& sharding, Comm* comm, Outcome& outcome) const {
  const int64_t rank = comm != nullptr ? comm->rank() : 0, ranks = comm != nullptr ? comm->size() : 1;
  const std::vector<UnitSpec> specs = draft_specs(shape);
  std::vector<std::unique_ptr<FunctionUnit>> units;
  bool throw_armed = false, throw_now = false, rare_now = false;
  for (const UnitSpec& spec : specs) {
    if (spec.name == "context") {
      units.push_back(std::make_unique<FunctionUnit>(context_forward));
    } else if (spec.name == "objective") {
      units.push_back(std::make_unique<FunctionUnit>(objective_forward));
    } else if (spec.name == "frozen") {
      units.push_back(std::make_unique<FunctionUnit>(frozen_forward));
    } else if (spec.name == "block.1") {
      units.push_back(std::make_unique<FunctionUnit>([&throw_now, &rare_now](UnitContext& unit, const Tensors& in) {
        Tensors out = block_forward(unit, in);
        if (rare_now) {
          out[0] = out[0] * unit.parameter("rare").sum(0);
        }
        if (throw_now) {
          out[0] = ThrowInBackward::apply(out[0]);
        }
        return out;
      }));
    } else {
      units.push_back(std::make_unique<FunctionUnit>(block_forward));
    }
  }
  const Placement placement{.device = at::kCPU, .dtype = dtype, .comm = comm};
  std::unique_ptr<Transform, void (*)(Transform*)> transform(nullptr, nullptr);
  std::unique_ptr<Transforms> transforms;
  if (make_transform) {
    transform = make_transform();
    transforms = std::make_unique<Transforms>(std::vector<Transforms::Member>{{.name = "transform", .transform = transform.get()}}, specs);
    transforms->build(placement.device, dtype, cpu_ops());
    if (GatherCodec* codec = transforms->codec(); codec != nullptr) {
      sharding.take_codec(*codec);
    }
  }
  sharding.build(specs, placement);
  initialize_weights(specs, sharding.shards(), 3);
  std::vector<Unit*> pointers;
  for (auto& unit : units) {
    pointers.push_back(unit.get());
  }
  TapeRunner runner(pointers, specs, sharding, cpu_ops(), placement,
                    {.gradient_dtype = at::kFloat, .recompute = shape.recompute, .transforms = transforms.get(), .lends_weights = lends_weights});
  AdamW optimizer(sharding.shards(), {.weight_decay = 0.1, .max_grad_norm = 0.5});
  if (before_start) {
    before_start(optimizer, sharding, comm);
  }

  const auto objective = 1 + shape.blocks;
  // Sample i of a window: different rows for each, so that ranks hold different numbers of tokens.
  const auto sample = [&](int64_t window, int64_t i) {
    at::Tensor x = at::arange(5 * (2 + i % 3), at::kFloat).mul_(0.37).add_(static_cast<double>(7 * window + i)).sin_();
    return x.view({-1, 5}).to(dtype);
  };
  const auto micro_step = [&](int64_t window, int64_t i) {
    rare_now = shape.has_rare && uses_rare(window, i);
    runner.begin_micro_step();
    const auto context = runner.run(0, {runner.constant(sample(window, i))})[0];
    TapeValue h = context;
    if (shape.block_uses > 1) {
      for (int64_t use = 0; use < shape.block_uses; ++use) {
        h = runner.run(1, {h, context})[0];
        runner.add_loss(runner.run(objective, {h})[0]);
      }
      return;
    }
    for (int64_t b = 0; b < shape.blocks; ++b) {
      h = runner.run(1 + b, {h, context})[0];
    }
    if (shape.has_frozen) {
      h = runner.run(objective + 1, {h})[0];
    }
    runner.add_loss(runner.run(objective, {h})[0]);
  };
  // Every rank has as many micro-steps; `accumulation` of them hold `samples` samples of the window in all.
  const int64_t mine = samples * accumulation / ranks;
  const auto window_of = [&](int64_t window) {
    runner.begin_window(at::ones({}), {});
    for (int64_t m = 0; m < mine; ++m) {
      throw_now = throw_armed && m == (throw_at_boundary ? mine - 1 : 0);
      micro_step(window, m * ranks + rank);
      runner.backward(m + 1 == mine);
    }
  };
  std::vector<at::Tensor> gradients, touched;
  for (int64_t window = first_window; window < windows; ++window) {
    if (evaluate_between) {
      runner.begin_evaluation({});
      micro_step(window, rank);
      micro_step(window, rank);
      runner.end_evaluation();
    }
    if (window == throw_in_window) {
      throw_armed = true;
      bool threw = false;
      try {
        window_of(window);
      } catch (const std::exception&) {
        threw = true;
        if (runner.take_weights_back()) {
          optimizer.write_weights({});
        }
      }
      if (!threw) {
        throw std::logic_error("the window that throws did not throw");
      }
      throw_armed = throw_now = false;
    }
    window_of(window);
    gradients = sharding.end_window();
    if (runner.take_weights_back()) {
      optimizer.write_weights(gradients);
    }
    const at::Tensor norm = sharding.gradient_norm(gradients);
    touched = runner.touched_by_any();
    if (window + 1 == windows) {
      for (at::Tensor& gradient : gradients) {
        gradient = gradient.defined() ? gradient.clone() : gradient;  // the optimizer scales them in place
      }
      const std::vector<at::Tensor> kept = gradients;
      std::vector<at::Tensor> given;
      for (const at::Tensor& gradient : kept) {
        given.push_back(gradient.defined() ? gradient.clone() : gradient);
      }
      (void)optimizer.step(given, norm, at::ones({}), 0.01, touched);
    } else {
      (void)optimizer.step(gradients, norm, at::ones({}), 0.01, touched);
    }
    outcome.losses.push_back(runner.loss_sum().item<double>());
    outcome.norms.push_back(norm.item<double>());
    if (after_window) {
      after_window(window, sharding);
    }
  }
  if (at_end) {
    at_end(optimizer, sharding, comm);
  }
  if (outcome.weights.empty()) {
    return;
  }
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < sharding.shards().size(); ++i) {
    const Shard& shard = sharding.shards()[i];
    outcome.weights.at(shard.name).view({-1}).slice(0, shard.begin, shard.end).copy_(shard.local.reshape({-1}));
    if (gradients[i].defined() && (touched.empty() || !touched[i].defined() || touched[i].item<bool>())) {
      outcome.gradients.at(shard.name).view({-1}).slice(0, shard.begin, shard.end).copy_(gradients[i].reshape({-1}));
    }
  }
}

namespace {

Outcome empty_outcome(const DraftRun& run) {
  Outcome outcome;
  for (const UnitSpec& spec : draft_specs(run.shape)) {
    for (const ParameterSpec& parameter : spec.parameters) {
      outcome.weights[spec.prefix + parameter.name] = at::full(parameter.shape, NAN);
      outcome.gradients[spec.prefix + parameter.name] = at::full(parameter.shape, NAN);
    }
  }
  return outcome;
}

}  // namespace

Outcome train_single(const DraftRun& run) {
  Outcome outcome = empty_outcome(run);
  SingleSharding sharding;
  run.train(sharding, nullptr, outcome);
  return outcome;
}

Outcome train_ranks(const DraftRun& run, int64_t ranks, const std::function<std::unique_ptr<Sharding, void (*)(Sharding*)>()>& make,
                    const std::function<void(FakeComm&, Sharding&)>& look) {
  at::set_num_threads(1);
  std::vector<Outcome> outcomes(static_cast<size_t>(ranks));
  const Outcome shared = empty_outcome(run);
  FakeHub(ranks, run.gathers_straight).run([&](FakeComm& comm) {
    Outcome& mine = outcomes[static_cast<size_t>(comm.rank())];
    mine.weights = shared.weights;      // the same tensors: every rank fills in its part
    mine.gradients = shared.gradients;
    const auto sharding = make();
    run.train(*sharding, &comm, mine);
    if (look) {
      look(comm, *sharding);
    }
  });
  Outcome outcome = outcomes[0];
  for (size_t window = 0; window < outcome.losses.size(); ++window) {
    for (size_t rank = 1; rank < outcomes.size(); ++rank) {
      outcome.losses[window] += outcomes[rank].losses[window];
      if (outcomes[rank].norms[window] != outcome.norms[window]) {
        throw std::logic_error("ranks have different gradient norms");
      }
    }
  }
  return outcome;
}

double largest_difference(const std::map<std::string, at::Tensor>& a, const std::map<std::string, at::Tensor>& b) {
  double most = 0;
  for (const auto& [name, expected] : b) {
    const at::Tensor& found = a.at(name);
    const at::Tensor known = at::isfinite(expected);
    if (!at::equal(at::isfinite(found), known)) {
      return INFINITY;
    }
    if (known.any().item<bool>()) {
      const at::Tensor scale = expected.masked_select(known).abs().max().clamp_min(1e-12);
      most = std::max(most, (found - expected).masked_select(known).abs().max().div(scale).item<double>());
    }
  }
  return most;
}

}  // namespace sf::testing
