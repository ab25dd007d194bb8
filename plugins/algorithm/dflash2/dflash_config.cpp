#include "plugins/algorithm/dflash2/dflash_config.hpp"

#include "sf/error.hpp"
#include "sf/json.hpp"

#include <algorithm>
#include <optional>
#include <utility>

namespace sf {
namespace {

constexpr int64_t kBlockSizeDefault = 16;

constexpr const char* kInnerKeys[] = {"block_size",    "target_layer_ids", "mask_token_id",     "conv_kernel_size",       "conv_group_size",
                                      "selector_rank", "selector_top_k",   "output_multiplier", "final_logit_softcapping"};

[[noreturn]] void refuse(const std::string& what, const std::string& fix) { throw Error(ExitCode::kUsage, what, fix); }

std::string quoted(const Json& value) { return value.dump(); }

// An integer (a boolean is none) at `key` of `object`; nothing when absent or null.
std::optional<int64_t> integer(const Json* object, const char* key, const char* place) {
  const Json* value = object == nullptr ? nullptr : object->find(key);
  if (value == nullptr || value->is_null()) {
    return std::nullopt;
  }
  if (!value->is_int()) {
    refuse(std::string("the draft's configuration has ") + place + key + " = " + quoted(*value) + ", an integer expected",
           "correct model.draft_model_config");
  }
  return value->as_int();
}

double number(const Json* object, const char* key, double fallback) {
  const Json* value = object == nullptr ? nullptr : object->find(key);
  if (value == nullptr || value->is_null()) {
    return fallback;
  }
  if (!value->is_number()) {
    refuse(std::string("the draft's configuration has dflash_config.") + key + " = " + quoted(*value) + ", a number expected",
           "correct model.draft_model_config");
  }
  return value->as_double();
}

Json parse(const std::string& text, const char* whose) {
  try {
    return Json::parse(text, whose);
  } catch (const JsonError& error) {
    refuse(std::string(whose) + " is no JSON: " + error.what(), "correct the file");
  }
}

// How many characters have to be changed, put in or left out to turn one word into the other.
size_t distance(const std::string& from, const std::string& to) {
  std::vector<size_t> row(to.size() + 1);
  for (size_t j = 0; j < row.size(); ++j) {
    row[j] = j;
  }
  for (size_t i = 0; i < from.size(); ++i) {
    size_t before = row[0];
    row[0] = i + 1;
    for (size_t j = 0; j < to.size(); ++j) {
      const size_t above = row[j + 1];
      row[j + 1] = std::min({above + 1, row[j] + 1, before + (from[i] == to[j] ? 0 : 1)});
      before = above;
    }
  }
  return row.back();
}

// A key that nobody reads is a setting that its writer believes in.
void check_keys(const Json* inner) {
  if (inner == nullptr || inner->is_null()) {
    return;
  }
  if (!inner->is_object()) {
    refuse("the draft's configuration has dflash_config = " + quoted(*inner) + ", an object expected", "correct model.draft_model_config");
  }
  for (const auto& [key, value] : inner->entries()) {
    std::string known;
    const char* nearest = kInnerKeys[0];
    bool is_known = false;
    for (const char* candidate : kInnerKeys) {
      is_known = is_known || key == candidate;
      known += std::string(known.empty() ? "" : ", ") + candidate;
      nearest = distance(key, candidate) < distance(key, nearest) ? candidate : nearest;
    }
    if (!is_known) {
      refuse("the draft's configuration has the unknown key dflash_config." + key + "; known are " + known,
             distance(key, nearest) <= 3 ? std::string("did you mean \"") + nearest + "\"?" : "leave it out of model.draft_model_config");
    }
  }
}

// The rules of plugin.toml judge options without the configuration; what only a selector reads is judged here.
void check_selector_options(const DflashOptions& options) {
  const DflashOptions unset;
  for (const auto& [is_set, key] : {std::pair<bool, const char*>{options.selector_loss_alpha != unset.selector_loss_alpha, "training.dflash2_selector_loss_alpha"},
                                    {options.selector_warmup_ratio != unset.selector_warmup_ratio, "training.dflash2_selector_warmup_ratio"},
                                    {options.selector_ramp_ratio != unset.selector_ramp_ratio, "training.dflash2_selector_ramp_ratio"},
                                    {options.selector_stop_gradient != unset.selector_stop_gradient, "training.dflash2_selector_stop_gradient"},
                                    {options.insert_gold != unset.insert_gold, "algorithm.selector_policy"}}) {
    if (is_set) {
      refuse(std::string(key) + " is set, but the draft's configuration is of " + kDflashArchitecture + ", which has no selector",
             std::string("leave ") + key + " out, or name a configuration of " + kDflash2Architecture);
    }
  }
}

// The same number in both places, unless the recipe says another for both.
int64_t block_size(const ModelFacts& facts, std::optional<int64_t> top, std::optional<int64_t> nested) {
  if (facts.draft_block_size > 0) {
    return facts.draft_block_size;
  }
  if (top && nested && *top != *nested) {
    refuse("the draft's configuration has block_size = " + std::to_string(*top) + ", but dflash_config.block_size = " + std::to_string(*nested) +
               "; training would read the first and a serving engine the second",
           "correct one of them in model.draft_model_config, or set model.draft_block_size");
  }
  return top ? *top : nested.value_or(kBlockSizeDefault);
}

// A configuration in the target's shape with the architecture that the options ask for.
Json made_config(const Json& target, const ModelFacts& facts, const DflashOptions& options) {
  if (target.is_null()) {
    refuse("there is neither a draft configuration nor a target configuration to make one from", "set model.draft_model_config");
  }
  const int64_t layers = facts.draft_num_hidden_layers > 0 ? facts.draft_num_hidden_layers : 1;
  Json config = draft::config_like_target(target, options.dflash2 ? kDflash2Architecture : kDflashArchitecture, layers);
  Json inner = Json::object();
  if (options.dflash2) {
    inner.set("conv_kernel_size", options.conv_kernel_size);
    inner.set("conv_group_size", options.conv_group_size);
    inner.set("selector_rank", options.selector_rank);
    inner.set("selector_top_k", options.selector_top_k);
  }
  config.set("dflash_config", std::move(inner));
  return config;
}

std::vector<int64_t> target_layers(const ModelFacts& facts, const Json* inner, int64_t target_count, int64_t layers) {
  if (!facts.target_layer_ids.empty()) {
    return facts.target_layer_ids;
  }
  const Json* list = inner == nullptr ? nullptr : inner->find("target_layer_ids");
  if (list != nullptr && !list->is_null()) {
    std::vector<int64_t> ids;
    if (!list->is_array()) {
      refuse("dflash_config.target_layer_ids is " + quoted(*list) + ", a list of layers expected", "correct model.draft_model_config");
    }
    for (const Json& id : list->items()) {
      if (!id.is_int()) {
        refuse("dflash_config.target_layer_ids has " + quoted(id) + ", an integer expected", "correct model.draft_model_config");
      }
      ids.push_back(id.as_int());
    }
    return ids;
  }
  if (target_count <= 0) {
    refuse("which target layers the draft reads is not known: no target_layer_ids, and no num_hidden_layers of the target",
           "set model.target_layer_ids");
  }
  return draft::default_target_layers(target_count, layers);
}

void check(const DflashConfig& config, const ModelFacts& facts, int64_t target_count) {
  const int64_t h = config.layers.hidden_size;
  // Where a number came from, and so where it is corrected.
  const auto place = [&](const char* key) {
    return facts.draft_config_json.empty() ? std::string("plugin.dflash2.") + key
                                           : std::string("dflash_config.") + key + " in model.draft_model_config";
  };
  if (config.block_size < 2) {
    refuse("block_size is " + std::to_string(config.block_size) + ", at least 2 expected: one known token and one to draft",
           "set model.draft_block_size, or block_size in the draft's configuration");
  }
  if (config.target_layer_ids.empty()) {
    refuse("target_layer_ids is empty", "name at least one target layer");
  }
  for (const int64_t id : config.target_layer_ids) {
    if (id < 0 || (target_count > 0 && id >= target_count)) {
      refuse("target layer " + std::to_string(id) + " is asked for, the target has layers 0 to " + std::to_string(target_count - 1),
             "correct model.target_layer_ids or dflash_config.target_layer_ids");
    }
  }
  std::vector<int64_t> sorted = config.target_layer_ids;
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) {
    refuse("target layer " + std::to_string(*twice) + " is named twice; a draft learns nothing from the same states again",
           "name different layers with model.target_layer_ids or dflash_config.target_layer_ids; without either, a target of " +
               std::to_string(target_count) + " layers may be too small for " + std::to_string(config.layers.layers) + " draft layers");
  }
  if (!config.dflash2) {
    return;
  }
  if (config.conv_taps < 1 || config.conv_taps > config.block_size) {
    refuse("conv_kernel_size is " + std::to_string(config.conv_taps) + ", 1 to block_size (" + std::to_string(config.block_size) + ") expected",
           "correct " + place("conv_kernel_size"));
  }
  if (config.conv_group_size < 1 || h % config.conv_group_size != 0) {
    refuse("conv_group_size " + std::to_string(config.conv_group_size) + " does not divide hidden_size " + std::to_string(h),
           "choose a divisor of " + std::to_string(h) + " for " + place("conv_group_size"));
  }
  if (config.selector_rank < 1) {
    refuse("selector_rank is " + std::to_string(config.selector_rank) + ", at least 1 expected", "correct " + place("selector_rank"));
  }
  if (config.selector_top_k < 1 || config.selector_top_k > config.layers.vocab_size) {
    refuse("selector_top_k is " + std::to_string(config.selector_top_k) + ", 1 to the vocabulary's " +
               std::to_string(config.layers.vocab_size) + " expected",
           "correct " + place("selector_top_k"));
  }
  if (!(config.output_multiplier > 0) || config.final_logit_softcapping < 0) {
    refuse("output_multiplier and final_logit_softcapping have to be positive", "correct dflash_config");
  }
}

// Writes what was resolved where engines look for it, so that a checkpoint says all that a draft is.
std::string resolved_text(Json json, const DflashConfig& config, const ModelFacts& facts, int64_t target_count, const Json& target) {
  json.set("block_size", config.block_size);
  if (target_count > 0) {
    json.set("num_target_layers", target_count);
  }
  json.set("model_type", "qwen3");
  json.set("num_key_value_heads", config.layers.kv_heads);
  json.set("head_dim", config.layers.head_dim);
  json.set("hidden_act", "silu");
  json.set("rms_norm_eps", config.layers.rms_norm_eps);
  json.set("attention_bias", config.layers.attention_bias);
  json.set("attention_dropout", 0.0);
  json.set("tie_word_embeddings", false);
  json.set("rope_theta", config.layers.rope.theta);
  json.set("initializer_range", config.layers.initializer_range);
  Json types = Json::array();
  for (const bool slides : config.layers.sliding) {
    types.push_back(slides ? "sliding_attention" : "full_attention");
  }
  json.set("layer_types", std::move(types));
  json.set("use_sliding_window", config.layers.sliding_window > 0);
  json.set("sliding_window", config.layers.sliding_window > 0 ? Json(config.layers.sliding_window) : Json());
  if (!json.contains("max_window_layers")) {
    json.set("max_window_layers", config.layers.layers);
  }
  if (!json.contains("max_position_embeddings") && !target.is_null()) {
    const Json* positions = draft::text_part(target).find("max_position_embeddings");
    if (positions != nullptr) {
      json.set("max_position_embeddings", *positions);
    }
  }
  json.remove("torch_dtype");
  json.set("dtype", facts.bfloat16 ? "bfloat16" : "float32");

  Json* inner = json.find("dflash_config");
  if (inner == nullptr || !inner->is_object()) {
    json.set("dflash_config", Json::object());
    inner = json.find("dflash_config");
  }
  inner->set("block_size", config.block_size);
  inner->set("target_layer_ids", Json::array_of(config.target_layer_ids));
  inner->set("mask_token_id", config.mask_token_id);
  return json.dump(2);
}

}  // namespace

