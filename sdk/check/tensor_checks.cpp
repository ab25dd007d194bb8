// Checks of algorithms over the tiny model, and the list of all checks that see tensors.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "core/base/error.hpp"
#include "core/base/log.hpp"
#include "core/base/text.hpp"
#include "core/data/safetensors.hpp"
#include "core/export/hf_export.hpp"
#include "core/model/tensor_view.hpp"
#include "sdk/check/tensor_checks.hpp"

namespace sf::check {
namespace {

using sf::testing::LonePlugin;
using sf::testing::TinyOutcome;
using sf::testing::TinySetup;

std::string shape_text(const Description& description) {
  std::string out;
  for (const UnitSpec& unit : description.units) {
    out += unit.name + " " + unit.prefix + " " + unit.shard_group + "\n";
    for (const ParameterSpec& parameter : unit.parameters) {
      out += format("  {} {} {} {}\n", parameter.name, parameter.shape, parameter.trainable, parameter.idle);
    }
  }
  return out;
}

Outcome describes(const Candidate& candidate) {
  LonePlugin plugin(candidate.file, candidate.entry, candidate.values(), candidate.services);
  plugin.require(plugin.create(), "create");   // not started: `plan` asks it so
  auto& algorithm = *static_cast<Algorithm*>(const_cast<void*>(plugin.get_interface(kAlgorithmInterface)));
  const ModelFacts facts = sf::testing::facts_from(candidate.values(), candidate.target);
  const Description first = algorithm.describe(facts), second = algorithm.describe(facts);
  if (shape_text(first) != shape_text(second) || first.draft_config_json != second.draft_config_json) {
    return failed("describe gives something else when it is called again");
  }
  std::set<std::string> names, units;
  for (const UnitSpec& unit : first.units) {
    if (unit.name.empty() || unit.shard_group.empty() || !units.insert(unit.name).second) {
      return failed(format("unit \"{}\" has no name of its own, or no shard group", unit.name));
    }
    for (const ParameterSpec& parameter : unit.parameters) {
      if (!names.insert(unit.prefix + parameter.name).second) {
        return failed(format("two parameters are called \"{}{}\"", unit.prefix, parameter.name));
      }
      if (std::any_of(parameter.shape.begin(), parameter.shape.end(), [](std::int64_t size) { return size < 1; })) {
        return failed(format("\"{}{}\" has shape {}", unit.prefix, parameter.name, parameter.shape));
      }
    }
  }
  const auto reads = [&](const char* name) { return std::any_of(first.reads.begin(), first.reads.end(), [&](const FeatureRead& read) { return read.name == name; }); };
  if (!reads("input_ids") || !reads("loss_mask")) {
    return failed("it does not read input_ids and loss_mask: no batch would have tokens");
  }
  if (first.draft_config_json.empty() || !Json::parse(first.draft_config_json).is_object()) {
    return failed("draft_config_json is no JSON object; checkpoints and exports carry it");
  }
  return passed(format("{} units, {} parameters", first.units.size(), names.size()));
}

Outcome learns(const Candidate& candidate) {
  Tiny tiny(candidate);
  const double before = tiny->gradients().loss;
  for (int step = 0; step < 25; ++step) {
    tiny->train();
  }
  const TinyOutcome after = tiny->gradients();
  if (!(after.loss < before)) {
    return failed(format("25 updates at a rate of 1e-2 on 8 samples take the loss from {} to {}", before, after.loss));
  }
  const TinyOutcome evaluated = tiny->evaluate();
  const auto found = evaluated.metrics.find("acceptance_length");
  if (found == evaluated.metrics.end() || !(found->second >= 1)) {
    return failed("evaluating reports no acceptance_length of at least 1; `best` and `eval` compare it");
  }
  return passed(format("loss {} to {}", format_fixed(before, 3), format_fixed(after.loss, 3)));
}

Outcome same_bits(const Candidate& candidate) {
  Tiny tiny(candidate);
  for (int step = 0; step < 3; ++step) {
    tiny->train();
  }
  const TinyOutcome first = tiny->gradients(), second = tiny->gradients();
  if (first.loss != second.loss) {
    return failed(format("the same window gives loss {} and then {}", first.loss, second.loss));
  }
  for (const auto& [name, gradient] : first.gradients) {
    const auto again = second.gradients.find(name);
    if (again == second.gradients.end() || !at::equal(gradient, again->second)) {
      return failed(format("the gradient of {} differs between two runs over the same window", name));
    }
  }
  return passed(format("{} gradients", first.gradients.size()));
}

constexpr double kRecomputeTolerance = 1e-5;   // float32 sums in another order

Outcome recomputes(const Candidate& candidate) {
  Tiny plain(candidate);
  const TinyOutcome expected = plain->gradients();
  TinySetup setup;
  setup.recompute = {"*"};
  Tiny again(candidate, setup);
  const TinyOutcome found = again->gradients();
  for (const auto& [name, gradient] : expected.gradients) {
    const auto other = found.gradients.find(name);
    if (other == found.gradients.end()) {
      return failed(format("training.recompute = [\"*\"] takes the gradient of {} away", name));
    }
    // What is added up over several uses is so in another order then.
    const double difference = at::sub(other->second, gradient).abs().max().item<double>(), largest = gradient.abs().max().item<double>();
    if (!(difference <= kRecomputeTolerance * largest)) {
      return failed(format("training.recompute = [\"*\"] changes the gradient of {} by {}, its largest element is {}", name, difference, largest));
    }
  }
  return std::abs(found.loss - expected.loss) <= kRecomputeTolerance * std::abs(expected.loss) ? passed() : failed("training.recompute = [\"*\"] changes the loss");
}

Outcome dead_batch(const Candidate& candidate) {
  Tiny tiny(candidate);
  tiny->train();
  const TinyOutcome dead = tiny->dead();
  if (dead.denominator != 0) {
    return failed(format("weigh gives {} for a batch without samples", dead.denominator));
  }
  if (dead.loss != 0) {
    return failed(format("the loss of a batch without samples is {}", dead.loss));
  }
  for (const auto& [name, gradient] : dead.gradients) {
    if (!at::equal(gradient, at::zeros_like(gradient))) {
      return failed(format("a batch without samples gives {} a gradient of norm {}", name, gradient.norm().item<double>()));
    }
  }
  for (const auto& [name, value] : dead.metrics) {
    if (!std::isfinite(value)) {
      return failed(format("a batch without samples makes {} {}", name, value));
    }
  }
  return passed();
}

// Each tensor is moved along its own gradient: the loss has to change as fast as the gradient's norm says (differences over five points, so that curvature
// counts in fourth order only). In float32 a step must be large against the loss's rounding all the same, so several are tried: a right gradient agrees with one of
// them, a wrong one stands against two neighbouring steps that agree with each other. Where no two agree the loss is too rough to say; most tensors have to be sure.
constexpr double kGradientTolerance = 0.02;
constexpr double kSmallGradient = 1e-2, kSmallGradientTolerance = 0.06;   // of the largest gradient; nearer to the loss's rounding
constexpr double kLostGradient = 1e-3;                                    // is not looked at

Outcome gradients_are_right(const Candidate& candidate) {
  Tiny tiny(candidate, {.samples = 2, .tokens = 16, .batch_size = 2});   // small: the loss is asked for hundreds of times
  for (int step = 0; step < 5; ++step) {
    tiny->train();   // away from a start where much is zero
  }
  const TinyOutcome outcome = tiny->gradients();
  double largest = 0;
  for (const auto& [name, gradient] : outcome.gradients) {
    largest = std::max(largest, gradient.norm().item<double>());
  }
  std::vector<std::string> wrong, unsure;
  size_t sure = 0;
  double worst = 0;
  auto weights = tiny->weights();
  for (const auto& [name, gradient] : outcome.gradients) {
    const double norm = gradient.norm().item<double>();
    if (!(norm > kLostGradient * largest)) {
      continue;
    }
    const double tolerance = norm > kSmallGradient * largest ? kGradientTolerance : kSmallGradientTolerance;
    at::Tensor weight = weights.at(name);
    const at::Tensor kept = weight.clone(), direction = at::div(gradient, norm);
    const auto loss_at = [&](double step) {
      at::NoGradGuard no_grad;
      weight.copy_(at::add(kept, direction, step));
      const double loss = tiny->gradients().loss;
      weight.copy_(kept);
      return loss;
    };
    double best = INFINITY, before = INFINITY, agreed = INFINITY;
    for (const double change : {3e-3, 1e-3, 3e-4, 1e-4}) {
      const double step = change * std::abs(outcome.loss) / norm;
      const double slope = (8 * (loss_at(step) - loss_at(-step)) - (loss_at(2 * step) - loss_at(-2 * step))) / (12 * step);
      best = std::min(best, std::abs(slope - norm) / norm);
      if (best < tolerance) {
        break;
      }
      if (std::abs(slope - before) < tolerance * std::abs(slope)) {
        agreed = slope;
      }
      before = slope;
    }
    if (best < tolerance) {
      ++sure;
      worst = std::max(worst, best);
    } else if (std::isfinite(agreed)) {
      wrong.push_back(format("{}: the loss rises by {} where the gradient's norm is {}", name, agreed, norm));
    } else {
      unsure.push_back(name);
    }
  }
  if (!wrong.empty()) {
    return failed(join(wrong, "; "));
  }
  if (sure <= unsure.size()) {
    return failed(format("the loss is too rough for differences along {} of {} tensors", unsure.size(), sure + unsure.size()));
  }
  return passed(format("{} tensors, at most {} % off{}", sure, format_fixed(100 * worst, 2),
                       unsure.empty() ? "" : "; the loss is too rough along " + join(unsure, ", ")));
}

Outcome exports(const Candidate& candidate) {
  const sf::testing::TemporaryFolder folder;
  Tiny tiny(candidate);
  for (int step = 0; step < 3; ++step) {
    tiny->train();
  }
  const ExportSpec spec = tiny.algorithm.export_spec();
  auto weights = tiny->weights();
  auto buffers = tiny.algorithm.buffers();
  HfExport request;
  request.folder = folder.path() / "draft";
  request.config = Json::parse(spec.config_json, "config.json");
  request.config.set("dtype", "float32");
  request.contract.config_keys = spec.required_config_keys;
  request.dtype = "F32";
  std::vector<at::Tensor> kept;
  const auto add = [&](const std::string& name, const std::vector<std::int64_t>& shape, const at::Tensor& tensor, bool is_buffer) {
    const std::string type = dtype_name(dtype_of(tensor.scalar_type()));
    request.contract.tensors.push_back({.name = name, .shape = shape, .dtype = is_buffer ? type : ""});
    kept.push_back(tensor.contiguous());
    request.tensors.push_back({.name = name, .dtype = type, .shape = kept.back().sizes().vec(), .data = kept.back().const_data_ptr(), .bytes = kept.back().nbytes()});
  };
  for (const ParameterSpec& wanted : spec.tensors) {
    const auto found = weights.find(wanted.name);
    if (found == weights.end()) {
      return failed(format("export_spec names {}, which is no parameter of describe", wanted.name));
    }
    add(wanted.name, wanted.shape, found->second.reshape(wanted.shape), false);
  }
  for (const BufferSpec& wanted : spec.buffers) {
    if (buffers.count(wanted.name) == 0) {
      return failed(format("export_spec names buffer {}, which buffers() lacks", wanted.name));
    }
    add(wanted.name, wanted.shape, buffers.at(wanted.name), true);
  }
  if (request.tensors.empty()) {
    return failed("export_spec names no tensor");
  }
  write_hf_export(request);   // checks the contract

  const SafetensorsFile file = SafetensorsFile::open(request.folder / "model.safetensors");
  Tiny same(candidate);   // the same samples, and weights as a run begins with
  auto fresh = same->weights();
  std::map<std::string, at::Tensor> read_buffers;
  for (const TensorView& view : file.tensors()) {
    const at::Tensor tensor = as_tensor(view);
    const auto found = fresh.find(view.name);
    if (found == fresh.end()) {
      read_buffers[view.name] = tensor;
      continue;
    }
    at::NoGradGuard no_grad;
    found->second.copy_(tensor.view(found->second.sizes()));
  }
  if (!read_buffers.empty()) {
    same.algorithm.set_buffers(read_buffers, "the export");
  }
  const double expected = tiny->evaluate().loss, found = same->evaluate().loss;
  return expected == found ? passed(format("{} tensors", request.tensors.size()))
                           : failed(format("evaluated anew from the exported files the loss is {}, not {}", found, expected));
}

}  // namespace

std::vector<Check> algorithm_checks() {
  return {{"algorithm/describe", "describe gives whole shapes, the same each time", describes},
          {"algorithm/learns", "a few updates lower the loss, and evaluating reports acceptance_length", learns},
          {"algorithm/same-bits", "the same window gives the same bits twice", same_bits},
          {"algorithm/recompute", "forward again in backward changes nothing", recomputes},
          {"algorithm/dead-batch", "a batch without samples gives loss 0 and zero gradients, without NaN", dead_batch},
          {"algorithm/gradient", "the loss changes as the gradients say", gradients_are_right},
          {"algorithm/export", "exported files load again and give the same loss", exports}};
}

namespace {

class TensorCheckList final : public TensorChecks {
 public:
  std::vector<Check> checks(std::uint32_t kind) const override {
    switch (kind) {
      case SF_KIND_ALGORITHM: {
        std::vector<Check> all = algorithm_checks();
        for (Check& check : algorithm_faults()) {
          all.push_back(std::move(check));
        }
        return all;
      }
      case SF_KIND_SHARDING: return sharding_checks();
      case SF_KIND_TRANSFORM: return transform_checks();
      default: return {};
    }
  }
  HostServices services() const override { return sf::testing::tensor_services(); }
};

}  // namespace
}  // namespace sf::check

__attribute__((visibility("default"))) const sf::check::TensorChecks* sf_tensor_checks_v1() {
  sf::redirect_log([](sf::Level, std::string_view) {});   // of this library's own host tables
  at::set_num_threads(1);   // trials are processes that are forked from here: no thread of LibTorch's may exist
  static const sf::check::TensorCheckList checks;
  return &checks;
}
