#include "sdk/draft/draft_vocabulary.hpp"

#include "sf/error.hpp"

#include <algorithm>

namespace sf::draft {

std::vector<int64_t> choose_draft_tokens(const std::vector<TokenCount>& counts, int64_t size) {
  std::vector<TokenCount> all = counts;
  if (static_cast<int64_t>(all.size()) < size) {
    std::vector<bool> is_there(static_cast<size_t>(size), false);
    for (const TokenCount& entry : counts) {
      if (entry.token < size) {
        is_there[static_cast<size_t>(entry.token)] = true;
      }
    }
    for (int64_t token = 0; token < size && static_cast<int64_t>(all.size()) < size; ++token) {
      if (!is_there[static_cast<size_t>(token)]) {
        all.push_back({token, 0});
      }
    }
  }
  std::stable_sort(all.begin(), all.end(), [](const TokenCount& a, const TokenCount& b) { return a.count > b.count; });
  std::vector<int64_t> tokens;
  for (int64_t i = 0; i < size; ++i) {
    tokens.push_back(all[static_cast<size_t>(i)].token);
  }
  std::sort(tokens.begin(), tokens.end());
  return tokens;
}

std::vector<int64_t> offsets_of(const std::vector<int64_t>& tokens) {
  std::vector<int64_t> offsets;
  for (size_t u = 0; u < tokens.size(); ++u) {
    offsets.push_back(tokens[u] - static_cast<int64_t>(u));
  }
  return offsets;
}

std::vector<int64_t> tokens_of(const std::vector<int64_t>& offsets, const std::vector<uint8_t>& is_kept, int64_t vocabulary, int64_t size,
                               const std::string& source) {
  const auto refuse = [&](const std::string& what) {
    throw Error(ExitCode::kData, source + ": the draft vocabulary can't be used: " + what,
                "name the mapping that belongs to this target and draft_vocab_size, or leave it out so that one is made");
  };
  if (static_cast<int64_t>(is_kept.size()) != vocabulary) {
    refuse("t2d has " + std::to_string(is_kept.size()) + " entries, the target's vocabulary " + std::to_string(vocabulary));
  }
  if (static_cast<int64_t>(offsets.size()) != size) {
    refuse("d2t has " + std::to_string(offsets.size()) + " entries, draft_vocab_size is " + std::to_string(size));
  }
  std::vector<int64_t> tokens;
  for (int64_t token = 0; token < vocabulary; ++token) {
    if (is_kept[static_cast<size_t>(token)] != 0) {
      tokens.push_back(token);
    }
  }
  if (static_cast<int64_t>(tokens.size()) != size) {
    refuse("t2d names " + std::to_string(tokens.size()) + " tokens, draft_vocab_size is " + std::to_string(size));
  }
  for (int64_t u = 0; u < size; ++u) {
    if (tokens[static_cast<size_t>(u)] != u + offsets[static_cast<size_t>(u)]) {
      refuse("draft token " + std::to_string(u) + " is " + std::to_string(u + offsets[static_cast<size_t>(u)]) + " by d2t and " +
             std::to_string(tokens[static_cast<size_t>(u)]) + " by t2d");
    }
  }
  return tokens;
}

}  // namespace sf::draft
