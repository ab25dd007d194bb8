#include "core/doctor/target_facts.hpp"

#include "core/base/error.hpp"
#include "core/base/file.hpp"
#include "core/data/target_config.hpp"
#include "core/data/tokenizer_facts.hpp"

#include <algorithm>
#include <utility>

namespace sf {

namespace {

// Where in config.json a key stands, looked for as target_config does: the text model's own first.
std::string place_of(const Json& config, const std::vector<std::string>& paths) {
  for (const char* prefix : {"text_config", ""}) {
    const Json* start = *prefix != 0 ? config.find(prefix) : &config;
    if (start == nullptr) continue;
    for (const std::string& path : paths) {
      const Json* at = start;
      for (const std::string& part : split(path, '.')) at = at == nullptr ? nullptr : at->find(part);
      if (at != nullptr && !at->is_null()) return format("config.json: {}{}{}", prefix, *prefix != 0 ? "." : "", path);
    }
  }
  return "";
}

std::string or_else(const std::string& place, const char* otherwise) {
  return place.empty() ? otherwise : place;
}

std::string rope_text(const draft::Rope& rope) {
  std::string text = rope.type;
  if (rope.attention_scaling != 1) text += format(", attention factor {}", rope.attention_scaling);
  return text;
}

void add_vocabulary(const TargetFactsRequest& request, const Json& json, const TargetConfig& config, std::vector<InheritedFact>& facts) {
  const TokenizerFacts tokenizer = read_tokenizer_facts(request.folder);
  InheritedFact rows{"vocabulary", format("{} rows", config.vocab_size), or_else(place_of(json, {"padded_vocab_size", "vocab_size"}), "config.json"), ""};
  facts.push_back(std::move(rows));
  InheritedFact padding{"vocabulary padding", "unknown", "no tokenizer.json", ""};
  if (tokenizer.tokens >= 0) {
    padding.value = format("{} rows beyond the tokenizer's {} tokens", config.vocab_size - tokenizer.tokens, tokenizer.tokens);
    padding.origin = "tokenizer.json: largest id + 1";
    if (tokenizer.tokens > config.vocab_size) {
      padding.value = format("the tokenizer has {} tokens more than the target has rows", tokenizer.tokens - config.vocab_size);
      padding.doubt = "the tokenizer is another model's: its ids reach beyond the embedding";
    }
  }
  facts.push_back(std::move(padding));

  InheritedFact mask{"mask token", "", "", ""};
  int64_t id = request.mask_token_id;
  if (id >= 0) {
    mask.origin = "recipe: model.mask_token_id";
  } else if (!request.draft_config.empty()) {
    const Json draft = Json::parse(read_file(request.draft_config), request.draft_config.string());
    const Json* inner = draft.find("dflash_config");
    for (const Json* place : {inner, &draft}) {
      const Json* found = place == nullptr ? nullptr : place->find("mask_token_id");
      if (id < 0 && found != nullptr && found->is_int()) {
        id = found->as_int();
        mask.origin = format("{}: mask_token_id", request.draft_config.filename());
      }
    }
  }
  if (id < 0 && tokenizer.mask_token_id >= 0) {
    id = tokenizer.mask_token_id;
    mask.origin = "tokenizer_config.json: mask_token";
  }
  if (id < 0 && tokenizer.tokens >= 0 && tokenizer.tokens < config.vocab_size) {
    id = tokenizer.tokens;
    mask.origin = "nobody names one: the first id after the tokenizer's";
  }
  const Json* text = json.find("text_config");
  for (const char* key : {"pad_token_id", "eos_token_id", "unk_token_id"}) {  // as a draft's configuration is resolved
    const Json* found = (text != nullptr && text->is_object() ? *text : json).find(key);
    if (found != nullptr && found->is_array() && found->size() > 0) found = &found->at(size_t{0});
    if (id < 0 && found != nullptr && found->is_int() && found->as_int() >= 0) {
      id = found->as_int();
      mask.origin = format("nobody names one: config.json: {}", key);
      mask.doubt = "conversations may contain it, and a draft does not tell it from a place to be drafted: set model.mask_token_id to a token that they do not contain";
    }
  }
  if (id < 0) {
    mask.value = "none";
    mask.origin = "not in the recipe, the draft's configuration, the tokenizer or config.json";
    mask.doubt = "block drafts (DFlash, DSpark) need one: set model.mask_token_id to a token that conversations do not contain";
  } else {
    mask.value = std::to_string(id);
    if (id >= config.vocab_size) {
      mask.doubt = format("the target has the tokens 0 to {}", config.vocab_size - 1);
    } else if (tokenizer.tokens >= 0 && id >= tokenizer.tokens) {
      mask.value += " (a padding row)";
    }
  }
  facts.push_back(std::move(mask));
}

void add_tables(const TargetFactsRequest& request, const Json& json, const TargetConfig& config, std::vector<InheritedFact>& facts) {
  const WeightFolder weights = WeightFolder::open(request.folder);
  const TargetTableViews tables = find_target_tables(weights, config, request.keys);
  const TensorView* own_head = weights.find_in_decoder(request.keys.head);
  InheritedFact tied{"tied embeddings", config.tied_embeddings ? "yes" : "no", or_else(place_of(json, {"tie_word_embeddings"}), "config.json does not say: no"), ""};
  if (config.tied_embeddings && own_head != nullptr && tables.embedding != nullptr && own_head->bytes.size() == tables.embedding->bytes.size() &&
      !std::equal(own_head->bytes.begin(), own_head->bytes.end(), tables.embedding->bytes.begin())) {
    tied.doubt = format("the weights have a '{}' of their own that differs from the embedding; the embedding is taken", own_head->name);
  }
  facts.push_back(std::move(tied));
  for (const auto& [name, table] : {std::pair{"embedding", tables.embedding}, std::pair{"output head", tables.head}}) {
    if (table != nullptr) facts.push_back({name, format("{} {}", dtype_name(table->dtype), table->shape), format("weights: {}", table->name), ""});
  }
  const TensorView* norm = weights.find_in_decoder("model.norm.weight");
  facts.push_back({"final norm", norm != nullptr ? format("{} {}", dtype_name(norm->dtype), norm->shape) : "missing", norm != nullptr ? format("weights: {}", norm->name) : "weights",
                   norm != nullptr ? "" : "the last state that a draft reads is behind this norm"});
  check_layer_count(weights, config);
  facts.push_back({"fingerprint", target_fingerprint(json, weights).substr(0, 16), "config.json and a sample of every tensor", ""});
}

}  // namespace

std::vector<InheritedFact> inherited_facts(const TargetFactsRequest& request) {
  const Json json = read_model_config(request.folder);
  const TargetConfig config = target_config(json, (request.folder / "config.json").string());
  std::vector<InheritedFact> facts;
  const auto add = [&](const char* name, const std::string& value, const std::vector<std::string>& paths, const char* otherwise) -> InheritedFact& {
    return facts.emplace_back(InheritedFact{name, value, or_else(place_of(json, paths), otherwise), ""});
  };
  add("model type", config.model_type, {"model_type"}, "config.json does not say");
  add("hidden size", std::to_string(config.hidden_size), {"hidden_size"}, "config.json");
  add("layers", std::to_string(config.num_hidden_layers), {"num_hidden_layers"}, "config.json");
  add("attention heads", format("{}, sharing {} keys and values", config.num_attention_heads, config.num_key_value_heads), {"num_key_value_heads", "num_attention_heads"}, "config.json");
  InheritedFact& head_dim = add("head_dim", std::to_string(config.head_dim), {"head_dim"}, "hidden_size / num_attention_heads");
  if (config.head_dim * config.num_attention_heads != config.hidden_size) {
    head_dim.value += format(" (not hidden_size / heads = {})", config.hidden_size / config.num_attention_heads);
  }
  add("intermediate size", std::to_string(config.intermediate_size), {"intermediate_size"}, "config.json does not say");
  add("norm epsilon", format("{}", config.rms_norm_eps), {"rms_norm_eps"}, "default of the format, config.json does not say");
  InheritedFact& theta = add("rope theta", format("{}", config.rope.theta), {"rope_parameters.rope_theta", "rope_theta", "rope_scaling.rope_theta"}, "default of the format, config.json does not say");
  if (place_of(json, {"rope_parameters.rope_theta", "rope_theta", "rope_scaling.rope_theta"}).empty()) {
    theta.doubt = "no configuration of a released model leaves theta out; is config.json whole?";
  }
  add("rope type", rope_text(config.rope), {"rope_parameters.rope_type", "rope_scaling.rope_type", "rope_scaling.type"}, "default of the format, config.json does not say");
  add("rotary part", format("{} of {} values of a head", config.rope.rotary_dim, config.rope.head_dim), {"rope_parameters.partial_rotary_factor", "partial_rotary_factor", "rotary_dim"}, "the whole head, config.json does not say");
  add("longest context", std::to_string(config.max_position_embeddings), {"max_position_embeddings"}, "config.json does not say");
  add("attention biases", format("q, k, v: {}; output: {}", config.qkv_bias ? "yes" : "no", config.output_bias ? "yes" : "no"), {"attention_bias"}, "the model type's way");
  add("query and key norms", config.query_key_norm ? "yes" : "no", {}, "the model type's way");
  add("type of the weights", config.dtype, {"dtype", "torch_dtype"}, "config.json does not say");
  add_vocabulary(request, json, config, facts);
  add_tables(request, json, config, facts);
  if (!request.layer_ids.empty()) {
    InheritedFact layers{"captured layers", format("{}", request.layer_ids), "recipe: model.target_layer_ids", ""};
    for (const int64_t id : request.layer_ids) {
      if (id < 0 || id >= config.num_hidden_layers) layers.doubt = format("the target has the layers 0 to {}", config.num_hidden_layers - 1);
    }
    facts.push_back(std::move(layers));
  }
  const std::string reason = why_not_runnable(json, config);
  facts.push_back({"capture", reason.empty() ? "can run it" : "can't run it", "this build", reason.empty() ? "" : format("{}; features must come from elsewhere", reason)});
  return facts;
}

std::string facts_table(const std::vector<InheritedFact>& facts) {
  std::size_t name_width = 0;
  std::size_t value_width = 0;
  for (const InheritedFact& fact : facts) {
    name_width = std::max(name_width, fact.name.size());
    value_width = std::max(value_width, std::min<std::size_t>(fact.value.size(), 48));
  }
  std::string out;
  const auto padded = [](std::string text, std::size_t width) {
    text.resize(std::max(text.size(), width), ' ');
    return text;
  };
  for (const InheritedFact& fact : facts) {
    out += format("{}  {}  {}\n", padded(fact.name, name_width), padded(fact.value, value_width), fact.origin);
    if (!fact.doubt.empty()) out += format("{}  look: {}\n", std::string(name_width, ' '), fact.doubt);
  }
  return out;
}

}  // namespace sf
