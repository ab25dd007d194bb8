// plugins/algorithm/eagle3/unroll_rows.hpp: which positions of a batch the teacher and the head have to look at. Host tensors only.
//
// What stands where. Row t of the draft holds the target's fused states of position t and the embedding of token t + 1; at use k its state comes from
// use k - 1 and its embedding is that of token t + 1 + k. So row t at use k guesses token t + 2 + k, and learns from the target's state at position
// t + 1 + k. All that is known about a guess depends on j = t + k alone: the teacher's state is that of j + 1, the label is token j + 2, the weight is
// the loss mask at j. So the lists below are over j, and use k takes row j - k for each, where there is one.
//
// Decoding. With the tokens up to a known and the target's states up to a - 1, the last row is t = a - 1: use 0 guesses token a + 1, use k token
// a + 1 + k from j = a - 1 + k. Keys and values of use 0 come from the target's states there too, those of later uses from the row itself, as here. A use
// reads the embedding of the token that the use before it guessed; here it reads the stored one. Both agree as long as every guess so far is a hit,
// and behind the first miss nothing counts, so the leading hits are those of greedy drafting.
//
// Shapes: b batch · s tokens · r positions · c chains (tokens that may start a block) · p uses
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace sf {

struct UnrollRows {
  at::Tensor base_r;         // int64, place of position j in [b*s]
  at::Tensor position_r;     // int64, j
  at::Tensor teacher_r;      // int64, place of position j + 1 in [b*s]
  at::Tensor weight_r;       // float32, 1 where the loss counts position j
  at::Tensor label_r;        // int64, token j + 2; -1 when there is none
  at::Tensor chain_row_cp;   // int64, the entry of the lists above that continues a chain; 0 where the chain has ended
  at::Tensor chain_mask_cp;  // float32, 1 while the guessed token is supervised
  at::Tensor chain_place_c;  // int64, place of the chain's known token in [b*s]
};

/// input_ids int64 [b, s]; loss_mask [b, s] as stored; counted [b, s]: where the loss counts, which is the mask without each sample's last token. A
/// chain starts at a token that is supervised, as is the next; it needs a token before it, whose states the draft reads. Lists are filled up
/// to a multiple with entries of weight 0; there is at least one.
[[nodiscard]] UnrollRows collect_unroll_rows(const at::Tensor& input_ids_bs, const at::Tensor& loss_mask_bs, const at::Tensor& counted_bs, int64_t uses,
                                             int64_t multiple);

}  // namespace sf
