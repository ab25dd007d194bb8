#include "sdk/draft/rope.hpp"

#include "sf/error.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numbers>
#include <optional>

namespace sf::draft {

namespace {

constexpr double kThetaDefault = 10000;

[[noreturn]] void refuse(const std::string& what, const std::string& hint = "") {
  throw Error(ExitCode::kData, "rope: " + what, hint);
}

const Json* present(const Json* object, std::string_view key) {
  if (object == nullptr) return nullptr;
  const Json* value = object->find(key);
  return value == nullptr || value->is_null() ? nullptr : value;
}

double number(const Json& value, const std::string& key) {
  if (!value.is_number()) refuse("\"" + key + "\" is " + value.kind_name() + ", a number expected");
  return value.as_double();
}

// The places of one configuration that may speak about rope, the more specific first.
struct Places {
  std::vector<const Json*> tables;  // rope_parameters, rope_scaling
  std::vector<const Json*> tops;    // the configuration, its text_config

  // "rope_type", or "type" as older configurations spell it, in any table: all that are there say the same.
  [[nodiscard]] std::optional<std::string> type() const {
    std::optional<std::string> found;
    std::string found_key;
    for (const char* key : {"rope_type", "type"}) {
      for (const Json* table : tables) {
        const Json* value = present(table, key);
        if (value == nullptr) continue;
        if (!value->is_string())
          refuse("\"" + std::string(key) + "\" is " + value->kind_name() + ", a string expected");
        // Text alone has the same position on all three axes of a multimodal rope, which is then the default one.
        const std::string name = *value == Json("mrope") ? "default" : value->as_string();
        if (found && *found != name) {
          refuse("the configuration gives two types, \"" + found_key + "\" = \"" + *found + "\" and \"" + key + "\" = \"" + name + "\"",
                 "keep the one that the model was trained with");
        }
        if (!found) found_key = key;
        found = name;
      }
    }
    return found;
  }
  // The value of `key` in the tables, or nothing. Two tables that differ are an error.
  [[nodiscard]] const Json* in_tables(std::string_view key) const { return agreed(tables, key); }
  [[nodiscard]] const Json* anywhere(std::string_view key) const {
    std::vector<const Json*> all = tables;
    all.insert(all.end(), tops.begin(), tops.end());
    return agreed(all, key);
  }

 private:
  static const Json* agreed(const std::vector<const Json*>& objects, std::string_view key) {
    const Json* found = nullptr;
    for (const Json* object : objects) {
      const Json* value = present(object, key);
      if (value == nullptr) continue;
      const bool same =
          found == nullptr || *found == *value ||
          (found->is_number() && value->is_number() && found->as_double() == value->as_double());
      if (!same) {
        refuse("the configuration gives two values for \"" + std::string(key) + "\", " + found->dump() +
                   " and " + value->dump(),
               "keep the one that the model was trained with");
      }
      if (found == nullptr) found = value;
    }
    return found;
  }
};

Places places_of(const Json& config) {
  Places places;
  const Json* text = present(&config, "text_config");
  // A nested text model speaks for itself; what stands above it belongs to the whole and counts where the
  // text is silent.
  for (const Json* top : {text, &config}) {
    if (top == nullptr) continue;
    places.tops.push_back(top);
    for (const char* key : {"rope_parameters", "rope_scaling"}) {
      const Json* table = present(top, key);
      if (table == nullptr) continue;
      if (!table->is_object())
        refuse("\"" + std::string(key) + "\" is " + table->kind_name() + ", an object expected");
      for (const auto& [name, value] : table->entries()) {
        if (value.is_object()) {
          refuse("\"" + std::string(key) + "\" has a rope of its own for \"" + name +
                 "\"; one rope for all layers is understood");
        }
      }
      places.tables.push_back(table);
    }
  }
  return places;
}

float rounded_to_bfloat16(float value) {
  auto bits = std::bit_cast<uint32_t>(value);
  bits += 0x7fff + ((bits >> 16) & 1);  // to nearest, ties to even
  return std::bit_cast<float>(bits & 0xffff0000u);
}

double required(const Places& places, const std::string& key, const std::string& type) {
  const Json* value = places.anywhere(key);
  if (value == nullptr)
    refuse("type \"" + type + "\" needs \"" + key + "\", which the configuration does not have");
  return number(*value, key);
}

double optional(const Places& places, const std::string& key, double otherwise) {
  const Json* value = places.in_tables(key);
  return value == nullptr ? otherwise : number(*value, key);
}

// Llama 3.1: long waves are stretched by `factor`, short ones stay, those between are blended.
void stretch_llama3(std::vector<double>& frequencies, const Places& places) {
  const double factor = required(places, "factor", "llama3");
  const double low = required(places, "low_freq_factor", "llama3");
  const double high = required(places, "high_freq_factor", "llama3");
  const double original = required(places, "original_max_position_embeddings", "llama3");
  if (!(factor > 0) || !(high > low) || !(low > 0))
    refuse("llama3 needs factor > 0 and high_freq_factor > low_freq_factor > 0");
  for (double& frequency : frequencies) {
    const double wave = 2 * std::numbers::pi / frequency;
    if (wave > original / low) {
      frequency /= factor;
    } else if (wave > original / high) {
      const double blend = (original / wave - low) / (high - low);
      frequency = (1 - blend) * frequency / factor + blend * frequency;
    }
  }
}

// YaRN (arXiv 2309.00071): values that turn often within the original length stay, those that turn rarely are
// stretched, a linear ramp between; and a factor on cos and sin.
double stretch_yarn(std::vector<double>& frequencies, const Places& places, double theta,
                    int64_t rotary_dim) {
  const double factor = required(places, "factor", "yarn");
  if (!(factor > 0)) refuse("yarn needs factor > 0");
  const double original = places.anywhere("original_max_position_embeddings") != nullptr
                              ? required(places, "original_max_position_embeddings", "yarn")
                              : required(places, "max_position_embeddings", "yarn");
  const double beta_fast = optional(places, "beta_fast", 32);
  const double beta_slow = optional(places, "beta_slow", 1);
  const Json* truncate = places.in_tables("truncate");
  const auto dim = static_cast<double>(rotary_dim);
  const auto place = [&](double rotations) {
    return dim * std::log(original / (rotations * 2 * std::numbers::pi)) / (2 * std::log(theta));
  };
  double low = place(beta_fast);
  double high = place(beta_slow);
  if (truncate == nullptr || truncate->as_bool()) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, dim - 1);
  if (low == high) high += 0.001;  // no division by zero, a step instead of a ramp
  for (size_t m = 0; m < frequencies.size(); ++m) {
    const double ramp = std::clamp((static_cast<double>(m) - low) / (high - low), 0.0, 1.0);
    frequencies[m] = frequencies[m] * (1 - ramp) + frequencies[m] / factor * ramp;
  }
  if (const Json* given = places.in_tables("attention_factor")) return number(*given, "attention_factor");
  const auto magnitude = [&](double scale) { return factor <= 1 ? 1.0 : 0.1 * scale * std::log(factor) + 1; };
  const double mscale = optional(places, "mscale", 0);
  const double mscale_all_dim = optional(places, "mscale_all_dim", 0);
  if (mscale != 0 && mscale_all_dim != 0) return magnitude(mscale) / magnitude(mscale_all_dim);
  return magnitude(1);
}

}  // namespace

