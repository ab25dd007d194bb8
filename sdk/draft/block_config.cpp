#include "sdk/draft/block_config.hpp"

#include <algorithm>
#include <utility>

#include "sf/error.hpp"

namespace sf::draft {
namespace {

constexpr int64_t kBlockSizeDefault = 16;
constexpr int64_t kBlockSizeMost = 1024;   // as model.draft_block_size

Json parse(const std::string& text, const char* whose) {
  try {
    return Json::parse(text, whose);
  } catch (const JsonError& error) {
    refuse_config(std::string(whose) + " is no JSON: " + error.what(), "correct the file");
  }
}

const Json* present(const Json* object, const char* key) {
  const Json* value = object == nullptr || object->is_null() ? nullptr : object->find(key);
  return value == nullptr || value->is_null() ? nullptr : value;
}

[[noreturn]] void refuse_type(const char* place, const char* key, const Json& value, const char* expected) {
  refuse_config(std::string("the draft's configuration has ") + place + key + " = " + value.dump() + ", " + expected + " expected",
                "correct model.draft_model_config");
}

// -1 when there is none. With another token in the place of one that can't be read the draft would learn something else than its engine does.
int64_t mask_id(const Json* object, const char* place) {
  const Json* value = present(object, "mask_token_id");
  if (value == nullptr) {
    return -1;
  }
  if (!value->is_int() || value->as_int() < 0) {
    refuse_config(std::string("the draft's configuration has ") + place + "mask_token_id = " + value->dump() + ", the id of a token expected: an integer, 0 or more",
                  "write the id that the draft is to be trained with, or leave the key out");
  }
  return value->as_int();
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
void check_keys(const Json* inner, std::span<const char* const> known_keys, ConfigProblems& problems) {
  if (inner == nullptr || inner->is_null()) {
    return;
  }
  if (!inner->is_object()) {
    problems.add(kBlockConfig, "the draft's configuration has dflash_config = " + inner->dump() + ", an object expected");
    return;
  }
  for (const auto& [key, value] : inner->entries()) {
    std::string known;
    const char* nearest = known_keys[0];
    bool is_known = false;
    for (const char* candidate : known_keys) {
      is_known = is_known || key == candidate;
      known += std::string(known.empty() ? "" : ", ") + candidate;
      nearest = distance(key, candidate) < distance(key, nearest) ? candidate : nearest;
    }
    if (!is_known) {
      problems.add("dflash_config." + key, "the draft's configuration has the unknown key dflash_config." + key + "; known are " + known,
                   distance(key, nearest) <= 3 ? std::string("did you mean \"") + nearest + "\"?" : "leave it out of model.draft_model_config");
    }
  }
}

// The same number in both places, unless the recipe says another for both.
int64_t block_size(const ModelFacts& facts, std::optional<int64_t> top, std::optional<int64_t> nested) {
  int64_t size = facts.draft_block_size;
  if (size <= 0) {
    if (top && nested && *top != *nested) {
      refuse_config("the draft's configuration has block_size = " + std::to_string(*top) + ", but dflash_config.block_size = " + std::to_string(*nested) +
                        "; training would read the first and a serving engine the second",
                    "correct one of them in model.draft_model_config, or set model.draft_block_size");
    }
    size = top ? *top : nested.value_or(kBlockSizeDefault);
  }
  if (size < 2) {
    refuse_config("block_size is " + std::to_string(size) + ", at least 2 expected: one known token and one to draft",
                  "set model.draft_block_size, or block_size in the draft's configuration");
  }
  if (size > kBlockSizeMost) {
    refuse_config("block_size is " + std::to_string(size) + ", at most " + std::to_string(kBlockSizeMost) + " expected",
                  "set model.draft_block_size, or block_size in the draft's configuration");
  }
  return size;
}

// The same list in both places, unless the recipe says another.
std::vector<int64_t> target_layers(const ModelFacts& facts, const BlockTexts& texts, int64_t target_count, int64_t layers) {
  if (!facts.target_layer_ids.empty()) {
    return facts.target_layer_ids;
  }
  const Json* nested = present(texts.inner(), "target_layer_ids");
  const Json* top = present(&texts.draft, "target_layer_ids");
  if (nested != nullptr && top != nullptr && !(*nested == *top)) {
    refuse_config("the draft's configuration has target_layer_ids = " + top->dump() + ", but dflash_config.target_layer_ids = " + nested->dump(),
                  "correct one of them in model.draft_model_config, or set model.target_layer_ids");
  }
  const Json* list = nested != nullptr ? nested : top;
  const std::string name = nested != nullptr ? "dflash_config.target_layer_ids" : "target_layer_ids";
  if (list != nullptr) {
    std::vector<int64_t> ids;
    if (!list->is_array()) {
      refuse_config(name + " is " + list->dump() + ", a list of layers expected", "correct model.draft_model_config");
    }
    for (const Json& id : list->items()) {
      if (!id.is_int()) {
        refuse_config(name + " has " + id.dump() + ", an integer expected", "correct model.draft_model_config");
      }
      ids.push_back(id.as_int());
    }
    return ids;
  }
  if (target_count <= 0) {
    refuse_config("which target layers the draft reads is not known: no target_layer_ids, and no num_hidden_layers of the target",
                  "set model.target_layer_ids");
  }
  return default_target_layers(target_count, layers);
}

void check_target_layers(const BlockConfig& config) {
  const std::vector<int64_t>& ids = config.target_layer_ids;
  if (ids.empty()) {
    refuse_config("target_layer_ids is empty", "name at least one target layer");
  }
  for (const int64_t id : ids) {
    if (id < 0 || (config.target_layers > 0 && id >= config.target_layers)) {
      refuse_config("target layer " + std::to_string(id) + " is asked for, the target has layers 0 to " + std::to_string(config.target_layers - 1),
                    "correct model.target_layer_ids or dflash_config.target_layer_ids");
    }
  }
  std::vector<int64_t> sorted = ids;
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) {
    refuse_config("target layer " + std::to_string(*twice) + " is named twice; a draft learns nothing from the same states again",
                  "name different layers with model.target_layer_ids or dflash_config.target_layer_ids; without either, a target of " +
                      std::to_string(config.target_layers) + " layers may be too small for " + std::to_string(config.layers.layers) + " draft layers");
  }
  if (sorted != ids) {
    refuse_config("the target layers " + comma_list(ids) + " are not in ascending order; captures and engines stack states in the order of the layers",
                  "write " + comma_list(sorted) + " in model.target_layer_ids or dflash_config.target_layer_ids");
  }
}

}  // namespace

void refuse_config(const std::string& what, const std::string& fix) { throw Error(ExitCode::kUsage, what, fix); }

std::optional<int64_t> integer_at(const Json* object, const char* key, const char* place) {
  const Json* value = present(object, key);
  if (value == nullptr) {
    return std::nullopt;
  }
  if (!value->is_int()) {
    refuse_type(place, key, *value, "an integer");
  }
  return value->as_int();
}

double number_at(const Json* object, const char* key, const char* place, double fallback) {
  const Json* value = present(object, key);
  if (value == nullptr) {
    return fallback;
  }
  if (!value->is_number()) {
    refuse_type(place, key, *value, "a number");
  }
  return value->as_double();
}

std::optional<bool> boolean_at(const Json* object, const char* key, const char* place) {
  const Json* value = present(object, key);
  if (value == nullptr) {
    return std::nullopt;
  }
  if (!value->is_bool()) {
    refuse_type(place, key, *value, "true or false");
  }
  return value->as_bool();
}

std::optional<std::string> string_at(const Json* object, const char* key, const char* place) {
  const Json* value = present(object, key);
  if (value == nullptr) {
    return std::nullopt;
  }
  if (!value->is_string()) {
    refuse_type(place, key, *value, "a text");
  }
  return value->as_string();
}

std::string comma_list(const std::vector<int64_t>& ids) {
  std::string text;
  for (const int64_t id : ids) {
    text += (text.empty() ? "" : ",") + std::to_string(id);
  }
  return text;
}

BlockTexts read_block_texts(const ModelFacts& facts, const std::function<Json(const Json& target, int64_t layers)>& make) {
  BlockTexts texts;
  if (!facts.target_config_json.empty()) {
    texts.target = parse(facts.target_config_json, "the target's config.json");
  }
  if (facts.draft_config_json.empty()) {
    if (texts.target.is_null()) {
      refuse_config("there is neither a draft configuration nor a target configuration to make one from", "set model.draft_model_config");
    }
    texts.draft = make(texts.target, facts.draft_num_hidden_layers > 0 ? facts.draft_num_hidden_layers : 1);
  } else {
    texts.draft = parse(facts.draft_config_json, "the draft's config.json");
  }
  if (!texts.draft.is_object()) {
    refuse_config("the draft's config.json holds " + std::string(texts.draft.kind_name()) + ", an object expected", "correct model.draft_model_config");
  }
  const Json* layers = texts.draft.find("num_hidden_layers");
  if (facts.draft_num_hidden_layers > 0 && !(layers != nullptr && *layers == Json(facts.draft_num_hidden_layers))) {
    texts.draft.set("num_hidden_layers", facts.draft_num_hidden_layers);
    texts.draft.remove("layer_types");
  }
  return texts;
}

BlockConfig resolve_block_config(const ModelFacts& facts, const BlockTexts& texts, const BlockConfigRules& rules, ConfigProblems& problems) {
  BlockConfig config;
  config.layers = read_draft_config(texts.draft, facts.rope_rounding == "reference" ? RopeRounding::kReference : RopeRounding::kExact, problems);
  if (!problems.is_bad("architectures") &&
      std::find(rules.architectures.begin(), rules.architectures.end(), config.layers.architecture) == rules.architectures.end()) {
    std::string trained;
    for (const std::string& name : rules.architectures) {
      trained += (trained.empty() ? "" : " and ") + name;
    }
    problems.add("architectures", "the draft's architecture is \"" + config.layers.architecture + "\"; this plugin trains " + trained,
                 "choose another algorithm.name, or correct \"architectures\"");
    problems.finish();  // the keys of another family's drafts mean something else
  }
  const bool has_inner = texts.inner() != nullptr && texts.inner()->is_object();
  check_keys(texts.inner(), rules.inner_keys, problems);
  const Json* inner = has_inner ? texts.inner() : nullptr;
  config.block_size = kBlockSizeDefault;
  problems.attempt("block_size", [&] {
    config.block_size = block_size(facts, integer_at(&texts.draft, "block_size", ""), integer_at(inner, "block_size", "dflash_config."));
  });

  problems.attempt("num_target_layers", [&] { config.target_layers = integer_at(&texts.draft, "num_target_layers", "").value_or(-1); });
  const Json empty = Json::object();
  const Json& target = texts.target.is_null() ? empty : text_part(texts.target);
  if (!texts.target.is_null()) {
    if (target.find("num_hidden_layers") != nullptr) {
      config.target_layers = target.at("num_hidden_layers").as_int();
    }
    const Json* hidden = target.find("hidden_size");
    if (hidden != nullptr && hidden->is_int() && hidden->as_int() != config.layers.hidden_size && !problems.is_bad("hidden_size")) {
      problems.add("hidden_size",
                   "the draft's hidden_size is " + std::to_string(config.layers.hidden_size) + ", the target's " + hidden->dump() +
                       "; the draft uses the target's embedding, head and states, so they have to agree",
                   "set hidden_size = " + hidden->dump() + " in the draft's configuration");
    }
    const int64_t vocabulary = vocabulary_size(texts.target);
    if (vocabulary > 0 && vocabulary != config.layers.vocab_size && !problems.is_bad("vocab_size")) {
      problems.add("vocab_size",
                   "the draft's vocab_size is " + std::to_string(config.layers.vocab_size) + ", the target's embedding has " +
                       std::to_string(vocabulary) + " tokens",
                   "set vocab_size = " + std::to_string(vocabulary) + " in the draft's configuration");
    }
  }
  if (!problems.is_bad("num_hidden_layers")) {
    problems.attempt("target_layer_ids", [&] {
      config.target_layer_ids = target_layers(facts, texts, config.target_layers, config.layers.layers);
      check_target_layers(config);
    });
  }

  problems.attempt("mask_token_id", [&] {
    const int64_t nested_mask = mask_id(inner, "dflash_config.");
    const int64_t top_mask = mask_id(&texts.draft, "");
    if (facts.mask_token_id < 0 && nested_mask >= 0 && top_mask >= 0 && nested_mask != top_mask) {
      refuse_config("the draft's configuration has mask_token_id = " + std::to_string(top_mask) + ", but dflash_config.mask_token_id = " +
                        std::to_string(nested_mask),
                    "correct one of them in model.draft_model_config, or set model.mask_token_id");
    }
    if (problems.is_bad("vocab_size")) {
      return;
    }
    config.mask_token_id = resolve_mask_token({.explicit_id = facts.mask_token_id,
                                               .config_id = nested_mask >= 0 ? nested_mask : top_mask,
                                               .tokenizer_mask_id = facts.tokenizer_mask_token_id,
                                               .tokenizer_tokens = facts.tokenizer_tokens,
                                               .pad_id = token_id(target, "pad_token_id"),
                                               .eos_id = token_id(target, "eos_token_id"),
                                               .unk_id = token_id(target, "unk_token_id"),
                                               .vocab_size = config.layers.vocab_size});
  });
  return config;
}

void write_block_config(Json& json, const BlockConfig& config, const ModelFacts& facts, const Json& target) {
  json.set("block_size", config.block_size);
  if (config.target_layers > 0) {
    json.set("num_target_layers", config.target_layers);
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
    const Json* positions = text_part(target).find("max_position_embeddings");
    if (positions != nullptr) {
      json.set("max_position_embeddings", *positions);
    }
  }
  json.remove("torch_dtype");
  json.set("dtype", facts.bfloat16 ? "bfloat16" : "float32");

  Json* inner = json.find(kBlockConfig);
  if (inner == nullptr || !inner->is_object()) {
    json.set(kBlockConfig, Json::object());
    inner = json.find(kBlockConfig);
  }
  inner->set("block_size", config.block_size);
  inner->set("target_layer_ids", Json::array_of(config.target_layer_ids));
  inner->set("mask_token_id", config.mask_token_id);
}

std::vector<std::string> block_config_keys() {
  return {"architectures",     "model_type",          "hidden_size",         "intermediate_size",
          "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
          "hidden_act",        "rms_norm_eps",        "rope_theta",          "vocab_size",
          "attention_bias",    "layer_types",         "tie_word_embeddings", "dtype",
          "block_size",        "dflash_config.block_size", "dflash_config.target_layer_ids", "dflash_config.mask_token_id"};
}

}  // namespace sf::draft
