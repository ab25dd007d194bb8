// core/train/workload.hpp: random tables and features in the shape of a real target, so that a benchmark needs no downloads. A figure made with
// them says how fast a run is, never how good a draft becomes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "core/train/loader.hpp"
#include "sf/algorithm.hpp"

namespace sf {

struct Workload {
  int64_t samples = 16;
  int64_t tokens = 2048;          // of the longest sample
  bool variable_mask = false;     // a prompt of 20 to 80 % of each sample has loss mask 0, else nothing has
  bool variable_length = false;   // uniform in [max(32, tokens / 4), tokens], drawn anew for each sample
  int64_t vocab = 0, hidden = 0;  // of the target
  uint64_t seed = 0;

  /// The same text for the same data: part of a result, and how a folder of features is known again.
  std::string text() const;
};

/// What random tables have for an identity; a capture of the same name fits them.
inline constexpr const char* kRandomTarget = "random tables";

/// Standard deviation 0.02, as language models are initialised.
TargetTables random_tables(const Description& description, const Workload& workload, at::ScalarType dtype, at::Device device);

/// Samples made when they are read, the same for the same index: "input_ids", "loss_mask" and each feature that `description` must have, bfloat16.
SampleSource random_samples(const Description& description, const Workload& workload);

/// The same samples as a folder of captured features; what of them is there already is kept. Throws Error(kData) when something else is there.
void write_random_features(const std::filesystem::path& folder, const Description& description, const Workload& workload);

}  // namespace sf
