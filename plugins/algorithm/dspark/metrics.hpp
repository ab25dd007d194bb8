// plugins/algorithm/dspark/metrics.hpp: what a micro-step reports (spec: DSpark, metrics).
#pragma once

#include <ATen/core/Tensor.h>

#include "plugins/algorithm/dspark/dspark_config.hpp"
#include "plugins/algorithm/dspark/dspark_options.hpp"
#include "sdk/draft/block_metrics.hpp"
#include "sf/unit.hpp"

namespace sf {

struct DsparkMetrics {
  at::Tensor sums;         // float32 [kDsparkSums]
  at::Tensor grids;        // float32 [kDsparkGrids, c, p]
  draft::BlockGrid grid;
};

/// Cheap ones, every micro-step.
void report_sums(Runner& runner, const DsparkMetrics& in, const DsparkConfig& config, const DsparkOptions& options);

/// For each place in a block, accepted lengths, walks, and drafting that stops where the confidence says so.
void report_details(Runner& runner, const DsparkMetrics& in, const DsparkConfig& config, const DsparkOptions& options);

}  // namespace sf
