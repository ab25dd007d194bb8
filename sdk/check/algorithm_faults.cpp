// Algorithms fed with what they can't use: each call answers with an error, nothing crashes, and what comes after is as if nothing had been.
#include <ATen/ATen.h>

#include <exception>
#include <optional>

#include "core/base/error.hpp"
#include "core/base/text.hpp"
#include "sdk/check/tensor_checks.hpp"

namespace sf::check {
namespace {

using sf::testing::LonePlugin;
using sf::testing::TinyOutcome;
using sf::testing::TinyRun;

/// The text of what `body` throws; nothing when it does not.
template <class Body>
std::optional<std::string> thrown_by(Body&& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return std::nullopt;
}

/// The plugin's unit, with its first wide input one column too wide when it is told so.
struct WideInput final : Unit {
  Unit* plugin = nullptr;
  bool is_on = false, was_changed = false;
  std::vector<at::Tensor> forward(UnitContext& context, const std::vector<at::Tensor>& inputs) override {
    std::vector<at::Tensor> given = inputs;
    for (at::Tensor& input : given) {
      if (is_on && input.defined() && input.is_floating_point() && input.dim() >= 2) {
        input = at::constant_pad_nd(input.detach(), {0, 1});
        was_changed = true;
        break;
      }
    }
    return plugin->forward(context, given);
  }
};

/// Stands between the run and the plugin, and spoils what the plugin gets.
class Between final : public Algorithm {
 public:
  explicit Between(Algorithm& plugin) : plugin_(plugin) {}

  std::vector<std::unique_ptr<WideInput>> units;   // by index
  std::string without;                             // a field that batches lack
  std::optional<Sample> sample;                    // the first one, as it comes to prepare
  SampleContext context;
  std::vector<std::string> fields;                 // of the last batch

  Description describe(const ModelFacts& facts) override {
    Description description = plugin_.describe(facts);
    units.clear();
    for (std::size_t i = 0; i < description.units.size(); ++i) {
      units.push_back(std::make_unique<WideInput>());
    }
    return description;
  }
  Unit& unit(std::int64_t index) override {
    WideInput& wrapped = *units.at(static_cast<std::size_t>(index));
    wrapped.plugin = &plugin_.unit(index);
    return wrapped;
  }
  void bind(const TargetTables& tables, Ops& ops) override { plugin_.bind(tables, ops); }
  Remark set_token_counts(const std::vector<TokenCount>& counts) override { return plugin_.set_token_counts(counts); }
  void set_buffers(const std::map<std::string, at::Tensor>& buffers, const std::string& source) override { plugin_.set_buffers(buffers, source); }
  std::map<std::string, at::Tensor> buffers() const override { return plugin_.buffers(); }
  void derive_metrics(std::map<std::string, double>& metrics) const override { plugin_.derive_metrics(metrics); }
  std::string prepare(Sample& given, const SampleContext& with) override {
    if (!sample) {
      sample = given;
      context = with;
    }
    return plugin_.prepare(given, with);
  }
  void finish(Batch& batch) override { plugin_.finish(batch); }
  double weigh(const Batch& batch) const override { return plugin_.weigh(batch); }
  void micro_step(Runner& runner, const Batch& batch) override {
    fields.clear();
    for (const auto& [name, tensor] : batch.tensors) {
      fields.push_back(name);
    }
    Batch given = batch;
    given.tensors.erase(without);
    plugin_.micro_step(runner, given);
  }
  ExportSpec export_spec() const override { return plugin_.export_spec(); }

 private:
  Algorithm& plugin_;
};

struct Spoiled {
  LonePlugin plugin;
  Between between;
  TinyRun run;

