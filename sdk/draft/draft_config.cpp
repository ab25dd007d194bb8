#include "sdk/draft/draft_config.hpp"

#include "sf/error.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace sf::draft {
namespace {

constexpr int64_t kMostLayers = 1000;       // as model.draft_num_hidden_layers
constexpr int64_t kMostColumns = 1 << 20;   // of a state, a product or the heads
constexpr int64_t kMostTokens = 1 << 24;    // of a vocabulary
constexpr int64_t kMostPositions = int64_t{1} << 40;

// Reads keys and collects what is wrong, so that a user sees all of it at once.
class Reader {
 public:
  Reader(const Json& config, ConfigProblems& problems) : config_(config), problems_(problems) {}

  const Json* present(const char* key) const {
    const Json* value = config_.find(key);
    return value == nullptr || value->is_null() ? nullptr : value;
  }

  int64_t positive(const char* key, int64_t most, std::optional<int64_t> fallback = std::nullopt) {
    const Json* value = present(key);
    if (value == nullptr) {
      if (!fallback) {
        complain(key, std::string("\"") + key + "\" is missing, a positive integer expected");
      }
      return fallback.value_or(1);
    }
    if (!value->is_int() || value->as_int() < 1) {
      complain(key, std::string("\"") + key + "\" is " + value->dump() + ", a positive integer expected");
      return fallback.value_or(1);
    }
    if (value->as_int() > most) {
      complain(key, std::string("\"") + key + "\" is " + value->dump() + ", at most " + std::to_string(most) + " expected");
      return fallback.value_or(1);
    }
    return value->as_int();
  }

  double number(const char* key, double fallback, bool is_positive = false) {
    const Json* value = present(key);
    if (value == nullptr) {
      return fallback;
    }
    if (!value->is_number() || !(value->as_double() >= 0) || (is_positive && value->as_double() == 0)) {
      complain(key, std::string("\"") + key + "\" is " + value->dump() + ", a number " + (is_positive ? "above 0" : "that is not negative") + " expected");
      return fallback;
    }
    return value->as_double();
  }

  bool boolean(const char* key, bool fallback) {
    const Json* value = present(key);
    if (value == nullptr) {
      return fallback;
    }
    if (!value->is_bool()) {
      complain(key, std::string("\"") + key + "\" is " + value->dump() + ", true or false expected");
      return fallback;
    }
    return value->as_bool();
  }

  void complain(const std::string& key, const std::string& text) { problems_.add(key, text); }

 private:
  const Json& config_;
  ConfigProblems& problems_;
};

std::vector<bool> layer_kinds(Reader& reader, int64_t layers) {
  const Json* types = reader.present("layer_types");
  std::vector<bool> sliding(static_cast<size_t>(layers), false);
  if (types == nullptr) {
    // As the model family does without the list: layers from max_window_layers on slide when use_sliding_window says so.
    if (reader.boolean("use_sliding_window", false) && reader.present("sliding_window") != nullptr) {
      const Json* first = reader.present("max_window_layers");
      for (int64_t i = first != nullptr && first->is_int() ? first->as_int() : layers; i < layers; ++i) {
        sliding[static_cast<size_t>(i)] = true;
      }
    }
    return sliding;
  }
  if (!types->is_array() || static_cast<int64_t>(types->size()) != layers) {
    reader.complain("layer_types", "\"layer_types\" has " + std::to_string(types->size()) + " entries, num_hidden_layers is " + std::to_string(layers));
    return sliding;
  }
  for (size_t i = 0; i < types->size(); ++i) {
    const Json& kind = types->at(i);
    if (kind == Json("sliding_attention")) {
      sliding[i] = true;
    } else if (!(kind == Json("full_attention"))) {
      reader.complain("layer_types", "\"layer_types\"[" + std::to_string(i) + "] is " + kind.dump() + ", \"full_attention\" or \"sliding_attention\" expected");
    }
  }
  return sliding;
}

double round_half_to_even(double x) {
  const double below = std::floor(x);
  const double rest = x - below;
  if (rest != 0.5) {
    return rest < 0.5 ? below : below + 1;
  }
  return std::fmod(below, 2.0) == 0 ? below : below + 1;
}

}  // namespace

const Json& text_part(const Json& config) {
  const Json* nested = config.find("text_config");
  return nested != nullptr && nested->is_object() ? *nested : config;
}

