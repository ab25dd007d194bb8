// core/model/capture.hpp
//
// Runs the target over conversations and stores its hidden states as features (docs/feature-format.md).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "core/base/log.hpp"
#include "core/data/feature_format.hpp"

namespace sf {

/// A feature to store: some layers side by side, or the target's last state.
struct CapturedFeature {
  std::string key;
  std::vector<int64_t> layer_ids = {};
  bool last_state = false;
};

struct CaptureOptions {
  std::filesystem::path target_folder;
  std::filesystem::path tokens_path;  // JSONL of input_ids and loss_mask
  std::filesystem::path output;       // folder to make
  std::vector<CapturedFeature> features = {};
  int64_t batch_size = 8;
  int64_t max_length = 2048;  // longer samples keep their head; 0: no limit
  int64_t shard_bytes = 512ll << 20;
  Dtype dtype = Dtype::kBF16;  // what is stored
  /// What the target computes in: float32 on a CPU, where it is fastest, and the target's own type on a GPU.
  at::Device device = at::Device(at::DeviceType::CPU);
  std::string embedding_key = "model.embed_tokens.weight";
  std::string lm_head_key = "lm_head.weight";
  double seconds_between_reports = 5;
  LogFunction log = {};
  std::function<bool()> stop_requested = {};
};

struct CaptureResult {
  FeatureManifest manifest;
  bool was_finished = false;  // everything was there already
  bool interrupted =
      false;  // stopped on request; finished shards stay, and the same capture goes on from them
  int64_t tokens_captured = 0;
  double seconds = 0;
};

/// Samples without two neighbouring supervised tokens (after the cut to max_length) are left out and counted;
/// records whose features are not finite are refused by name. Says beforehand how large the features will be
/// and ends when the disk has no room. Shards appear whole or not at all, so a kill at any moment costs at
/// most the shard in work. Throws sf::Error (data): bad target, bad tokens, nothing to capture, disk full, or
/// a folder with other content.
[[nodiscard]] CaptureResult capture_features(const CaptureOptions& options);

}  // namespace sf
