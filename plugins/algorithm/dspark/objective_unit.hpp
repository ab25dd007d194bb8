// plugins/algorithm/dspark/objective_unit.hpp: the draft's last norm, the frozen head with the Markov bias, the confidence head, the three losses and
// what metrics need.
//
// Shapes: r rows for the head · h hidden · v vocabulary · c blocks · p tokens that a block drafts · q draft rows of a sample · s context tokens ·
//         m chunks of rows · t states of a chunk
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "plugins/algorithm/dspark/dspark_config.hpp"
#include "plugins/algorithm/dspark/dspark_options.hpp"
#include "sf/unit.hpp"

namespace sf {

inline constexpr const char* kConfidence = "confidence_head.proj";

/// Places of the unit's inputs. The last three are there when a loss needs the teacher.
enum DsparkInput : size_t {
  kDraftRows,        // [b, q, h], before the last norm
  kHead,             // [v, h], frozen
  kRowIndex,         // int64 [r], into b*q
  kRowLabel,         // int64 [r]
  kRowPredecessor,   // int64 [r]
  kRowMask,          // float32 [r], E: 0 for rows that fill up
  kRowWeight,        // float32 [r], E * decay
  kRowCell,          // int64 [r], into a grid [c, p]
  kGridMask,         // float32 [c, p]
  kSeed,             // float32 scalar
  kTeacherStates,    // [b, s, h]
  kTeacherPlaces,    // int64 [m, t]
  kTeacherIndex,     // int64 [r]
};

/// Sums over rows, without the seed. "accept": 1 - half the distance to the teacher's distribution, the probability that it accepts the draft.
enum DsparkSum : int64_t {
  kSumMask,             // E
  kSumWeight,           // w = E * decay
  kSumHit,              // E * [best token is the label]
  kSumToken,            // w * cross-entropy
  kSumDraftTop,         // E * largest probability of the draft
  kSumDistance,         // w * distance to the teacher
  kSumAgreement,        // E * [best token is the teacher's]
  kSumTeacherTop,       // E * largest probability of the teacher
  kSumConfidence,       // w * cross-entropy of the confidence with accept
  kSumConfidenceError,  // w * |confidence - accept|
  kSumConfidenceBias,   // w * (confidence - accept)
  kDsparkSums
};

/// Numbers of each drafted token, a grid [c, p] each.
enum DsparkGrid : int64_t {
  kGridHit,         // best token is the label
  kGridToken,       // cross-entropy
  kGridAccept,      // 0 without a teacher
  kGridConfidence,  // 0 without a trained confidence head
  kDsparkGrids
};

/// Outputs: {numerator float32 scalar (seed included), sums float32 [kDsparkSums], grids float32 [kDsparkGrids, c, p]}.
class DsparkObjective final : public Unit {
 public:
  DsparkObjective(const DsparkConfig& config, const DsparkOptions& options) : config_(config), options_(options) {}
  std::vector<at::Tensor> forward(UnitContext& context, const std::vector<at::Tensor>& inputs) override;

 private:
  DsparkConfig config_;
  DsparkOptions options_;
};

[[nodiscard]] std::vector<ParameterSpec> objective_parameters(const DsparkConfig& config, const DsparkOptions& options);

/// Rows of the head at a time; whoever lists the teacher's states for each chunk asks here.
[[nodiscard]] int64_t chunk_rows(const DsparkConfig& config, const DsparkOptions& options, bool on_gpu);

}  // namespace sf
