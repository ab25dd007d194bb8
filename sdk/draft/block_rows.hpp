// sdk/draft/block_rows.hpp: anchors of a sample, and the draft rows of a batch that the head has to look at. Host tensors only.
//
// Shapes: b batch · s tokens · w block slots · c blocks with something to learn · p = j-1 slots after the known token · r rows for the head
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace sf::draft {

/// Positions that may start a block: supervised, and so is the next token.
[[nodiscard]] std::vector<int64_t> valid_anchors(const at::Tensor& loss_mask_s);

/// The `count` of them with the smallest draws (all, when there are fewer), in ascending order of position. draws[t] belongs to position t, so the
/// choice does not depend on padding, batch or rank.
[[nodiscard]] std::vector<int64_t> choose_anchors(std::vector<int64_t> valid, const std::vector<uint64_t>& draws, int64_t count);

struct BlockRowsOptions {
  int64_t block_size = 0;
  bool whole_blocks = false;    // all p slots of a block, for objectives that pool over a block; else up to its last supervised slot
  int64_t multiple = 1;         // rows (whole_blocks: blocks) are filled up to a multiple of it with rows of weight 0
};

/// Label of slot j: the token at anchor + j. M = keep * [in range] * [j > 0] * loss_mask there; gaps inside a block are allowed.
struct BlockRows {
  at::Tensor index_r;         // int64, row of [b*w*j]
  at::Tensor label_r;         // int64
  at::Tensor predecessor_r;   // int64, the token before the label
  at::Tensor mask_r;          // float32, M
  at::Tensor slot_r;          // int64, j of the row, 1 .. p
  at::Tensor cell_r;          // int64, place in a grid [c, p]; c*p for rows that fill up
  at::Tensor block_c;         // int64, block of [b*w]; 0 for a block that fills up
  at::Tensor sequence_c;      // int64, row of the batch
  at::Tensor mask_cp;         // float32
  at::Tensor label_cp;        // int64
  at::Tensor anchor_token_c;  // int64, the known token
};

/// input_ids int64 [b, s], loss_mask [b, s] of any type, anchors int64 [b, w], keep bool [b, w]. At least one row, so a dead batch has a usual shape.
[[nodiscard]] BlockRows collect_block_rows(const at::Tensor& input_ids_bs, const at::Tensor& loss_mask_bs, const at::Tensor& anchors_bw,
                                           const at::Tensor& keep_bw, const BlockRowsOptions& options);

/// Per-row numbers put into their grid [c, p]; cells without a row are 0.
[[nodiscard]] at::Tensor to_grid(const at::Tensor& values_r, const at::Tensor& cell_r, int64_t c, int64_t p);

}  // namespace sf::draft