DflashConfig resolve_dflash_config(const ModelFacts& facts, const DflashOptions& options) {
  const Json target = facts.target_config_json.empty() ? Json() : parse(facts.target_config_json, "the target's config.json");
  Json json = facts.draft_config_json.empty() ? made_config(target, facts, options) : parse(facts.draft_config_json, "the draft's config.json");
  if (!json.is_object()) {
    refuse("the draft's config.json holds " + std::string(json.kind_name()) + ", an object expected", "correct model.draft_model_config");
  }
  if (facts.draft_num_hidden_layers > 0 && !(json.find("num_hidden_layers") != nullptr && json.at("num_hidden_layers") == Json(facts.draft_num_hidden_layers))) {
    json.set("num_hidden_layers", facts.draft_num_hidden_layers);
    json.remove("layer_types");
  }

  DflashConfig config;
  config.layers = draft::read_draft_config(
      json, facts.rope_rounding == "reference" ? draft::RopeRounding::kReference : draft::RopeRounding::kExact);
  if (config.layers.architecture != kDflashArchitecture && config.layers.architecture != kDflash2Architecture) {
    refuse("the draft's architecture is \"" + config.layers.architecture + "\"; this plugin trains " + kDflashArchitecture + " and " +
               kDflash2Architecture,
           "choose another algorithm.name, or correct \"architectures\"");
  }
  config.dflash2 = config.layers.architecture == kDflash2Architecture;

  if (!config.dflash2 && !facts.draft_config_json.empty()) {
    check_selector_options(options);
  }

  const Json* inner = json.find("dflash_config");
  check_keys(inner);
  const std::optional<int64_t> top = integer(&json, "block_size", ""), nested = integer(inner, "block_size", "dflash_config.");
  config.block_size = block_size(facts, top, nested);

  int64_t target_count = integer(&json, "num_target_layers", "").value_or(-1);
  if (!target.is_null()) {
    const Json& text = draft::text_part(target);
    if (text.find("num_hidden_layers") != nullptr) {
      target_count = text.at("num_hidden_layers").as_int();
    }
    const Json* hidden = text.find("hidden_size");
    if (hidden != nullptr && hidden->is_int() && hidden->as_int() != config.layers.hidden_size) {
      refuse("the draft's hidden_size is " + std::to_string(config.layers.hidden_size) + ", the target's " + hidden->dump() +
                 "; the draft uses the target's embedding, head and states, so they have to agree",
             "set hidden_size = " + hidden->dump() + " in the draft's configuration");
    }
    const int64_t vocabulary = draft::vocabulary_size(target);
    if (vocabulary > 0 && vocabulary != config.layers.vocab_size) {
      refuse("the draft's vocab_size is " + std::to_string(config.layers.vocab_size) + ", the target's embedding has " +
                 std::to_string(vocabulary) + " tokens",
             "set vocab_size = " + std::to_string(vocabulary) + " in the draft's configuration");
    }
  }
  config.target_layer_ids = target_layers(facts, inner, target_count, config.layers.layers);

  if (config.dflash2) {
    const auto mandatory = [&](const char* key) {
      const std::optional<int64_t> value = integer(inner, key, "dflash_config.");
      if (!value) {
        refuse(std::string("dflash_config.") + key + " is missing; DFlash2 needs it", "add it to the draft's configuration");
      }
      return *value;
    };
    config.conv_taps = mandatory("conv_kernel_size");
    config.conv_group_size = mandatory("conv_group_size");
    config.selector_rank = mandatory("selector_rank");
    config.selector_top_k = mandatory("selector_top_k");
    config.output_multiplier = number(inner, "output_multiplier", 1);
    config.final_logit_softcapping = number(inner, "final_logit_softcapping", 0);
  }
  check(config, facts, target_count);

  const Json empty = Json::object();
  const Json& target_text = target.is_null() ? empty : draft::text_part(target);
  config.mask_token_id = draft::resolve_mask_token({.explicit_id = facts.mask_token_id,
                                                    .config_id = inner == nullptr ? -1 : draft::token_id(*inner, "mask_token_id"),
                                                    .tokenizer_mask_id = facts.tokenizer_mask_token_id,
                                                    .tokenizer_tokens = facts.tokenizer_tokens,
                                                    .pad_id = draft::token_id(target_text, "pad_token_id"),
                                                    .eos_id = draft::token_id(target_text, "eos_token_id"),
                                                    .unk_id = draft::token_id(target_text, "unk_token_id"),
                                                    .vocab_size = config.layers.vocab_size});
  config.json = resolved_text(std::move(json), config, facts, target_count, target);
  return config;
}

std::vector<std::string> required_config_keys(const DflashConfig& config) {
  std::vector<std::string> keys = {"architectures",       "model_type",        "hidden_size",         "intermediate_size",
                                   "num_hidden_layers",   "num_attention_heads", "num_key_value_heads", "head_dim",
                                   "hidden_act",          "rms_norm_eps",      "rope_theta",          "vocab_size",
                                   "attention_bias",      "layer_types",       "tie_word_embeddings", "dtype",
                                   "block_size",          "dflash_config.block_size", "dflash_config.target_layer_ids",
                                   "dflash_config.mask_token_id"};
  if (config.dflash2) {
    for (const char* key : {"conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"}) {
      keys.push_back(std::string("dflash_config.") + key);
    }
  }
  return keys;
}

}  // namespace sf
