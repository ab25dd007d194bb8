#include "core/data/target_config.hpp"

#include "core/base/error.hpp"
#include "core/base/file.hpp"

#include <optional>

namespace sf {

namespace {

constexpr int64_t kLargest = (int64_t{1} << 31) - 1;  // of any size, so that products of two of them are numbers

// Keys of one configuration: the text model's own first, then what stands above it.
class Keys {
 public:
  Keys(const Json& config, const std::string& source) : source_(source) {
    if (!config.is_object())
      throw Error(ExitCode::kData, format("{}: an object expected, found {}", source, config.kind_name()));
    const Json* text = config.find("text_config");
    if (text != nullptr && text->is_object()) places_.push_back(text);
    places_.push_back(&config);
  }

  [[nodiscard]] const Json* find(std::string_view key) const {
    for (const Json* place : places_) {
      const Json* value = place->find(key);
      if (value != nullptr && !value->is_null()) return value;
    }
    return nullptr;
  }
  [[nodiscard]] std::optional<int64_t> positive(std::string_view key) const {
    const Json* value = find(key);
    if (value == nullptr) return std::nullopt;
    const int64_t number = read<int64_t>(key, *value, [](const Json& json) { return json.as_int(); });
    if (number <= 0)
      throw Error(ExitCode::kData,
                  format("{}: \"{}\" is {}, a positive number expected", source_, key, number));
    if (number > kLargest)
      throw Error(ExitCode::kData, format("{}: \"{}\" is {}, at most {} expected", source_, key, number, kLargest));
    return number;
  }
  [[nodiscard]] int64_t required(std::string_view key) const {
    const std::optional<int64_t> number = positive(key);
    if (!number) throw Error(ExitCode::kData, format("{}: there is no \"{}\"", source_, key));
    return *number;
  }
  [[nodiscard]] bool flag(std::string_view key, bool otherwise) const {
    const Json* value = find(key);
    return value == nullptr ? otherwise
                            : read<bool>(key, *value, [](const Json& json) { return json.as_bool(); });
  }
  [[nodiscard]] double number(std::string_view key, double otherwise) const {
    const Json* value = find(key);
    return value == nullptr ? otherwise
                            : read<double>(key, *value, [](const Json& json) { return json.as_double(); });
  }
  [[nodiscard]] std::string text(std::string_view key, const std::string& otherwise) const {
    const Json* value = find(key);
    return value == nullptr
               ? otherwise
               : read<std::string>(key, *value, [](const Json& json) { return json.as_string(); });
  }

 private:
  template <class T>
  T read(std::string_view key, const Json& value, T (*convert)(const Json&)) const {
    try {
      return convert(value);
    } catch (const JsonError& error) {
      throw Error(ExitCode::kData, format("{}: \"{}\": {}", source_, key, error.what()));
    }
  }

  const std::string& source_;
  std::vector<const Json*> places_;
};

}  // namespace

Json read_model_config(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / "config.json";
  if (!std::filesystem::is_regular_file(path)) {
    throw Error(ExitCode::kData, format("{}: there is no config.json", folder),
                "name a Hugging Face model folder (config.json and *.safetensors)");
  }
  try {
    return Json::parse(read_file(path), path.string());
  } catch (const JsonError& error) {
    throw Error(ExitCode::kData, error.what());
  }
}

TargetConfig target_config(const Json& config, const std::string& source, draft::RopeRounding rounding) {
  const Keys keys(config, source);
  TargetConfig facts;
  facts.model_type = keys.text("model_type", "");
  facts.hidden_size = keys.required("hidden_size");
  facts.num_hidden_layers = keys.required("num_hidden_layers");
  facts.num_attention_heads = keys.required("num_attention_heads");
  facts.num_key_value_heads = keys.positive("num_key_value_heads").value_or(facts.num_attention_heads);
  facts.vocab_size = keys.positive("padded_vocab_size").value_or(0);
  if (facts.vocab_size == 0) facts.vocab_size = keys.required("vocab_size");
  facts.intermediate_size = keys.positive("intermediate_size").value_or(0);
  facts.max_position_embeddings = keys.positive("max_position_embeddings").value_or(0);
  if (const std::optional<int64_t> head_dim = keys.positive("head_dim")) {
    facts.head_dim = *head_dim;
  } else if (facts.hidden_size % facts.num_attention_heads == 0) {
    facts.head_dim = facts.hidden_size / facts.num_attention_heads;
  } else {
    throw Error(ExitCode::kData,
                format("{}: there is no \"head_dim\", and {} heads do not divide hidden_size {}", source,
                       facts.num_attention_heads, facts.hidden_size));
  }
  if (facts.num_attention_heads % facts.num_key_value_heads != 0) {
    throw Error(ExitCode::kData, format("{}: {} attention heads can't share {} key-value heads", source,
                                        facts.num_attention_heads, facts.num_key_value_heads));
  }
  facts.rms_norm_eps = keys.number("rms_norm_eps", 1e-6);
  const bool attention_bias = keys.flag("attention_bias", false);
  facts.qkv_bias =
      attention_bias || facts.model_type == "qwen2";  // Qwen2 has them always and does not say so
  facts.output_bias = attention_bias && facts.model_type != "qwen2";
  facts.mlp_bias = keys.flag("mlp_bias", false) && facts.model_type == "llama";
  facts.query_key_norm = facts.model_type == "qwen3";
  facts.tied_embeddings = keys.flag("tie_word_embeddings", false);
  facts.dtype = keys.text("dtype", keys.text("torch_dtype", "float32"));
  facts.logits_width_multiplier = keys.number("logits_mup_width_multiplier", 0);
  if (facts.tied_embeddings && facts.logits_width_multiplier != 0) {
    throw Error(ExitCode::kData,
                format("{}: logits_mup_width_multiplier with tied embeddings is not defined", source));
  }
  try {
    facts.rope = draft::rope_from_config(config, facts.head_dim, rounding);
  } catch (const Error& error) {
    throw error.within(source);
  }
  return facts;
}

std::string why_not_runnable(const Json& config, const TargetConfig& facts) {
  const Keys keys(config, "config.json");
  if (facts.model_type != "llama" && facts.model_type != "qwen2" && facts.model_type != "qwen3") {
    return format("model_type \"{}\" is not among llama, qwen2, qwen3", facts.model_type);
  }
  if (const std::string act = keys.text("hidden_act", "silu"); act != "silu") {
    return format("hidden_act \"{}\" is not silu", act);
  }
  if (facts.intermediate_size == 0) return "there is no \"intermediate_size\"";
  if (keys.flag("use_sliding_window", false)) return "it has sliding-window layers (use_sliding_window)";
  if (const Json* types = keys.find("layer_types"); types != nullptr && types->is_array()) {
    for (const Json& type : types->items()) {
      if (!type.is_string() || type.as_string() != "full_attention")
        return format("it has layers of type {}", type.dump());
    }
  }
  if (keys.find("quantization_config") != nullptr) return "its weights are quantized (quantization_config)";
  return "";
}

}  // namespace sf
