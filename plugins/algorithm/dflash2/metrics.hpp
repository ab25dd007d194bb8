// plugins/algorithm/dflash2/metrics.hpp: what a micro-step reports (spec: DFlash2, metrics).
#pragma once

#include <ATen/core/Tensor.h>

#include "plugins/algorithm/dflash2/dflash_config.hpp"
#include "plugins/algorithm/dflash2/dflash_options.hpp"
#include "sdk/draft/block_metrics.hpp"
#include "sf/unit.hpp"

namespace sf {

struct MetricInputs {
  at::Tensor sums;           // float32 [kObjectiveSums]
  at::Tensor denominator;    // float32 scalar: of the loss
  at::Tensor alpha;          // float32 scalar: the selector's factor in this update
  // With details only.
  at::Tensor grids;          // float32 [kObjectiveGrids or kObjectiveGridsWithTeacher, c, p]
  draft::BlockGrid grid;
};

/// Cheap ones, every micro-step.
void report_sums(Runner& runner, const MetricInputs& in, const DflashConfig& config, const DflashOptions& options);

/// Acceptance lengths, per-slot rates, walks. `candidates` is the k in their names.
void report_details(Runner& runner, const MetricInputs& in, const DflashConfig& config, int64_t candidates);

}  // namespace sf
