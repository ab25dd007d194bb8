// sdk/testing/small_draft.hpp: a draft of plain ATen units with awkward shapes, trained over the real tape and optimizer, on one rank or on several
// threads. Every parameter, gradient and norm can be compared with the `single` backend over the same samples.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/train/optimizer.hpp"
#include "core/train/tape.hpp"
#include "sf/backend.hpp"
#include "sdk/testing/fake_comm.hpp"

namespace sf::testing {

struct DraftShape {
  int64_t blocks = 3;
  int64_t block_uses = 1;              // as EAGLE3: all uses of block 0, with the objective after each
  bool has_frozen = true;              // block 1 has a frozen parameter, the last group is frozen altogether
  std::vector<std::string> recompute = {};
  int64_t hidden = 6, inner = 11;      // hidden is even
  bool has_rare = false, rare_is_idle = false;   // block 1 has a parameter that some micro-steps use: DraftRun::uses_rare
};

/// Units: context (root), block.0 .., objective (root), and with has_frozen a unit "frozen" of its own group that scales the objective's input.
[[nodiscard]] std::vector<UnitSpec> draft_specs(const DraftShape& shape);

struct Outcome {
  std::vector<double> losses, norms;                         // by window; losses of this rank's samples
  std::map<std::string, at::Tensor> weights, gradients;      // whole, of the last window
};

struct DraftRun {
  DraftShape shape = {};
  int64_t first_window = 0, windows = 3, accumulation = 2;   // windows [first_window, windows)
  int64_t samples = 4;                                       // of a window, over all ranks; sample i of micro-step m goes to rank i % W
  at::ScalarType dtype = at::kFloat;
  int64_t throw_in_window = -1;                              // in backward, in block 1; the window is then run again
  bool throw_at_boundary = false;                            // in the last micro-step, with reductions in flight; else in the first
  bool evaluate_between = false;
  bool gathers_straight = false;                             // what the ranks' Comm says
  std::function<bool(int64_t window, int64_t sample)> uses_rare = {};   // sample m * ranks + rank, in micro-step m
  bool lends_weights = false;                                // TapeRunner::Options
  std::function<void(int64_t window, Sharding&)> after_window = {};
  std::function<std::unique_ptr<Transform, void (*)(Transform*)>()> make_transform = {};   // of each rank
  std::function<void(AdamW&, Sharding&, Comm*)> before_start = {}, at_end = {};

  /// Trains on rank `comm` (null: one). Fills this rank's part of `outcome.weights` and `.gradients`, whose tensors are whole, when they are there.
  void train(Sharding& sharding, Comm* comm, Outcome& outcome) const;
};

/// The run with the `single` backend.
[[nodiscard]] Outcome train_single(const DraftRun& run);
/// The run over `ranks` threads; `make` builds each rank's backend, `look` sees rank, comm and backend at its end.
[[nodiscard]] Outcome train_ranks(const DraftRun& run, int64_t ranks, const std::function<std::unique_ptr<Sharding, void (*)(Sharding*)>()>& make,
                                  const std::function<void(FakeComm&, Sharding&)>& look = {});

/// Largest |a - b| / (|b| + 1e-6 of b's largest) over all tensors.
[[nodiscard]] double largest_difference(const std::map<std::string, at::Tensor>& a, const std::map<std::string, at::Tensor>& b);

}  // namespace sf::testing
