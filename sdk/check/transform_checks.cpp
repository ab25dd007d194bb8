// Checks of transforms: over a draft of plain units whose sizes float8 can take, with the real tape and optimizer.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "core/base/text.hpp"
#include "core/kernels/ops.hpp"
#include "core/train/transforms.hpp"
#include "sdk/check/tensor_checks.hpp"
#include "sdk/testing/small_draft.hpp"

namespace sf::check {
namespace {

using sf::testing::DraftRun;
using sf::testing::LonePlugin;

DraftRun draft() {
  DraftRun run;
  run.shape.hidden = 32;
  run.shape.inner = 80;
  return run;
}

/// A started transform that has been asked about the draft.
struct Started {
  LonePlugin plugin;
  Transform& transform;

  explicit Started(const Candidate& candidate)
      : plugin(candidate.file, candidate.entry, candidate.values(), candidate.services), transform(started(plugin)) {}

 private:
  static Transform& started(LonePlugin& plugin) {
    plugin.require(plugin.create(), "create");
    plugin.require(plugin.start(), "start");
    return *static_cast<Transform*>(const_cast<void*>(plugin.get_interface(kTransformInterface)));
  }
};

sf::testing::Outcome trained(const Candidate& candidate, DraftRun run) {
  Started started(candidate);
  run.make_transform = [&] { return std::unique_ptr<Transform, void (*)(Transform*)>(&started.transform, [](Transform*) {}); };
  return sf::testing::train_single(run);
}

Outcome takes_over_once(const Candidate& candidate) {
  Started started(candidate);
  const std::vector<LinearSpec> linears = linear_specs(sf::testing::draft_specs(draft().shape));
  const std::vector<bool> first = started.transform.take_over(linears), second = started.transform.take_over(linears);
  if (first.size() != linears.size()) {
    return failed(format("asked about {} linears, it answers for {}", linears.size(), first.size()));
  }
  if (first != second) {
    return failed("asked twice about the same linears, it gives two answers");
  }
  std::string taken;
  for (size_t i = 0; i < linears.size(); ++i) {
    taken += first[i] ? (taken.empty() ? "" : ", ") + linears[i].unit + "." + linears[i].name : "";
  }
  return taken.empty() ? failed("it takes over no linear of a draft with 32 x 80 and 80 x 32 ones") : passed("takes over " + taken);
}

Outcome names_stay(const Candidate& candidate) {
  const sf::testing::Outcome plain = sf::testing::train_single(draft()), found = trained(candidate, draft());
  for (const auto& [name, weight] : plain.weights) {
    const auto same = found.weights.find(name);
    if (same == found.weights.end() || same->second.sizes() != weight.sizes()) {
      return failed(format("parameter \"{}\" is gone or has another shape", name));
    }
  }
  return passed();
}

// One block, and gradients of its weights: what three blocks of steep units make of a rounded number says nothing about the transform. Far wider than float8 rounds:
// a product that is missing, transposed or counted twice is not within it.
Outcome computes_about_the_same(const Candidate& candidate) {
  DraftRun run = draft();
  run.shape.blocks = 1;
  run.shape.has_frozen = false;
  run.windows = 1;
  const sf::testing::Outcome plain = sf::testing::train_single(run), found = trained(candidate, run);
  const auto differs = [](double a, double b) { return !(std::abs(a - b) <= 0.1 * std::abs(b)); };
  if (differs(found.losses[0], plain.losses[0])) {
    return failed(format("the first loss is {}, without it {}", found.losses[0], plain.losses[0]));
  }
  for (const auto& [name, expected] : plain.gradients) {
    const double size = expected.norm().item<double>();
    if (name.starts_with("layers.") && name.ends_with(".weight") && std::isfinite(size) && size > 0) {
      const double apart = (found.gradients.at(name) - expected).norm().item<double>() / size;
      if (!(apart < 0.25)) {
        return failed(format("the gradient of \"{}\" differs by {} of its size", name, apart));
      }
    }
  }
  return passed();
}

Outcome recompute_is_equal(const Candidate& candidate) {
  DraftRun run = draft();
  const sf::testing::Outcome once = trained(candidate, run);
  run.shape.recompute = {"block.*"};
  const double apart = sf::testing::largest_difference(trained(candidate, run).weights, once.weights);
  return apart == 0 ? passed() : failed(format("with recompute the weights differ by {}: its products depend on more than their inputs", apart));
}

Outcome evaluation_is_apart(const Candidate& candidate) {
  DraftRun run = draft();
  const sf::testing::Outcome without = trained(candidate, run);
  run.evaluate_between = true;
  const double apart = sf::testing::largest_difference(trained(candidate, run).weights, without.weights);
  return apart == 0 ? passed() : failed(format("evaluations between windows change the weights by {}", apart));
}

// Cut in unequal parts, with an empty one and rows that only pad: as a gather brings it.
Outcome codec_round_trip(const Candidate& candidate) {
  Started started(candidate);
  const std::vector<UnitSpec> specs = sf::testing::draft_specs(draft().shape);
  Transforms transforms({{.name = "transform", .transform = &started.transform}}, specs);
  transforms.build(at::kCPU, at::kFloat, cpu_ops());
  GatherCodec* codec = transforms.codec();
  if (codec == nullptr) {
    return skipped("it gathers parameters as they are with these options");
  }
  started.transform.begin_window();
  std::vector<std::pair<int64_t, int64_t>> carried;
  std::vector<at::Tensor> weights;
  for (const LinearSpec& one : transforms.linears()) {
    if (codec->carries(one.unit_index, one.parameter)) {
      carried.emplace_back(one.unit_index, one.parameter);
      weights.push_back(at::arange(one.outputs * one.inputs, at::kFloat).sin_().mul_(0.3).view({one.outputs, one.inputs}));
    }
  }
  if (carried.empty()) {
    return failed("it has a codec that carries no parameter");
  }
  const std::vector<std::vector<double>> cuts = {{0, 0.4, 0.4, 1.0}};
  std::vector<at::Tensor> pooled;
  for (size_t rank = 0; rank < 3; ++rank) {
    std::vector<at::Tensor> parts;
    for (const at::Tensor& weight : weights) {
      const auto at_row = [&](size_t i) { return static_cast<int64_t>(cuts[0][i] * static_cast<double>(weight.size(0))); };
      parts.push_back(weight.narrow(0, at_row(rank), at_row(rank + 1) - at_row(rank)).contiguous());
    }
    pooled.push_back(codec->magnitudes(parts));
    if (pooled.back().numel() != static_cast<int64_t>(carried.size())) {
      return failed(format("{} magnitudes for {} parameters", pooled.back().numel(), carried.size()));
    }
  }
  codec->set_magnitudes(at::stack(pooled).amax(0));
  std::vector<at::Tensor> whole(specs.size());
  for (size_t i = 0; i < carried.size(); ++i) {
    const auto [unit, parameter] = carried[i];
    const int64_t rows = weights[i].size(0), bytes = codec->row_bytes(unit, parameter);
    for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, rows / 3}, {rows / 3, rows / 3}, {rows / 3, rows}}) {
      const at::Tensor part = at::cat({weights[i].narrow(0, begin, end - begin), at::zeros({1, weights[i].size(1)})});
      const at::Tensor payload = at::zeros({part.size(0), bytes}, at::kByte);
      codec->encode(unit, parameter, part, payload);
      codec->decode(unit, parameter, begin, payload.narrow(0, 0, end - begin));
    }
    codec->decoded(unit, parameter);
  }
  // Multiplied with the identity a linear shows the weight that it has.
  for (size_t i = 0; i < carried.size(); ++i) {
    const auto [unit, parameter] = carried[i];
    const auto linear = std::find_if(transforms.linears().begin(), transforms.linears().end(),
                                     [&](const LinearSpec& one) { return one.unit_index == unit && one.parameter == parameter; });
    at::NoGradGuard no_grad;
    const at::Tensor shown = started.transform.linears({{.linear = linear - transforms.linears().begin(), .weight_oi = at::full_like(weights[i], NAN), .bias_o = {}}},
                                                       at::eye(weights[i].size(1)))[0];
    const double apart = (shown.t() - weights[i]).abs().max().item<double>() / weights[i].abs().max().item<double>();
    if (!(apart < 0.1)) {
      return failed(format("{}.{}: what comes out of the gather differs by {} of the largest weight", linear->unit, linear->name, apart));
    }
  }
  return passed();
}

}  // namespace

std::vector<Check> transform_checks() {
  return {{"transform/take-over", "it says which linears it takes over, and the same when asked again", takes_over_once},
          {"transform/names", "names and shapes of parameters do not change", names_stay},
          {"transform/values", "losses and gradients are about those without it", computes_about_the_same},
          {"transform/recompute", "blocks that run forward again in backward give the same bits", recompute_is_equal},
          {"transform/evaluate", "evaluations between windows change nothing", evaluation_is_apart},
          {"transform/codec", "what a codec encodes in uneven parts comes back", codec_round_trip}};
}

}  // namespace sf::check
