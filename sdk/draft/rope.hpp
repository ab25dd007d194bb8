// sdk/draft/rope.hpp
//
// Rotary embedding as a Hugging Face config.json describes it, for targets and drafts. In: the configuration.
// Out: inverse frequencies and the factor of cos and sin. theta and the type are looked for wherever
// configurations put them, in both spellings (`rope_theta` with `rope_scaling`; `rope_parameters`), at the
// top or inside `text_config`. A configuration that says two different things, or a type that is not known,
// is an error: a wrong rope trains without complaint and serves badly. So is "dynamic", which engines and
// Hugging Face's code compute differently.
//
// No LibTorch. Formulas: spec of each type as in the papers "RoFormer", "YaRN" and the Llama 3.1 release.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sf/json.hpp"

namespace sf::draft {

enum class RopeRounding {
  kExact,     // frequencies in float32, as serving engines use them
  kReference  // frequencies rounded to bfloat16, as a model cast of the reference trainer leaves them
};

struct Rope {
  std::string type = "default";  // default, linear, llama3, yarn
  double theta = 10000;
  int64_t head_dim = 0;
  int64_t rotary_dim = 0;  // the first rotary_dim values of a head turn, the rest pass; even
  /// [rotary_dim / 2] value m turns by position * inverse_frequencies[m]; it is paired with value m +
  /// rotary_dim / 2.
  std::vector<float> inverse_frequencies;
  /// Both cos and sin are multiplied by it (YaRN's attention factor), so query-key products by its square.
  double attention_scaling = 1;
};

/// `head_dim` is the size of one head. Throws sf::Error (data) with the key, what was found and what is
/// understood.
[[nodiscard]] Rope rope_from_config(const Json& config, int64_t head_dim,
                                    RopeRounding rounding = RopeRounding::kExact);

}  // namespace sf::draft
