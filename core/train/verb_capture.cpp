// The verb `capture`: the target's hidden states for the recipe's conversations, as far as the recipe's algorithm reads them.
#include <algorithm>
#include <filesystem>
#include <iterator>
#include <vector>

#include "core/base/error.hpp"
#include "core/base/log.hpp"
#include "core/model/capture.hpp"
#include "core/plan/plan.hpp"
#include "core/train/session.hpp"
#include "core/train/verbs.hpp"

namespace sf {
namespace {

struct Split {
  const char* name;
  const char* tokens_key;
  const char* features_key;
};

constexpr Split kSplits[] = {{"train", "data.train_data_path", "data.hidden_states_path"},
                             {"eval", "data.eval_data_path", "data.eval_hidden_states_path"}};

// Names of a capture that several algorithms read; each of them asks by layers.
constexpr const char* kSharedLayers = "hidden_states";
constexpr const char* kSharedLastState = "target_last_hidden_states";

// All layers that anybody reads, ascending, in one tensor, and the last state once.
std::vector<CapturedFeature> shared_features(const std::vector<CaptureRead>& reads) {
  std::vector<int64_t> layers;
  bool last_state = false;
  for (const CaptureRead& read : reads) {
    log_info("capture for {}: {}", read.algorithm, read.last_state ? std::string("the last state") : format("layers {}", read.layer_ids));
    layers.insert(layers.end(), read.layer_ids.begin(), read.layer_ids.end());
    last_state = last_state || read.last_state;
  }
  std::sort(layers.begin(), layers.end());
  layers.erase(std::unique(layers.begin(), layers.end()), layers.end());
  std::vector<CapturedFeature> features;
  if (!layers.empty()) {
    features.push_back({.key = kSharedLayers, .layer_ids = layers});
  }
  if (last_state) {
    features.push_back({.key = kSharedLastState, .last_state = true});
  }
  return features;
}

}  // namespace

std::vector<CaptureRead> capture_reads(const EngineContext& context) {
  std::string name;
  for (const LoadedPlugin& plugin : context.plugins) {
    name = plugin.kind == SF_KIND_ALGORITHM ? plugin.name : name;
  }
  std::vector<CaptureRead> reads;
  const Description description = NamedAlgorithm(algorithm_of(context), name).describe(model_facts(*context.plan));
  for (const FeatureRead& read : description.reads) {
    if (read.columns > 0 && !read.optional) {
      reads.push_back({.algorithm = name, .layer_ids = read.layer_ids, .last_state = read.last_state});
    }
  }
  return reads;
}

Json capture(const EngineContext& context, const CaptureArguments& arguments) {
  const Plan& plan = *context.plan;
  const Description description = NamedAlgorithm(algorithm_of(context), plan.get<std::string>("algorithm.name")).describe(model_facts(plan));
  std::vector<CapturedFeature> features = shared_features(arguments.reads);
  for (const FeatureRead& read : description.reads) {
    if (arguments.reads.empty() && read.columns > 0 && !read.optional) {
      features.push_back({.key = read.name, .layer_ids = read.layer_ids, .last_state = read.last_state});
    }
  }

  // What one of them lacks is told before the other takes hours.
  std::vector<Split> splits;
  for (const Split& split : kSplits) {
    const auto tokens = plan.get<std::filesystem::path>(split.tokens_key);
    if ((arguments.split != "all" && arguments.split != split.name) || (tokens.empty() && arguments.split == "all")) {
      continue;
    }
    if (tokens.empty() || plan.get<std::filesystem::path>(split.features_key).empty()) {
      throw Error(ExitCode::kUsage, std::string("capturing the split '") + split.name + "' needs " + split.tokens_key + " and " + split.features_key,
                  format("set both in the recipe, token JSONL to read and a folder to make{}", arguments.split == "all" ? "; or name the other split with --split" : ""));
    }
    if (!std::filesystem::exists(tokens)) {
      throw Error(ExitCode::kData, format("{} ({}): there is no such file", tokens, split.tokens_key), "name a file of token records; sf-host prepare makes one of conversations");
    }
    splits.push_back(split);
  }
  if (splits.empty()) {
    throw Error(ExitCode::kUsage, "the recipe names no conversations to capture",
                "set data.train_data_path and data.hidden_states_path (and the eval pair for held-out features)");
  }

  Json json = Json::object();
  for (const Split& split : splits) {
    const auto tokens = plan.get<std::filesystem::path>(split.tokens_key);
    const auto output = plan.get<std::filesystem::path>(split.features_key);
    log_info("capture ({}): {} -> {}", split.name, tokens, output);
    const CaptureResult result = capture_features({.target_folder = plan.get<std::filesystem::path>("model.target_model_path"),
                                                   .tokens_path = tokens,
                                                   .output = output,
                                                   .features = features,
                                                   .batch_size = plan.get<int64_t>("data.capture_batch_size"),
                                                   .max_length = plan.get<int64_t>("data.max_length"),
                                                   .shard_bytes = plan.get<int64_t>("data.shard_bytes"),
                                                   .device = open_device(plan.get<std::string>("device")),
                                                   .embedding_key = plan.get<std::string>("model.embedding_key"),
                                                   .lm_head_key = plan.get<std::string>("model.lm_head_key"),
                                                   .log = context.log,
                                                   .stop_requested = context.stop_requested});
    Json part = Json::object();
    part.set("features", output.string()).set("records", result.manifest.records()).set("tokens", result.manifest.tokens());
    part.set("fingerprint", result.manifest.fingerprint());
    part.set("was_finished", result.was_finished).set("interrupted", result.interrupted);
    part.set("samples_unsupervised", result.manifest.samples_unsupervised);
    part.set("tokens_captured", result.tokens_captured).set("seconds", result.seconds);
    json.set(split.name, std::move(part));
    if (result.interrupted) {
      json.set("interrupted", true);
      break;
    }
  }
  return json;
}

}  // namespace sf
