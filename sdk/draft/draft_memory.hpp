// sdk/draft/draft_memory.hpp: tensors of a DraftMemory that have a place for each token of each sequence.
//
// Shapes: b sequences · t tokens · c places
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "sf/drafter.hpp"

namespace sf::draft {

/// Puts rows [b, t, ...] at the places of `seen` into the tensor [b, c, ...] of that name, which is made, with zeros, or grows as needed.
void put_rows(DraftMemory& memory, const std::string& name, const at::Tensor& rows, const SeenTokens& seen);

/// rows [b, t, ...] at the last place of each sequence's count: [b, ...].
[[nodiscard]] at::Tensor last_rows(const at::Tensor& rows, const at::Tensor& counts_b);

}  // namespace sf::draft