Rope rope_from_config(const Json& config, int64_t head_dim, RopeRounding rounding) {
  const Places places = places_of(config);
  Rope rope;
  rope.head_dim = head_dim;
  if (const Json* theta = places.anywhere("rope_theta"))
    rope.theta = number(*theta, "rope_theta");
  else
    rope.theta = kThetaDefault;
  if (!(rope.theta > 1)) refuse("rope_theta is " + std::to_string(rope.theta) + ", more than 1 expected");

  if (const std::optional<std::string> type = places.type()) {
    rope.type = *type;
  } else if (places.in_tables("factor") != nullptr) {
    refuse("the configuration gives a factor, but no \"rope_type\"");
  }
  double partial = 1;
  if (const Json* given = places.anywhere("partial_rotary_factor"))
    partial = number(*given, "partial_rotary_factor");
  if (!(partial > 0) || partial > 1)
    refuse("partial_rotary_factor is " + std::to_string(partial) + ", 0 to 1 expected");
  rope.rotary_dim = static_cast<int64_t>(static_cast<double>(head_dim) * partial);
  if (rope.rotary_dim < 2 || rope.rotary_dim % 2 != 0) {
    refuse(std::to_string(rope.rotary_dim) + " of " + std::to_string(head_dim) +
           " values of a head would turn, an even number expected");
  }

  std::vector<double> frequencies(static_cast<size_t>(rope.rotary_dim / 2));
  for (size_t m = 0; m < frequencies.size(); ++m) {
    frequencies[m] =
        std::pow(rope.theta, -2.0 * static_cast<double>(m) / static_cast<double>(rope.rotary_dim));
  }
  if (rope.type == "linear") {
    const double factor = required(places, "factor", "linear");
    if (!(factor > 0)) refuse("linear needs factor > 0");
    for (double& frequency : frequencies) frequency /= factor;
  } else if (rope.type == "llama3") {
    stretch_llama3(frequencies, places);
  } else if (rope.type == "yarn") {
    rope.attention_scaling = stretch_yarn(frequencies, places, rope.theta, rope.rotary_dim);
  } else if (rope.type == "dynamic") {
    refuse("type \"dynamic\" follows the length of each text in Hugging Face's code, and is a fixed table for the "
           "stretched length in SGLang and vLLM: what is trained with one serves badly with the other",
           "name the rope that training and serving share: \"default\" is what dynamic is up to "
           "max_position_embeddings; linear, llama3 and yarn are the same everywhere");
  } else if (rope.type != "default") {
    refuse("type \"" + rope.type + "\" is not known", "default, linear, llama3 and yarn are understood");
  }
  for (const double frequency : frequencies) {
    const auto value = static_cast<float>(frequency);
    rope.inverse_frequencies.push_back(rounding == RopeRounding::kReference ? rounded_to_bfloat16(value)
                                                                            : value);
  }
  return rope;
}

}  // namespace sf::draft
