// plugins/algorithm/dflash2/objective_unit.hpp: the draft's last norm, the frozen head, the losses and what metrics need.
//
// Shapes: r rows for the head · h hidden · v vocabulary · c blocks · p slots after the known token · q draft rows of a sample
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "plugins/algorithm/dflash2/dflash_config.hpp"
#include "plugins/algorithm/dflash2/dflash_options.hpp"
#include "sf/unit.hpp"

namespace sf {

// The selector's parameters: a row of the first table for the token before, of the second for each candidate, and a product with the hidden row.
inline constexpr const char* kPredecessor = "candidate_selector.predecessor_codebook";
inline constexpr const char* kSuccessor = "candidate_selector.successor_codebook";
inline constexpr const char* kProjection = "candidate_selector.hidden_projection";

/// Places of the unit's inputs. Those from kRowCell on are given only when detailed metrics are wanted, the last one only when the features have the
/// target's last states.
enum ObjectiveInput : size_t {
  kDraftRows,        // [b, q, h], before the last norm
  kHead,             // [v, h], frozen
  kRowIndex,         // int64 [r], into b*q
  kRowLabel,         // int64 [r]
  kRowPredecessor,   // int64 [r]
  kRowMask,          // float32 [r], M
  kRowWeight,        // float32 [r]: M * decay; with D-PACE the factor 1/A of the row's sequence
  kSeed,             // float32 scalar
  kSelectorAlpha,    // float32 scalar
  kRowCell,          // int64 [r], into a grid [c, p]
  kGridMask,         // float32 [c, p]
  kAnchorToken,      // int64 [c]
  kTeacherRows,      // [r, h]: the target's last state at the token before the row's label
};

/// Sums over rows, without the seed.
enum ObjectiveSum : int64_t {
  kSumMask,                // M
  kSumHit,                 // M > 0.5 and the head's best token is the label
  kSumProbability,         // p * M
  kSumToken,               // the token objective
  kSumKlWeight,            // the weight of the cross-entropy in the lambda mix
  kSumSelector,            // selector's cross-entropy * weight
  kSumSelectorWeight,      // its weights
  kSumSelectorHit,         // [best candidate is the label] * weight
  kSumCovered,             // M * [the label is among the strict candidates]
  kSumCoveredProbability,  // exp(-selector's cross-entropy) * M * covered
  kObjectiveSums
};

/// Per-slot numbers of detailed metrics, each a grid [c, p].
enum ObjectiveGrid : int64_t {
  kGridHit,          // the head's best token is the label
  kGridProbability,  // of the label
  kGridCovered,      // the label is among the strict candidates
  kGridMass,         // probability of all candidates together
  kGridSelected,     // teacher forced: the selector's best candidate is the label
  kGridGreedy,       // the greedy path's token is the label
  kGridWeight,       // weight in the loss
  kObjectiveGrids,
  // With teacher rows only; softmax of the target's own logits beside the head's of the draft.
  kGridTeacherOverlap = kObjectiveGrids,  // sum over tokens of the smaller probability, which is 1 - 0.5 * L1
  kGridTeacherAgreement,                  // both have the same best token
  kGridTeacherMass,                       // the target's probability of the draft's strict candidates together
  kObjectiveGridsWithTeacher
};

/// Outputs: {numerator float32 scalar (seed included), sums float32 [kObjectiveSums]} and, with details, grids float32 [kObjectiveGrids or
/// kObjectiveGridsWithTeacher, c, p].
class ObjectiveUnit final : public Unit {
 public:
  ObjectiveUnit(const DflashConfig& config, const DflashOptions& options) : config_(config), options_(options) {}
  std::vector<at::Tensor> forward(UnitContext& context, const std::vector<at::Tensor>& inputs) override;

  /// Candidates that detailed metrics of plain DFlash look at; DFlash2 has its own number.
  [[nodiscard]] int64_t candidates() const;

 private:
  struct Rows;
  at::Tensor row_weights(const at::Tensor& nll_r, const at::Tensor& mask_r, const at::Tensor& weight_r) const;
  at::Tensor kl_weight(UnitContext& context, const HeadObjective& objective, const at::Tensor& mask_r) const;
  at::Tensor grids(UnitContext& context, const std::vector<at::Tensor>& inputs, const Rows& rows, const at::Tensor& projected_rx) const;
  void compare_with_teacher(const at::Tensor& out_rh, const at::Tensor& teacher_rh, const at::Tensor& head_vh, int64_t chunk_rows, Rows& rows) const;

  DflashConfig config_;
  DflashOptions options_;
};

[[nodiscard]] std::vector<ParameterSpec> objective_parameters(const DflashConfig& config, const DflashOptions& options);

/// Rows that the head looks at together on a GPU.
[[nodiscard]] int64_t head_chunk_rows(const DflashConfig& config, const DflashOptions& options);

}  // namespace sf
