// sdk/draft/draft_vocabulary.hpp: which of the target's tokens a draft with a smaller vocabulary may guess, chosen by frequency. Kept as two buffers:
// t2d bool [v], true for a token of the draft; d2t int64 [w], draft token u is target token u + d2t[u]. Draft tokens ascend with target tokens.
//
// Shapes: v target vocabulary · w draft vocabulary
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sf/algorithm.hpp"

namespace sf::draft {

/// The `size` most frequent tokens, ascending. Among equals the one that comes first in `counts` wins. When there are fewer tokens than `size`, those
/// of 0 .. size-1 that are missing are added behind with count 0, ascending, until there are enough.
[[nodiscard]] std::vector<int64_t> choose_draft_tokens(const std::vector<TokenCount>& counts, int64_t size);

/// Offsets of ascending draft tokens.
[[nodiscard]] std::vector<int64_t> offsets_of(const std::vector<int64_t>& tokens);

/// Draft tokens that the two buffers describe. Throws sf::Error (data) naming `source` when they contradict each other or the sizes.
[[nodiscard]] std::vector<int64_t> tokens_of(const std::vector<int64_t>& offsets, const std::vector<uint8_t>& is_kept, int64_t vocabulary, int64_t size,
                                             const std::string& source);

}  // namespace sf::draft
