#include "plugins/algorithm/dspark/dspark_config.hpp"

#include <optional>
#include <utility>

#include "sf/json.hpp"

namespace sf {
namespace {

constexpr int64_t kBlockSizeDefault = 7;

constexpr const char* kInnerKeys[] = {"block_size",     "target_layer_ids", "mask_token_id",          "projector_type",
                                      "attention_mode", "markov_rank",      "markov_head_type",       "enable_confidence_head",
                                      "confidence_head_with_markov",        "confidence_head_alpha"};

// Keys that stand both at the top and inside dflash_config.
constexpr const char* kHeadKeys[] = {"markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"};

// A configuration in the target's shape with the heads that the options ask for.
Json made_config(const Json& target, int64_t layers, const DsparkOptions& options) {
  Json config = draft::config_like_target(target, kDsparkArchitecture, layers);
  config.set("block_size", kBlockSizeDefault);
  Json inner = Json::object();
  inner.set("markov_rank", options.markov_rank);
  inner.set("markov_head_type", name_of(options.markov_head));
  inner.set("enable_confidence_head", options.confidence_head);
  inner.set("confidence_head_with_markov", options.confidence_head && options.confidence_with_markov);
  config.set(draft::kBlockConfig, std::move(inner));
  return config;
}

// The head's keys may stand in either place; where they stand in both they have to agree.
void check_both_places(const draft::BlockTexts& texts) {
  const Json* inner = texts.inner();
  for (const char* key : kHeadKeys) {
    const Json* top = texts.draft.find(key);
    const Json* nested = inner == nullptr || !inner->is_object() ? nullptr : inner->find(key);
    if (top != nullptr && nested != nullptr && !(*top == *nested)) {
      draft::refuse_config(std::string("the draft's configuration has ") + key + " = " + top->dump() + ", but dflash_config." + key + " = " + nested->dump() +
                               "; training would read one and a serving engine the other",
                           "correct one of them in model.draft_model_config");
    }
  }
}

template <class T>
std::optional<T> either(const draft::BlockTexts& texts, const char* key, std::optional<T> (*read)(const Json*, const char*, const char*)) {
  std::optional<T> value = read(texts.inner(), key, "dflash_config.");
  return value ? value : read(&texts.draft, key, "");
}

MarkovHead markov_head(const std::string& name) {
  for (const MarkovHead head : {MarkovHead::kVanilla, MarkovHead::kGated, MarkovHead::kRnn}) {
    if (name == name_of(head)) {
      return head;
    }
  }
  draft::refuse_config("markov_head_type is \"" + name + "\"; vanilla, gated and rnn are known", "correct model.draft_model_config");
}

// "gqa": fewer key/value heads than query heads; "mha": as many.
void check_attention_mode(const DsparkConfig& config, const std::string& mode) {
  const int64_t heads = config.layers.heads, kv_heads = config.layers.kv_heads;
  if (mode != "gqa" && mode != "mha") {
    draft::refuse_config("dflash_config.attention_mode is \"" + mode + "\"; gqa and mha can be trained",
                         "use a configuration with attention_mode gqa or mha");
  }
  if ((mode == "mha") != (heads == kv_heads)) {
    draft::refuse_config("dflash_config.attention_mode is \"" + mode + "\", but there are " + std::to_string(heads) + " query heads and " +
                             std::to_string(kv_heads) + " key/value heads; " + (mode == "gqa" ? "gqa has fewer key/value heads" : "mha has as many of both"),
                         "set attention_mode to \"" + std::string(heads == kv_heads ? "mha" : "gqa") + "\", or correct num_key_value_heads");
  }
}

void check_heads(const DsparkConfig& config, const ModelFacts& facts) {
  const auto place = [&](const char* key) {
    return facts.draft_config_json.empty() ? std::string("plugin.dspark.") + key : std::string("dflash_config.") + key + " in model.draft_model_config";
  };
  if (config.markov_rank < 0) {
    draft::refuse_config("markov_rank is " + std::to_string(config.markov_rank) + ", 0 (no Markov head) or more expected", "correct " + place("markov_rank"));
  }
  if (config.markov_rank > 65536) {  // as the option of the same name
    draft::refuse_config("markov_rank is " + std::to_string(config.markov_rank) + ", at most 65536 expected", "correct " + place("markov_rank"));
  }
  if (config.confidence_with_markov && config.markov_rank == 0) {
    draft::refuse_config("confidence_head_with_markov is true, but markov_rank is 0, so there is no Markov embedding to look at",
                         "set " + place("confidence_head_with_markov") + " to false, or markov_rank above 0");
  }
  if (config.confidence_with_markov && !config.confidence_head) {
    draft::refuse_config("confidence_head_with_markov is true, but there is no confidence head", "set enable_confidence_head to true, or leave it out");
  }
}

// The keys that DSpark alone has; the attention mode, which is written back.
std::string read_dspark_keys(const draft::BlockTexts& texts, const ModelFacts& facts, DsparkConfig& config, draft::ConfigProblems& problems) {
  const Json* inner = texts.inner();
  problems.attempt("markov_rank", [&] { check_both_places(texts); });
  problems.attempt("projector_type", [&] {
    const std::string projector = draft::string_at(inner, "projector_type", "dflash_config.").value_or("dspark");
    if (projector != "dspark") {
      draft::refuse_config("dflash_config.projector_type is \"" + projector + "\", \"dspark\" expected", "correct it, or leave it out");
    }
  });
  std::string mode = config.layers.heads == config.layers.kv_heads ? "mha" : "gqa";
  problems.attempt("attention_mode", [&] {
    mode = draft::string_at(inner, "attention_mode", "dflash_config.").value_or(mode);
    if (!problems.is_bad("num_attention_heads") && !problems.is_bad("num_key_value_heads")) {
      check_attention_mode(config, mode);
    }
  });
  problems.attempt("markov_head_type",
                   [&] { config.markov_head = markov_head(either<std::string>(texts, "markov_head_type", draft::string_at).value_or("vanilla")); });
  problems.attempt("heads", [&] {
    config.markov_rank = either<int64_t>(texts, "markov_rank", draft::integer_at).value_or(0);
    const double configured_alpha = draft::number_at(inner, "confidence_head_alpha", "dflash_config.", 0);
    config.confidence_head = either<bool>(texts, "enable_confidence_head", draft::boolean_at).value_or(configured_alpha > 0);
    config.confidence_with_markov = either<bool>(texts, "confidence_head_with_markov", draft::boolean_at).value_or(false);
    check_heads(config, facts);
  });
  return mode;
}

}  // namespace

const char* name_of(MarkovHead head) {
  switch (head) {
    case MarkovHead::kVanilla: return "vanilla";
    case MarkovHead::kGated: return "gated";
    case MarkovHead::kRnn: return "rnn";
  }
  return "";
}

DsparkConfig resolve_dspark_config(const ModelFacts& facts, const DsparkOptions& options) {
  draft::BlockTexts texts = draft::read_block_texts(facts, [&](const Json& target, int64_t layers) { return made_config(target, layers, options); });
  draft::ConfigProblems problems(facts.draft_config_path);
  DsparkConfig config;
  static_cast<draft::BlockConfig&>(config) =
      draft::resolve_block_config(facts, texts, {.architectures = {kDsparkArchitecture}, .inner_keys = kInnerKeys}, problems);
  std::string mode;
  if (!problems.is_bad(draft::kBlockConfig)) {
    mode = read_dspark_keys(texts, facts, config, problems);
  }
  problems.finish();
  draft::write_block_config(texts.draft, config, facts, texts.target);
  Json& written = *texts.draft.find(draft::kBlockConfig);
  written.set("projector_type", "dspark");
  written.set("attention_mode", mode);
  for (Json* place : {&texts.draft, &written}) {
    place->set("markov_rank", config.markov_rank);
    place->set("markov_head_type", name_of(config.markov_head));
    place->set("enable_confidence_head", config.confidence_head);
    place->set("confidence_head_with_markov", config.confidence_with_markov);
    place->set("mask_token_id", config.mask_token_id);
    place->set("target_layer_ids", Json::array_of(config.target_layer_ids));
  }
  config.json = texts.draft.dump(2);
  return config;
}

std::vector<std::string> required_config_keys(const DsparkConfig&) {
  std::vector<std::string> keys = draft::block_config_keys();
  for (const char* key : kHeadKeys) {
    keys.emplace_back(key);
    keys.push_back(std::string("dflash_config.") + key);
  }
  for (const char* key : {"mask_token_id", "target_layer_ids", "dflash_config.projector_type", "dflash_config.attention_mode"}) {
    keys.emplace_back(key);
  }
  return keys;
}

}  // namespace sf