int64_t vocabulary_size(const Json& config) {
  const Json& text = text_part(config);
  for (const char* key : {"padded_vocab_size", "vocab_size"}) {
    for (const Json* place : {&text, &config}) {
      const Json* value = place->find(key);
      if (value != nullptr && value->is_int()) {
        return value->as_int();
      }
    }
  }
  return -1;
}

DraftConfig read_draft_config(const Json& config, RopeRounding rounding) {
  ConfigProblems problems;
  DraftConfig result = read_draft_config(config, rounding, problems);
  problems.finish();
  return result;
}

DraftConfig read_draft_config(const Json& config, RopeRounding rounding, ConfigProblems& problems) {
  Reader reader(config, problems);
  DraftConfig result;
  const Json* architectures = reader.present("architectures");
  if (architectures == nullptr || !architectures->is_array() || architectures->size() != 1 || !architectures->at(size_t{0}).is_string()) {
    reader.complain("architectures", "\"architectures\" must be a list of one name");
  } else {
    result.architecture = architectures->at(size_t{0}).as_string();
  }
  result.hidden_size = reader.positive("hidden_size", kMostColumns);
  result.intermediate_size = reader.positive("intermediate_size", kMostColumns);
  result.layers = reader.positive("num_hidden_layers", kMostLayers);
  result.heads = reader.positive("num_attention_heads", kMostColumns);
  result.kv_heads = reader.positive("num_key_value_heads", kMostColumns, result.heads);
  result.vocab_size = reader.positive("vocab_size", kMostTokens);
  if (reader.present("max_position_embeddings") != nullptr) {
    (void)reader.positive("max_position_embeddings", kMostPositions);
  }
  const bool knows_heads = !problems.is_bad("num_attention_heads");  // what is compared with a bad value says nothing
  if (knows_heads && !problems.is_bad("hidden_size") && reader.present("head_dim") == nullptr && result.hidden_size % result.heads != 0) {
    reader.complain("hidden_size", "\"hidden_size\" " + std::to_string(result.hidden_size) + " does not divide by " + std::to_string(result.heads) +
                    " heads and there is no \"head_dim\"");
  }
  result.head_dim = reader.positive("head_dim", kMostColumns, std::max<int64_t>(1, result.hidden_size / result.heads));
  if (knows_heads && !problems.is_bad("num_key_value_heads") && result.heads % result.kv_heads != 0) {
    problems.add("num_key_value_heads", "\"num_attention_heads\" " + std::to_string(result.heads) + " is no multiple of \"num_key_value_heads\" " +
                                            std::to_string(result.kv_heads),
                 "correct " + problems.place_of("num_key_value_heads") + " or num_attention_heads");
  }
  if (result.head_dim % 2 != 0 && (reader.present("head_dim") != nullptr || knows_heads)) {
    reader.complain("head_dim", "\"head_dim\" is " + std::to_string(result.head_dim) + "; rotary positions need an even one");
  }
  result.rms_norm_eps = reader.number("rms_norm_eps", 1e-6, /*is_positive=*/true);  // with 0 a row of zeros would have a norm that is not finite
  result.initializer_range = reader.number("initializer_range", 0.02);
  result.attention_bias = reader.boolean("attention_bias", false);
  if (reader.present("is_causal") != nullptr) {
    result.is_causal = reader.boolean("is_causal", false);
  }
  const Json* activation = reader.present("hidden_act");
  if (activation != nullptr && !(*activation == Json("silu"))) {
    reader.complain("hidden_act", "\"hidden_act\" is " + activation->dump() + ", only \"silu\" is known");
  }
  if (reader.number("attention_dropout", 0) != 0) {
    reader.complain("attention_dropout", "\"attention_dropout\" is not 0; drafts are trained without dropout");
  }
  result.sliding = layer_kinds(reader, result.layers);
  for (const bool slides : result.sliding) {
    if (slides) {
      const Json* window = reader.present("sliding_window");
      if (window == nullptr || !window->is_int() || window->as_int() < 1) {
        reader.complain("sliding_window", std::string("\"sliding_window\" is ") + (window == nullptr ? "missing" : window->dump()) +
                        ", a sliding layer needs a positive number of tokens");
      } else {
        result.sliding_window = window->as_int();
      }
      break;
    }
  }
  if (!problems.is_bad("head_dim")) {
    try {
      result.rope = rope_from_config(config, result.head_dim, rounding);
    } catch (const Error& error) {
      problems.add("rope_scaling", error.what(), error.hint());
    }
  }
  return result;
}

