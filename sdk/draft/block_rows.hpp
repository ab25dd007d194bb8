// sdk/draft/block_rows.hpp: anchors of a sample, and the draft rows of a batch that the head has to look at. Host tensors only.
//
// Shapes: b batch · s tokens · w block slots · c blocks with something to learn · p tokens that a block drafts · r rows for the head ·
//         m chunks of rows · t states of a chunk
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
  bool known_row_drafts = false;  // true: row i of a block drafts the token at anchor + i + 1, the known token's row too (DSpark); false: row i
                                  // drafts anchor + i, and the known token's row drafts nothing (DFlash)
  bool until_gap = false;         // a block's supervision ends at its first gap, and counts 1 (DSpark); else the mask as it stands, gaps allowed
  bool by_position = false;       // rows in order of (sequence, label's position); else block after block. Not with whole_blocks
  bool whole_blocks = false;      // all p tokens of a block, for objectives that pool over a block; else up to its last supervised one
  int64_t multiple = 1;           // rows (whole_blocks: blocks) are filled up to a multiple of it with rows of weight 0

  [[nodiscard]] int64_t drafted() const { return block_size - (known_row_drafts ? 0 : 1); }  // p
};

/// Drafted token k = 1 .. p of a block stands at anchor + k. M = keep * [in range] * loss_mask there (until_gap: the running product of [M > 0.5]).
struct BlockRows {
  at::Tensor index_r;         // int64, row of [b*w*j]
  at::Tensor label_r;         // int64
  at::Tensor predecessor_r;   // int64, the token before the label
  at::Tensor state_r;         // int64, place of that token in [b*s]: where the target's own prediction of the label stands
  at::Tensor mask_r;          // float32, M
  at::Tensor slot_r;          // int64, k of the row, 1 .. p
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

/// Rows index_r of x_nh. Its gradient takes each row of x from the first that reads it: rows that fill up read a row again, and theirs is zero.
[[nodiscard]] at::Tensor take_rows(const at::Tensor& x_nh, const at::Tensor& index_r);

/// Which of the target's states each chunk of rows asks for, every one once (HeadObjective's teacher in sf/ops.hpp).
struct TeacherPlaces {
  at::Tensor places_mt;  // int64, into [b*s]; a chunk with fewer states repeats its last one
  at::Tensor index_r;    // int64, a row's column in its chunk's list
};

/// Rows in order of their states (by_position) share states with their neighbours only, so a state is wanted by one chunk, or by two at a border.
/// t is filled up to a multiple of `multiple`.
[[nodiscard]] TeacherPlaces teacher_places(const at::Tensor& state_r, int64_t chunk_rows, int64_t multiple);

}  // namespace sf::draft
