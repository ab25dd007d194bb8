// sdk/draft/block_metrics.hpp: metrics over a grid of drafted tokens: rates for each place in a block, accepted lengths, walks.
//
// Shapes: c blocks · p tokens that a block drafts · b batch · w block slots
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "sdk/draft/acceptance.hpp"
#include "sf/unit.hpp"

namespace sf::draft {

struct BlockGrid {
  at::Tensor mask_cp;     // float32, M
  at::Tensor block_c;     // int64, into b*w; blocks that fill up have no supervised token
  at::Tensor anchors_bw;  // int64
};

class BlockMetrics {
 public:
  BlockMetrics(Runner& runner, const BlockGrid& grid);

  [[nodiscard]] const at::Tensor& mask() const { return grid_.mask_cp; }
  [[nodiscard]] const at::Tensor& supervised() const { return supervised_cp_; }  // float32 0/1
  [[nodiscard]] const at::Tensor& blocks() const { return blocks_; }             // how many have something supervised
  [[nodiscard]] Chain chain(const at::Tensor& hit_cp) const { return follow_chain(hit_cp, mask()); }

  /// A ratio over all places, and the same for each place: "a/b/c" is reported per position as "b/c".
  void rate_of(const std::string& name, const at::Tensor& numerator_cp, const at::Tensor& denominator_cp);
  /// Share of M.
  void rate(const std::string& name, const at::Tensor& values_cp);
  /// A sum over all places, and the same for each place.
  void count(const std::string& name, const at::Tensor& values_cp);
  /// What a chain meets at each place, as NAME_prefix_acceptance, NAME_reached_count, NAME_accepted_count, NAME_first_failure_count, and per position
  /// NAME_prefix_survival, the share of blocks that it gets through.
  void report_chain(const std::string& name, const Chain& chain);
  /// 1 + mean number of accepted tokens over blocks that have something to accept.
  void length(const std::string& name, const at::Tensor& accepted_c);
  void walk(const std::string& name, const at::Tensor& accepted_c);
  /// "acceptance_length", "acceptance/prefix_survival" per position, and "acceptance/walk_length", which counts only the blocks that decoding would come
  /// to, one after the other: one definition for all drafts.
  void acceptance(const Chain& drafted);

 private:
  Runner& runner_;
  const BlockGrid& grid_;
  at::Tensor supervised_cp_, live_c_, blocks_;
};

}  // namespace sf::draft
