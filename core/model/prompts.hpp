// core/model/prompts.hpp
//
// Prompts as tokens: a JSONL file, one object a line with "input_ids", perhaps "loss_mask", "id" and "category". With a
// mask the prompt ends before the first supervised token, so token records of conversations serve as they are; without
// one, or with nothing supervised, the whole is the prompt. No LibTorch.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace sf {

struct Prompt {
  std::string id;        // as in the file, else "line 17"
  std::string category;  // "category", else what stands before a '/' in the id, else "all"
  std::vector<int64_t> ids;
};

/// In the order of the file, at most `most` (0: all). Every broken line is told, with its number and what is wrong: no
/// token, an id outside the vocabulary, no room for one more token before `context_tokens`. Throws sf::Error (data); also
/// for a file without a prompt.
[[nodiscard]] std::vector<Prompt> read_prompts(const std::filesystem::path& path, int64_t vocab_size, int64_t context_tokens,
                                               int64_t most = 0);

/// What names each prompt's draws when answers are sampled: its tokens, and how many before it are the same. So other prompts of a file, or their order, change nothing, and a
/// question that is asked twice gets two answers. Not negative.
[[nodiscard]] std::vector<int64_t> draw_names(const std::vector<Prompt>& prompts);

/// Tokens that end an answer: eos_token_id of generation_config.json, else of config.json; a number or a list. Throws
/// sf::Error (data) when neither file has one.
[[nodiscard]] std::vector<int64_t> stop_tokens_of(const std::filesystem::path& target_folder);

}  // namespace sf