  explicit Spoiled(const Candidate& candidate)
      : plugin(candidate.file, candidate.entry, candidate.values(), candidate.services), between(Tiny::started(plugin)),
        run(between, sf::testing::facts_from(candidate.values(), candidate.target)) {}
};

std::string difference(const TinyOutcome& expected, const TinyOutcome& found) {
  if (found.loss != expected.loss) {
    return format("the loss was {} and is {} now", expected.loss, found.loss);
  }
  for (const auto& [name, gradient] : expected.gradients) {
    const auto again = found.gradients.find(name);
    if (again == found.gradients.end() || !at::equal(gradient, again->second)) {
      return "the gradient of " + name + " is another now";
    }
  }
  return "";
}

Outcome bad_configurations(const Candidate& candidate) {
  LonePlugin plugin(candidate.file, candidate.entry, candidate.values(), candidate.services);
  Algorithm& algorithm = Tiny::started(plugin);
  const ModelFacts good = sf::testing::facts_from(candidate.values(), candidate.target);
  const Description expected = algorithm.describe(good);
  int refused = 0;
  for (const char* target : {"", "{", "[]", "{}", R"({"hidden_size": "wide", "vocab_size": "all", "num_hidden_layers": "many"})"}) {
    ModelFacts facts = good;
    facts.target_config_json = target;
    const auto told = thrown_by([&] { (void)algorithm.describe(facts); });
    if (!told) {
      return failed(format("describe takes {} as a target's config.json", *target == 0 ? "an empty text" : target));
    }
    if (told->empty()) {
      return failed("describe throws without a text");
    }
    ++refused;
  }
  for (const char* draft : {"{", "[]", R"({"hidden_size": -1})"}) {   // one that reads no draft configuration may take them
    ModelFacts facts = good;
    facts.draft_config_json = draft;
    facts.draft_config_path = "draft.json";
    refused += thrown_by([&] { (void)algorithm.describe(facts); }) ? 1 : 0;
  }
  const Description again = algorithm.describe(good);
  return again.draft_config_json == expected.draft_config_json && again.units.size() == expected.units.size()
             ? passed(format("{} refused", refused))
             : failed("after a configuration that it refused it describes another draft");
}

Outcome bad_units(const Candidate& candidate) {
  Spoiled spoiled(candidate);
  const TinyOutcome expected = spoiled.run.gradients();
  int refused = 0;
  std::string last;
  for (std::size_t i = 0; i < spoiled.between.units.size(); ++i) {
    WideInput& unit = *spoiled.between.units[i];
    unit.is_on = true;
    unit.was_changed = false;
    const auto told = thrown_by([&] { (void)spoiled.run.gradients(); });
    unit.is_on = false;
    const std::string& name = spoiled.run.description().units[i].name;
    if (!unit.was_changed) {
      continue;   // it has no such input
    }
    if (!told) {
      return failed(format("unit {} takes an input that is one column too wide without a word", name));
    }
    if (told->find(name) == std::string::npos) {
      return failed(format("what unit {} throws does not name it: {}", name, *told));
    }
    ++refused;
    last = *told;
    if (const std::string other = difference(expected, spoiled.run.gradients()); !other.empty()) {
      return failed(format("after unit {} has thrown, {}", name, other));
    }
  }
  return passed(refused == 0 ? "no unit has an input with columns" : format("{} units; the last said: {}", refused, last.substr(0, last.find('\n'))));
}

Outcome bad_batches(const Candidate& candidate) {
  TinyOutcome expected;
  std::vector<std::string> fields;
  {
    Spoiled spoiled(candidate);
    expected = spoiled.run.gradients();
    fields = spoiled.between.fields;
  }
  int refused = 0;
  for (const std::string& field : fields) {
    Spoiled spoiled(candidate);
    spoiled.between.without = field;
    const auto told = thrown_by([&] { (void)spoiled.run.gradients(); });
    if (told && told->empty()) {
      return failed(format("micro_step throws without a text when {} is missing", field));
    }
    refused += told ? 1 : 0;
  }
  Spoiled spoiled(candidate);
  const std::string other = difference(expected, spoiled.run.gradients());
  return other.empty() ? passed(format("{} of {} fields are missed", refused, fields.size())) : failed("after batches without a field " + other);
}

Outcome bad_samples(const Candidate& candidate) {
  Spoiled spoiled(candidate);
  const TinyOutcome expected = spoiled.run.gradients();
  if (!spoiled.between.sample) {
    return failed("prepare was never called");
  }
  const Sample good = *spoiled.between.sample;
  int refused = 0;
  const auto give = [&](Sample sample) {
    std::string why;
    const auto told = thrown_by([&] { why = spoiled.between.prepare(sample, spoiled.between.context); });
    refused += told || !why.empty() ? 1 : 0;
  };
  for (const auto& [name, tensor] : good.tensors) {
    Sample sample = good;
    sample.tensors.erase(name);
    give(sample);
    sample = good;
    sample.tensors[name] = at::constant_pad_nd(tensor.dim() > 1 ? tensor : tensor.unsqueeze(1), {0, 1});   // of another shape
    give(sample);
  }
  for (const std::int64_t tokens : {std::int64_t{0}, std::int64_t{1}}) {
    Sample sample = good;
    sample.tokens = tokens;
    for (auto& [name, tensor] : sample.tensors) {
      tensor = tensor.narrow(0, 0, tokens).contiguous();
    }
    give(sample);
  }
  Sample sample = good;
  sample.tensors["loss_mask"] = at::zeros_like(good.tensors.at("loss_mask"));   // nothing is supervised
  give(sample);
  const std::string other = difference(expected, spoiled.run.gradients());
  return other.empty() ? passed(format("{} refused", refused)) : failed("after samples that can't be used " + other);
}

Outcome bad_buffers(const Candidate& candidate) {
  Spoiled spoiled(candidate);
  const std::map<std::string, at::Tensor> good = spoiled.between.buffers();
  if (good.empty()) {
    return skipped("the draft has no buffers");
  }
  const double expected = spoiled.run.evaluate().loss;
  for (const auto& [name, tensor] : good) {
    std::map<std::string, at::Tensor> missing = good, longer = good;
    missing.erase(name);
    longer[name] = at::constant_pad_nd(tensor, {0, 1});
    if (!thrown_by([&] { spoiled.between.set_buffers(missing, "the check"); })) {
      return failed(format("set_buffers takes buffers without {}", name));
    }
    if (!thrown_by([&] { spoiled.between.set_buffers(longer, "the check"); })) {
      return failed(format("set_buffers takes {} in another shape", name));
    }
  }
  const double found = spoiled.run.evaluate().loss;
  return found == expected ? passed(format("{} buffers", good.size())) : failed(format("after buffers that it refused the loss is {}, not {}", found, expected));
}

}  // namespace

std::vector<Check> algorithm_faults() {
  return {{"algorithm/bad-config", "configurations that are damaged are refused with a text, and describe works again afterwards", bad_configurations},
          {"algorithm/bad-unit", "an input of a wrong width ends the unit with an error that names it, and the next window has the same bits", bad_units},
          {"algorithm/bad-batch", "a batch without one of its fields is an error and no crash", bad_batches},
          {"algorithm/bad-sample", "samples that lack a tensor, have another shape or no supervised token are refused without a crash", bad_samples},
          {"algorithm/bad-buffers", "buffers of another draft are refused, and those it had stay", bad_buffers}};
}

}  // namespace sf::check