Json config_like_target(const Json& target, const std::string& architecture, int64_t layers) {
  const Json& text = text_part(target);
  Json config = Json::object();
  config.set("architectures", Json::array_of(std::vector<std::string>{architecture}));
  config.set("model_type", "qwen3");
  for (const char* key : {"hidden_size", "intermediate_size"}) {
    if (!text.contains(key)) {
      throw Error(ExitCode::kUsage, std::string("the target's configuration has no \"") + key + "\", so no draft configuration can be made from it",
                  "name one with model.draft_model_config");
    }
    config.set(key, text.at(key));
  }
  config.set("num_hidden_layers", layers);
  for (const char* key : {"num_attention_heads", "num_key_value_heads", "head_dim"}) {
    const Json* value = text.find(key);
    if (value != nullptr && !value->is_null()) {
      config.set(key, *value);
    }
  }
  if (!config.contains("head_dim") && config.contains("num_attention_heads")) {
    config.set("head_dim", config.at("hidden_size").as_int() / config.at("num_attention_heads").as_int());
  }
  config.set("hidden_act", "silu");
  for (const char* key : {"rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "max_position_embeddings"}) {
    const Json* value = text.find(key);
    if (value == nullptr) {
      value = target.find(key);
    }
    if (value != nullptr && !value->is_null()) {
      config.set(key, *value);
    }
  }
  config.set("vocab_size", vocabulary_size(target));
  config.set("attention_bias", false);
  config.set("attention_dropout", 0.0);
  config.set("layer_types", Json::array_of(std::vector<std::string>(static_cast<size_t>(layers), "full_attention")));
  config.set("use_sliding_window", false);
  config.set("sliding_window", Json());
  config.set("max_window_layers", layers);
  config.set("initializer_range", 0.02);
  config.set("tie_word_embeddings", false);
  return config;
}

std::vector<int64_t> default_target_layers(int64_t target_layers, int64_t layers) {
  if (layers == 1) {
    return {target_layers / 2};
  }
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < layers; ++i) {
    ids.push_back(static_cast<int64_t>(
        round_half_to_even(1 + static_cast<double>(i * (target_layers - 4)) / static_cast<double>(layers - 1))));
  }
  return ids;
}

int64_t resolve_mask_token(const MaskTokenFacts& facts) {
  const bool has_room = facts.tokenizer_tokens > 0 && facts.tokenizer_tokens < facts.vocab_size;
  int64_t id = -1;
  const char* origin = "";
  for (const auto& [candidate, name] : {std::pair<int64_t, const char*>{facts.explicit_id, "model.mask_token_id"},
                                        {facts.config_id, "dflash_config.mask_token_id"},
                                        {facts.tokenizer_mask_id, "the tokenizer's mask token"},
                                        {has_room ? facts.tokenizer_tokens : -1, "the first id after the tokenizer's"},
                                        {facts.pad_id, "the pad token"},
                                        {facts.eos_id, "the end token"},
                                        {facts.unk_id, "the unknown token"}}) {
    if (candidate >= 0) {
      id = candidate;
      origin = name;
      break;
    }
  }
  if (id < 0) {
    throw Error(ExitCode::kUsage, "no mask token: neither recipe, draft configuration, tokenizer nor target configuration names one",
                "set model.mask_token_id to a token that conversations do not contain");
  }
  if (id >= facts.vocab_size) {
    throw Error(ExitCode::kUsage, "the mask token " + std::to_string(id) + " (" + origin + ") lies outside the target's embedding of " +
                                      std::to_string(facts.vocab_size) + " tokens",
                "set model.mask_token_id to an id below that");
  }
  return id;
}

int64_t token_id(const Json& config, const char* key) {
  const Json* value = config.find(key);
  if (value == nullptr || value->is_null() || (value->is_array() && value->size() == 0)) {
    return -1;
  }
  const Json& first = value->is_array() ? value->at(size_t{0}) : *value;
  if (!first.is_int() || first.as_int() < -1) {
    throw Error(ExitCode::kData, std::string("the target's config.json has ") + key + " = " + value->dump() + ", the id of a token or a list of them expected",
                "download the target's config.json again");
  }
  return first.as_int();
}

}  // namespace sf::draft
