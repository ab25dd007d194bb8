// sdk/draft/unroll_chain.hpp: the layer of unroll_block.hpp in decoding: keys and values of the tokens that the target has gone through are kept, and a chain
// of uses runs on one row of each sequence. Products, norms and order are those of UnrollBlock; only what is computed again in training is not.
//
// Shapes: b sequences · t tokens · c places kept · h hidden · m key/value heads · e head size · f rotary pairs · x uses so far
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "sdk/draft/unroll_block.hpp"
#include "sf/unit.hpp"

namespace sf::draft {

/// Rows of a use before attention: what is kept of them.
struct UnrollKeys {
  at::Tensor keys_btme, values_btme;
};

/// Keys and values of rows with states [b, t, h] and embeddings of the tokens after them [b, t, h]; cos and sin float32 [b, t, f] at the rows' positions.
[[nodiscard]] UnrollKeys unroll_keys(UnitContext& context, const UnrollBlockShape& shape, const at::Tensor& states_bth, const at::Tensor& embeddings_bth,
                                     const at::Tensor& cos_btf, const at::Tensor& sin_btf);

/// What a row of a chain sees.
struct ChainSight {
  at::Tensor keys_bcme, values_bcme;   // of the first use ...
  at::Tensor counts_b;                 // ... so many of each sequence, the row's own included
  std::vector<UnrollKeys> later;       // of later uses of this row, [b, 1, m, e]
};

/// One use on one row of each sequence: states and embeddings [b, 1, h]. From the second use on its own keys and values are added to `sight.later` first.
/// Returns the states that the next use and the head read, [b, 1, h].
[[nodiscard]] at::Tensor unroll_row(UnitContext& context, const UnrollBlockShape& shape, const at::Tensor& states_b1h, const at::Tensor& embeddings_b1h,
                                    const at::Tensor& cos_b1f, const at::Tensor& sin_b1f, bool is_first_use, ChainSight& sight);

}  // namespace sf::draft
