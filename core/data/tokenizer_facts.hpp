// core/data/tokenizer_facts.hpp
//
// What a draft wants to know of the target's tokenizer to choose a mask token: its length and its own mask token. In: the target's folder, with
// tokenizer.json and tokenizer_config.json as Hugging Face writes them. No tokenizing here.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace sf {

struct TokenizerFacts {
  int64_t tokens = -1;         // one more than the largest id; -1 without a tokenizer.json
  int64_t mask_token_id = -1;  // of "mask_token"; -1 when there is none
};

/// Missing files leave -1. Throws sf::Error (data) when a file is there and is no JSON.
[[nodiscard]] TokenizerFacts read_tokenizer_facts(const std::filesystem::path& target);

/// Whether a draft's config.json says which token it is, so that nobody has to ask the tokenizer; null does not.
[[nodiscard]] bool names_mask_token(const std::string& draft_config);

}  // namespace sf
