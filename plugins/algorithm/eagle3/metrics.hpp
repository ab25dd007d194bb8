// plugins/algorithm/eagle3/metrics.hpp: what a micro-step reports of each use of the unroll, and of drafting along it.
//
// Shapes: r positions · c chains · p uses
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "sf/unit.hpp"

namespace sf {

/// Of one use.
struct UseOutcome {
  at::Tensor step_loss, acceptance;  // float32 scalars
  at::Tensor guess_r;                // int64, target tokens
  at::Tensor mask_r;                 // float32, the loss mask shifted to this use
};

struct UnrollOutcome {
  std::vector<UseOutcome> uses;
  at::Tensor teacher_r;  // int64, the target's best token for each position
  at::Tensor divisor;    // float32 scalar, rows x padded tokens: the weight of a micro-batch's losses
};

/// acc_k, ploss_k, acceptance_rate_k for each use and acc, acceptance_rate over all.
void report_uses(Runner& runner, const UnrollOutcome& outcome);

/// Where the chains of a batch stand (unroll_rows.hpp).
struct ChainPlaces {
  at::Tensor label_r, row_cp, mask_cp, place_c;
  int64_t b = 0, s = 0;
};

/// acceptance_length and how many chains get through each use.
void report_chains(Runner& runner, const UnrollOutcome& outcome, const ChainPlaces& chains);

/// simulated_acc_len = acc_0 + acc_0 acc_1 + ..: the reference's estimate, which takes the uses to be independent.
void derive_unroll_metrics(std::map<std::string, double>& metrics, int64_t uses);

}  // namespace sf
