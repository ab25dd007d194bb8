// sdk/draft/block_backbone.hpp: the part of a block draft before its objective, which DFlash, DFlash2 and DSpark share: context projection, blocks, the
// rows that go in, rotary angles, and the anchors of a sample.
//
// Shapes: b batch · s context tokens · w block slots · j tokens of a block · q = w*j draft rows · h hidden
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "sdk/draft/block_config.hpp"
#include "sf/algorithm.hpp"
#include "sf/drafter.hpp"

namespace sf::draft {

/// Convolution around attention and MLP (DFlash2); 0 taps: none.
struct BlockConvolution {
  int64_t taps = 0;
  int64_t groups = 0;
};

class BlockBackbone {
 public:
  /// Adds the units of context and blocks, the features and fields that they need, to `description`; called first, so their indices are 0 .. layers.
  void describe(const BlockConfig& config, const BlockConvolution& convolution, Description& description,
                std::vector<std::unique_ptr<Unit>>& units);
  /// Checks the target's tables against the configuration. Throws sf::Error (data).
  void bind(const TargetTables& tables);
  /// Runs context and blocks. The batch has "hidden_states", "anchors", "keep" and "anchor_ids" (add_anchor_ids). Rows of the last block [b, q, h],
  /// before the last norm.
  [[nodiscard]] TapeValue run(Runner& runner, const Batch& batch) const;

  /// Decoding. Keeps the context of tokens that the target has gone through.
  void remember(DraftUnits& units, DraftMemory& memory, const SeenTokens& seen) const;
  /// One block for each sequence, its known token at question.positions_b: rows of the last block [b, j, h], before the last norm.
  [[nodiscard]] at::Tensor draft_rows(DraftUnits& units, const DraftMemory& memory, const DraftQuestion& question) const;

  [[nodiscard]] const TargetTables& tables() const { return tables_; }
  [[nodiscard]] bool on_gpu() const { return tables_.embedding_vh.defined() && tables_.embedding_vh.is_cuda(); }
  /// Of the unit that follows the blocks.
  [[nodiscard]] int64_t next_unit() const { return 1 + config_.layers.layers; }

 private:
  at::Tensor noise(const at::Tensor& anchor_ids_bw, const at::Tensor& keep_bw) const;
  struct Rows {
    at::Tensor noise_bqh, anchors_bw, keep_bw;
    int64_t context_tokens = 0;
  };
  std::vector<at::Tensor> block_inputs(const Rows& rows) const;

  BlockConfig config_;
  TargetTables tables_;
  at::Tensor inverse_frequencies_;  // float32, on the training device
};

/// Draws "anchors" and "keep" of a sample: `num_anchors` of the positions that may start a block, the same for every algorithm, batch, rank and
/// device; all of them in an evaluation. Returns why the sample can't be used, empty when it can.
[[nodiscard]] std::string draw_anchors(Sample& sample, const SampleContext& context, int64_t num_anchors);

/// "anchor_ids" [b, w]: the known token of each block.
void add_anchor_ids(Batch& batch);

/// What of a block draft a resumed run must share, under "PREFIX_draft_num_hidden_layers", ...
void fix_block_settings(std::map<std::string, std::string>& fixed, const std::string& prefix, const BlockConfig& config, int64_t num_anchors,
                        const std::string& rope_rounding);

/// Parameters of all units by full name.
[[nodiscard]] std::vector<ParameterSpec> full_parameters(const std::vector<UnitSpec>& units);

}  // namespace sf::draft
