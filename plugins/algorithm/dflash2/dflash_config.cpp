#include "plugins/algorithm/dflash2/dflash_config.hpp"

#include "sf/json.hpp"

#include <optional>
#include <utility>

namespace sf {
namespace {

constexpr const char* kInnerKeys[] = {"block_size",    "target_layer_ids", "mask_token_id",     "conv_kernel_size",       "conv_group_size",
                                      "selector_rank", "selector_top_k",   "output_multiplier", "final_logit_softcapping"};

// The rules of plugin.toml judge options without the configuration; what only a selector reads is judged here.
void check_selector_options(const DflashOptions& options, draft::ConfigProblems& problems) {
  const DflashOptions unset;
  for (const auto& [is_set, key] : {std::pair<bool, const char*>{options.selector_loss_alpha != unset.selector_loss_alpha, "training.dflash2_selector_loss_alpha"},
                                    {options.selector_warmup_ratio != unset.selector_warmup_ratio, "training.dflash2_selector_warmup_ratio"},
                                    {options.selector_ramp_ratio != unset.selector_ramp_ratio, "training.dflash2_selector_ramp_ratio"},
                                    {options.selector_stop_gradient != unset.selector_stop_gradient, "training.dflash2_selector_stop_gradient"},
                                    {options.insert_gold != unset.insert_gold, "algorithm.selector_policy"}}) {
    if (is_set) {
      problems.add("architectures", std::string(key) + " is set, but the draft's configuration is of " + kDflashArchitecture + ", which has no selector",
                   std::string("leave ") + key + " out, or name a configuration of " + kDflash2Architecture);
    }
  }
}

// A configuration in the target's shape with the architecture that the options ask for.
Json made_config(const Json& target, int64_t layers, const DflashOptions& options) {
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

// The keys that DFlash2 alone has.
void read_dflash2_keys(const Json* inner, const ModelFacts& facts, DflashConfig& config, draft::ConfigProblems& problems) {
  // Where a number came from, and so where it is corrected.
  const auto place = [&](const std::string& key) {
    return facts.draft_config_json.empty() ? "plugin.dflash2." + key : problems.place_of("dflash_config." + key);
  };
  const auto is_whole = [&](const char* key, int64_t most, int64_t& value) {
    return problems.attempt(key, [&] {
      const std::optional<int64_t> found = draft::integer_at(inner, key, "dflash_config.");
      if (!found) {
        draft::refuse_config(std::string("dflash_config.") + key + " is missing; DFlash2 needs it", "add it to the draft's configuration");
      }
      if (*found > most) {  // as the option of the same name
        draft::refuse_config(std::string("dflash_config.") + key + " is " + std::to_string(*found) + ", at most " + std::to_string(most) + " expected",
                             "correct " + place(key));
      }
      value = *found;
    });
  };
  const int64_t h = config.layers.hidden_size;
  if (is_whole("conv_kernel_size", 64, config.conv_taps) && !problems.is_bad("block_size") &&
      (config.conv_taps < 1 || config.conv_taps > config.block_size)) {
    problems.add("conv_kernel_size",
                 "conv_kernel_size is " + std::to_string(config.conv_taps) + ", 1 to block_size (" + std::to_string(config.block_size) + ") expected",
                 "correct " + place("conv_kernel_size"));
  }
  if (is_whole("conv_group_size", 65536, config.conv_group_size) && !problems.is_bad("hidden_size") &&
      (config.conv_group_size < 1 || h % config.conv_group_size != 0)) {
    problems.add("conv_group_size", "conv_group_size " + std::to_string(config.conv_group_size) + " does not divide hidden_size " + std::to_string(h),
                 "choose a divisor of " + std::to_string(h) + " for " + place("conv_group_size"));
  }
  if (is_whole("selector_rank", 65536, config.selector_rank) && config.selector_rank < 1) {
    problems.add("selector_rank", "selector_rank is " + std::to_string(config.selector_rank) + ", at least 1 expected", "correct " + place("selector_rank"));
  }
  if (is_whole("selector_top_k", 1024, config.selector_top_k) && !problems.is_bad("vocab_size") &&
      (config.selector_top_k < 1 || config.selector_top_k > config.layers.vocab_size)) {
    problems.add("selector_top_k",
                 "selector_top_k is " + std::to_string(config.selector_top_k) + ", 1 to the vocabulary's " +
                     std::to_string(config.layers.vocab_size) + " expected",
                 "correct " + place("selector_top_k"));
  }
  problems.attempt("output_multiplier", [&] { config.output_multiplier = draft::number_at(inner, "output_multiplier", "dflash_config.", 1); });
  problems.attempt("final_logit_softcapping",
                   [&] { config.final_logit_softcapping = draft::number_at(inner, "final_logit_softcapping", "dflash_config.", 0); });
  if (!(config.output_multiplier > 0) || config.final_logit_softcapping < 0) {
    problems.add("output_multiplier", "output_multiplier and final_logit_softcapping have to be positive", "correct dflash_config");
  }
}

}  // namespace

DflashConfig resolve_dflash_config(const ModelFacts& facts, const DflashOptions& options) {
  draft::BlockTexts texts = draft::read_block_texts(facts, [&](const Json& target, int64_t layers) { return made_config(target, layers, options); });
  draft::ConfigProblems problems(facts.draft_config_path);
  DflashConfig config;
  static_cast<draft::BlockConfig&>(config) = draft::resolve_block_config(
      facts, texts, {.architectures = {kDflashArchitecture, kDflash2Architecture}, .inner_keys = kInnerKeys}, problems);
  config.dflash2 = config.layers.architecture == kDflash2Architecture;
  if (!config.dflash2 && !facts.draft_config_json.empty() && !problems.is_bad("architectures")) {
    check_selector_options(options, problems);
  }
  if (config.dflash2 && !problems.is_bad(draft::kBlockConfig)) {
    read_dflash2_keys(texts.inner(), facts, config, problems);
  }
  problems.finish();
  draft::write_block_config(texts.draft, config, facts, texts.target);
  config.json = texts.draft.dump(2);
  return config;
}

std::vector<std::string> required_config_keys(const DflashConfig& config) {
  std::vector<std::string> keys = draft::block_config_keys();
  if (config.dflash2) {
    for (const char* key : {"conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"}) {
      keys.push_back(std::string("dflash_config.") + key);
    }
  }
  return keys;
}

}  // namespace sf
