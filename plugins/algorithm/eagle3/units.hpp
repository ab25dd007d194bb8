// plugins/algorithm/eagle3/units.hpp: the units around the unrolled block: fusion of the captured layers before it, norm, head and loss behind it, and
// the embedding when it is trained.
//
// Shapes: b batch · s rows · h hidden · x hidden of the target · r positions · w draft vocabulary · v target vocabulary
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "plugins/algorithm/eagle3/eagle3_config.hpp"
#include "plugins/algorithm/eagle3/eagle3_options.hpp"
#include "sf/unit.hpp"

namespace sf {

/// Order of the units.
enum UnitIndex : int64_t { kFusion, kMidlayer, kObjective, kEmbedding };

/// {features [b, s, 3x]} -> {fc(features) [b, s, h]}; with fc_norm each layer's part is normed with weights of its own first.
class FusionUnit final : public Unit {
 public:
  explicit FusionUnit(const Eagle3Config& config) : fc_norm_(config.fc_norm), eps_(config.layers.rms_norm_eps) {}
  std::vector<at::Tensor> forward(UnitContext& context, const std::vector<at::Tensor>& inputs) override;

 private:
  bool fc_norm_;
  double eps_;
};

/// {ids [b, t]} -> {rows [b, t, h]} of an embedding that is trained.
class EmbeddingUnit final : public Unit {
 public:
  std::vector<at::Tensor> forward(UnitContext& context, const std::vector<at::Tensor>& inputs) override;
};

/// Places of DistillUnit's inputs.
enum DistillInput : size_t {
  kDraftStates,             // [b, s, h], not normed
  kRowPlace,                // int64 [r], into b*s
  kTeacherLogits,           // [r, w]
  kTeacherKeptLogSumExp,    // [r]
  kTeacherLogSumExp,        // [r]
  kRowMask,                 // float32 [r]
  kDivisor,                 // float32 scalar
  kFactor,                  // float32 scalar: seed * weight of this use
};

/// Places of its outputs.
enum DistillOutput : size_t {
  kNumerator,   // float32 scalar, factor included
  kStepLoss,    // float32 scalar
  kAcceptance,  // float32 scalar
  kArgmax,      // int64 [r], draft tokens
};

/// Norm and head over the rows that somebody asks about, and the loss. Rows with mask 0 give nothing.
class DistillUnit final : public Unit {
 public:
  DistillUnit(const Eagle3Config& config, const Eagle3Options& options);
  std::vector<at::Tensor> forward(UnitContext& context, const std::vector<at::Tensor>& inputs) override;

 private:
  bool norm_output_;
  double eps_;
  DistillLoss loss_;
  double kl_scale_, kl_decay_;
  int64_t chunk_rows_;
};

[[nodiscard]] std::vector<ParameterSpec> fusion_parameters(const Eagle3Config& config);
[[nodiscard]] std::vector<ParameterSpec> embedding_parameters(const Eagle3Config& config);
[[nodiscard]] std::vector<ParameterSpec> distill_parameters(const Eagle3Config& config);

}  // namespace sf
