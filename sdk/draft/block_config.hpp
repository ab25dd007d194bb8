// sdk/draft/block_config.hpp: the configuration that drafts of whole blocks share (DFlash, DFlash2, DSpark): layers, block size, the target layers that
// are read, the mask token, and where each of them stands in a config.json. No LibTorch calls.
//
// An algorithm calls, in this order: read_block_texts · resolve_block_config · its own keys and checks · problems.finish · write_block_config.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "sdk/draft/config_problems.hpp"
#include "sdk/draft/draft_config.hpp"
#include "sf/algorithm.hpp"
#include "sf/json.hpp"

namespace sf::draft {

inline constexpr const char* kBlockConfig = "dflash_config";  // the object inside a config.json that block drafts keep their own keys in

struct BlockConfig {
  DraftConfig layers;
  int64_t block_size = 0;                 // rows of a block
  std::vector<int64_t> target_layer_ids;  // ascending
  int64_t mask_token_id = -1;
  int64_t target_layers = -1;             // how many the target has; -1: not known
};

/// Throws sf::Error (usage).
[[noreturn]] void refuse_config(const std::string& what, const std::string& fix);

/// The two configurations as they stand, the number of layers that the recipe says put in.
struct BlockTexts {
  Json target;  // null when there is none
  Json draft;   // an object
  [[nodiscard]] const Json* inner() const { return draft.find(kBlockConfig); }
};

/// Reads both; without a draft configuration `make` gets the target's and the number of layers, and makes one.
[[nodiscard]] BlockTexts read_block_texts(const ModelFacts& facts, const std::function<Json(const Json& target, int64_t layers)>& make);

struct BlockConfigRules {
  std::vector<std::string> architectures;    // that the algorithm trains
  std::span<const char* const> inner_keys;   // known in dflash_config; another one is refused
};

/// Checks the layers, the architecture, the keys of dflash_config, both places of block_size against each other, sizes against the target's, target
/// layers and mask token. Adds what is wrong to `problems`, all of it, and goes on with a value that works; the algorithm adds its own and calls finish().
[[nodiscard]] BlockConfig resolve_block_config(const ModelFacts& facts, const BlockTexts& texts, const BlockConfigRules& rules,
                                               ConfigProblems& problems);

/// Writes what was resolved where engines look for it, so that a checkpoint says all that a draft is.
void write_block_config(Json& json, const BlockConfig& config, const ModelFacts& facts, const Json& target);

/// Dotted keys that every engine reads from a block draft.
[[nodiscard]] std::vector<std::string> block_config_keys();

/// An integer (a boolean is none) at `key`; nothing when absent or null. `place` is what stands before the key in a message: "dflash_config.".
[[nodiscard]] std::optional<int64_t> integer_at(const Json* object, const char* key, const char* place);
[[nodiscard]] double number_at(const Json* object, const char* key, const char* place, double fallback);
[[nodiscard]] std::optional<bool> boolean_at(const Json* object, const char* key, const char* place);
[[nodiscard]] std::optional<std::string> string_at(const Json* object, const char* key, const char* place);

/// "1,9,17", for messages and for what a resumed run must share.
[[nodiscard]] std::string comma_list(const std::vector<int64_t>& ids);

}  // namespace sf::draft
