// core/data/tokens.hpp
//
// Conversations as tokens: a JSONL file, one object a line with "input_ids" and "loss_mask" (same length, the
// mask 0 or 1) and perhaps an "id". What capture runs through the target.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace sf {

struct TokenSample {
  std::string id;  // as in the file, else "line 17"
  std::vector<int64_t> input_ids;
  std::vector<uint8_t> loss_mask;
};

struct TokenLimits {
  int64_t vocab_size = 0;  // ids must be below it; 0: not checked
  int64_t max_length = 0;  // longer samples keep their head; 0: no limit
};

/// All samples of a file in its order. Empty lines are skipped. All broken lines are reported together (the
/// first twenty in full), each with its number, found and expected; a file without a sample is refused.
/// Throws sf::Error (data).
[[nodiscard]] std::vector<TokenSample> read_tokens(const std::filesystem::path& path,
                                                   const TokenLimits& limits);

/// SHA-256 over the samples' ids and masks, whatever the file's spelling of them.
[[nodiscard]] std::string tokens_fingerprint(const std::vector<TokenSample>& samples);

/// True when two neighbouring tokens are supervised: the least that a draft can be trained on.
[[nodiscard]] bool has_supervised_pair(const std::vector<uint8_t>& loss_mask);

}  // namespace sf
