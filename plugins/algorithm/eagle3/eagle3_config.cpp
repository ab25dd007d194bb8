#include "plugins/algorithm/eagle3/eagle3_config.hpp"

#include "sdk/draft/block_config.hpp"
#include "sdk/draft/config_problems.hpp"
#include "sf/json.hpp"

#include <algorithm>
#include <optional>

namespace sf {
namespace {

constexpr const char* kCorrect = "correct model.draft_model_config";
constexpr const char* kLayerKey = "eagle_aux_hidden_state_layer_ids";

const Json* present(const Json& object, const char* key) {
  const Json* value = object.find(key);
  return value == nullptr || value->is_null() ? nullptr : value;
}

std::optional<int64_t> integer(const Json& object, const char* key) { return draft::integer_at(&object, key, ""); }
std::string list_text(const std::vector<int64_t>& ids) { return "[" + draft::comma_list(ids) + "]"; }

// A configuration in the target's shape.
Json made_config(const Json& target, const Eagle3Options& options) {
  Json config = draft::config_like_target(target, kEagle3Architecture, 1);
  for (const char* key : {"layer_types", "use_sliding_window", "sliding_window", "max_window_layers"}) {
    config.remove(key);
  }
  config.set("draft_vocab_size", std::min(kDraftVocabularyDefault, draft::vocabulary_size(target)));
  if (options.eagle31) {
    config.set("fc_norm", true);
    config.set("norm_output", false);
  }
  return config;
}

std::vector<int64_t> target_layers(const ModelFacts& facts, const Json& config, int64_t target_count) {
  if (!facts.target_layer_ids.empty()) {
    return facts.target_layer_ids;
  }
  const Json* inner = present(config, "eagle_config");
  if (inner != nullptr && !inner->is_object()) {
    draft::refuse_config("the draft's configuration has eagle_config = " + inner->dump() + ", an object expected", kCorrect);
  }
  const Json* list = inner == nullptr ? nullptr : present(*inner, kLayerKey);
  if (list != nullptr) {
    if (!list->is_array()) {
      draft::refuse_config(std::string("eagle_config.") + kLayerKey + " is " + list->dump() + ", a list of layers expected", kCorrect);
    }
    std::vector<int64_t> ids;
    for (const Json& id : list->items()) {
      if (!id.is_int()) {
        draft::refuse_config(std::string("eagle_config.") + kLayerKey + " has " + id.dump() + ", an integer expected", kCorrect);
      }
      ids.push_back(id.as_int());
    }
    return ids;
  }
  if (target_count <= 0) {
    draft::refuse_config("which target layers the draft reads is not known: the configuration names none, and there is no num_hidden_layers of the target",
           "set model.target_layer_ids");
  }
  return {1, target_count / 2 - 1, target_count - 4};
}

void check_layers(const std::vector<int64_t>& ids, int64_t target_count) {
  const std::string fix = "name three layers in ascending order with model.target_layer_ids or eagle_config.eagle_aux_hidden_state_layer_ids";
  if (static_cast<int64_t>(ids.size()) != kEagle3Layers) {
    draft::refuse_config("the draft reads the target layers " + list_text(ids) + ", EAGLE3 reads exactly three", fix);
  }
  for (const int64_t id : ids) {
    if (id < 0 || (target_count > 0 && id >= target_count)) {
      draft::refuse_config("target layer " + std::to_string(id) + " is asked for, the target has layers 0 to " + std::to_string(target_count - 1), fix);
    }
  }
  if (!(ids[0] < ids[1] && ids[1] < ids[2])) {
    draft::refuse_config("the target layers " + list_text(ids) + " do not ascend; serving engines hand captured layers over in the model's order, so another order " +
               "would train fc for columns that it never sees",
           fix);
  }
}

int64_t draft_vocabulary(const Json& config, const Eagle3Options& options, int64_t vocabulary) {
  const std::optional<int64_t> stated = integer(config, "draft_vocab_size");
  const int64_t size = options.draft_vocab_size > 0 ? options.draft_vocab_size : stated.value_or(vocabulary);
  const std::string place = options.draft_vocab_size > 0 ? "plugin.eagle3.draft_vocab_size" : "draft_vocab_size of the draft's configuration";
  if (size < 1) {
    draft::refuse_config(place + " is " + std::to_string(size) + ", at least 1 expected", "choose 1 to the target's " + std::to_string(vocabulary) +
                                                                                " tokens; " + std::to_string(kDraftVocabularyDefault) + " is usual");
  }
  if (size > vocabulary) {
    draft::refuse_config(place + " is " + std::to_string(size) + ", but the target has " + std::to_string(vocabulary) + " tokens; a draft guesses some of those",
           "choose at most " + std::to_string(vocabulary));
  }
  return size;
}

// Widths and vocabulary against the target's.
void check_target_sizes(Eagle3Config& config, const Json& json, const Json& target, const Eagle3Options& options, draft::ConfigProblems& problems) {
  std::optional<int64_t> stated_hidden;
  problems.attempt("target_hidden_size", [&] { stated_hidden = draft::integer_at(&json, "target_hidden_size", ""); });
  config.target_hidden = stated_hidden.value_or(config.layers.hidden_size);
  if (problems.is_bad("target_hidden_size") || problems.is_bad("hidden_size")) {
    return;
  }
  if (config.target_hidden < 1) {
    problems.add("target_hidden_size", "target_hidden_size is " + std::to_string(config.target_hidden) + ", at least 1 expected");
    return;
  }
  if (!target.is_null()) {
    const int64_t hidden = draft::integer_at(&draft::text_part(target), "hidden_size", "").value_or(config.target_hidden);
    if (hidden != config.target_hidden && !stated_hidden) {
      problems.add("target_hidden_size", "the draft's hidden_size is " + std::to_string(config.layers.hidden_size) + ", the target's " + std::to_string(hidden) +
                   ", and the draft's configuration has no target_hidden_size",
                   "set target_hidden_size = " + std::to_string(hidden) + " in it, so that engines size fc alike");
      return;
    }
    if (hidden != config.target_hidden) {
      problems.add("target_hidden_size", "the draft's configuration has target_hidden_size = " + std::to_string(config.target_hidden) + ", the target's hidden_size is " +
                   std::to_string(hidden),
                   "set target_hidden_size = " + std::to_string(hidden));
      return;
    }
    const int64_t vocabulary = draft::vocabulary_size(target);
    if (vocabulary > 0 && vocabulary != config.layers.vocab_size && !problems.is_bad("vocab_size")) {
      problems.add("vocab_size", "the draft's vocab_size is " + std::to_string(config.layers.vocab_size) + ", the target's embedding has " + std::to_string(vocabulary) +
                   " tokens",
                   "set vocab_size = " + std::to_string(vocabulary) + " in the draft's configuration");
    }
  }
  if (config.target_hidden != config.layers.hidden_size && !options.train_embedding) {
    problems.add("hidden_size", "the draft's hidden_size is " + std::to_string(config.layers.hidden_size) + ", the target's " + std::to_string(config.target_hidden) +
                 "; the target's embedding has rows of another length, so the draft needs one of its own",
                 "set plugin.eagle3.train_embedding = true, or hidden_size = " + std::to_string(config.target_hidden));
  }
}

// Writes what was resolved where engines look for it, so that a checkpoint says all that a draft is.
std::string resolved_text(Json json, const Eagle3Config& config, const ModelFacts& facts, const Json& target) {
  const draft::DraftConfig& layers = config.layers;
  json.set("model_type", "llama");
  json.set("num_hidden_layers", int64_t{1});
  json.set("num_key_value_heads", layers.kv_heads);
  json.set("head_dim", layers.head_dim);
  json.set("hidden_act", "silu");
  json.set("rms_norm_eps", layers.rms_norm_eps);
  json.set("initializer_range", layers.initializer_range);
  json.set("attention_bias", false);
  json.set("attention_dropout", 0.0);
  json.set("mlp_bias", false);
  json.set("tie_word_embeddings", false);
  json.set("target_hidden_size", config.target_hidden);
  json.set("draft_vocab_size", config.draft_vocabulary);
  json.set("fc_norm", config.fc_norm);
  json.set("norm_output", config.norm_output);
  // Old readers know rope_theta and rope_scaling, new ones rope_parameters.
  json.set("rope_theta", layers.rope.theta);
  const Json* table = present(json, "rope_parameters");
  const Json* scaling = present(json, "rope_scaling");
  Json rope = scaling != nullptr ? *scaling : table != nullptr ? *table : Json::object();
  if (!rope.contains("rope_type")) {
    rope.set("rope_type", layers.rope.type);
  }
  rope.set("rope_theta", layers.rope.theta);
  const bool is_default = layers.rope.type == "default" && rope.at("rope_type") == Json("default");
  json.set("rope_scaling", is_default ? Json() : rope);
  json.set("rope_parameters", std::move(rope));
  if (!target.is_null()) {
    for (const char* key : {"max_position_embeddings", "bos_token_id", "eos_token_id"}) {
      const Json* value = draft::text_part(target).find(key);
      if (!json.contains(key) && value != nullptr) {
        json.set(key, *value);
      }
    }
  }
  json.remove("torch_dtype");
  json.set("dtype", facts.bfloat16 ? "bfloat16" : "float32");

  // SGLang counts a layer by its output, vLLM by its input: the same state is one more there.
  Json* inner = json.find("eagle_config");
  if (inner == nullptr || !inner->is_object()) {
    json.set("eagle_config", Json::object());
    inner = json.find("eagle_config");
  }
  inner->set("use_aux_hidden_state", true);
  inner->set(kLayerKey, Json::array_of(config.target_layer_ids));
  std::vector<int64_t> inputs = config.target_layer_ids;
  for (int64_t& id : inputs) {
    ++id;
  }
  json.set(kLayerKey, Json::array_of(inputs));
  return json.dump(2);
}

}  // namespace

Eagle3Config resolve_eagle3_config(const ModelFacts& facts, const Eagle3Options& options) {
  draft::BlockTexts texts = draft::read_block_texts(facts, [&](const Json& like, int64_t) { return made_config(like, options); });
  const Json& target = texts.target;
  Json& json = texts.draft;
  draft::ConfigProblems problems(facts.draft_config_path);
  const auto flag = [&](const char* key, bool fallback) {
    bool value = fallback;
    problems.attempt(key, [&] { value = draft::boolean_at(&json, key, "").value_or(fallback); });
    return value;
  };
  const auto whole = [&](const Json& object, const char* key) {
    std::optional<int64_t> value;
    problems.attempt(key, [&] { value = draft::integer_at(&object, key, ""); });
    return value;
  };
  if (facts.draft_block_size > 0) {
    problems.add("", "model.draft_block_size is set, but an EAGLE3 draft guesses one token after another", "set training.ttt_length, and leave model.draft_block_size out");
  }
  const int64_t asked = facts.draft_num_hidden_layers > 0 ? facts.draft_num_hidden_layers : whole(json, "num_hidden_layers").value_or(1);
  if (asked != 1) {
    problems.add("num_hidden_layers", "the draft has num_hidden_layers = " + std::to_string(asked) + "; an EAGLE3 draft has exactly one layer",
                 facts.draft_num_hidden_layers > 0 ? "leave model.draft_num_hidden_layers out" : "");
  }
  if (asked != 1 || problems.is_bad("num_hidden_layers") || !json.contains("num_hidden_layers")) {
    json.set("num_hidden_layers", int64_t{1});  // its own mistake is told; what follows is about one layer
  }

  Eagle3Config config;
  config.layers = draft::read_draft_config(json, facts.rope_rounding == "reference" ? draft::RopeRounding::kReference : draft::RopeRounding::kExact, problems);
  if (!problems.is_bad("architectures") && config.layers.architecture != kEagle3Architecture) {
    problems.add("architectures", "the draft's architecture is \"" + config.layers.architecture + "\"; this plugin trains " + kEagle3Architecture,
                 "choose another algorithm.name, or correct \"architectures\"");
  }
  if (config.layers.attention_bias) {
    problems.add("attention_bias", "the draft's configuration has attention_bias = true; EAGLE3 drafts have no biases, and an engine would look for them", "set it to false");
  }
  if (std::find(config.layers.sliding.begin(), config.layers.sliding.end(), true) != config.layers.sliding.end()) {
    problems.add("layer_types", "the draft's configuration asks for sliding-window attention; the layer of an EAGLE3 draft is causal over everything");
  }
  if (flag("tie_word_embeddings", false)) {
    problems.add("tie_word_embeddings", "the draft's configuration has tie_word_embeddings = true, but a draft's head is its own", "set it to false");
  }
  config.fc_norm = flag("fc_norm", false);
  config.norm_output = flag("norm_output", true);
  const int64_t target_count = target.is_null() ? -1 : whole(draft::text_part(target), "num_hidden_layers").value_or(-1);
  check_target_sizes(config, json, target, options, problems);
  problems.attempt("draft_vocab_size", [&] {
    const int64_t targets = target.is_null() ? -1 : draft::vocabulary_size(target);
    if (problems.is_bad("vocab_size") && targets < 1) {  // nothing to compare it with
      return;
    }
    config.draft_vocabulary = draft_vocabulary(json, options, problems.is_bad("vocab_size") ? targets : config.layers.vocab_size);
  });
  problems.attempt("eagle_config", [&] {
    config.target_layer_ids = target_layers(facts, json, target_count);
    check_layers(config.target_layer_ids, target_count);
  });
  problems.finish();
  config.json = resolved_text(std::move(json), config, facts, target);
  return config;
}

std::vector<std::string> required_eagle3_keys() {
  return {"architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
          "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "vocab_size", "draft_vocab_size", "tie_word_embeddings", "attention_bias",
          "rope_theta", "rope_parameters.rope_type", "rope_parameters.rope_theta", "target_hidden_size", "dtype", "eagle_config.use_aux_hidden_state", std::string("eagle_config.") + kLayerKey, kLayerKey};
}

}  // namespace sf
