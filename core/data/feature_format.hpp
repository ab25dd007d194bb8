// core/data/feature_format.hpp
//
// How captured features lie on disk: a folder with manifest.json and shards of safetensors
// (docs/feature-format.md). A shard holds whole records one after another in a few large tensors, so it is
// read by mmap without copies and by anything that reads safetensors. A capture that is not finished has
// capture.json in place of manifest.json; every shard that either names is whole.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "sf/json.hpp"

#include "core/data/safetensors.hpp"
#include "core/data/tokens.hpp"

namespace sf {

inline constexpr const char* kManifestName = "manifest.json";
inline constexpr const char* kUnfinishedName = "capture.json";

/// One feature of every record: [tokens, width].
struct FeatureTensor {
  std::string key;  // "hidden_states"
  Dtype dtype = Dtype::kBF16;
  int64_t width = 0;  // layer_ids.size() x hidden, or hidden for the last state
  std::vector<int64_t> layer_ids =
      {};                   // target layers in the order of their columns; empty for the last state
  bool last_state = false;  // the target's post-norm state

  friend bool operator==(const FeatureTensor&, const FeatureTensor&) = default;
};

struct FeatureShard {
  std::string file;
  int64_t bytes = 0;
  std::string sha256;
  int64_t first_sample = 0;  // of the token file, as numbered after samples without supervision were left out
  int64_t records = 0;       // refused ones not counted
  int64_t tokens = 0;
  std::vector<int64_t> refused;  // samples whose features were not finite
};

struct FeatureManifest {
  Json target = Json::object();  // model_type, hidden_size, num_hidden_layers, vocab_size, fingerprint
  std::vector<FeatureTensor> features;
  std::string tokens_sha256;         // tokens_fingerprint of the samples
  int64_t max_length = 0;            // samples were cut to it; 0: they were not
  int64_t samples_unsupervised = 0;  // left out: no two neighbouring supervised tokens
  std::vector<FeatureShard> shards;

  [[nodiscard]] int64_t records() const;
  [[nodiscard]] int64_t tokens() const;
  /// The target's own; empty when it was not recorded.
  [[nodiscard]] std::string target_fingerprint() const;
  /// What identifies the data: target, tokens, features and the checksums of all shards.
  [[nodiscard]] std::string fingerprint() const;
  /// Equal for two captures that would write the same shards.
  [[nodiscard]] std::string recipe_fingerprint() const;
  [[nodiscard]] Json to_json() const;
  /// Throws sf::Error (data) naming the file.
  [[nodiscard]] static FeatureManifest read(const std::filesystem::path& path);
};

/// Bytes that a shard with these records will have, but for its header of about 1 KiB.
[[nodiscard]] int64_t shard_bytes(const std::vector<FeatureTensor>& features, int64_t records,
                                  int64_t tokens);

/// Writes one shard under a temporary name and gives it its own when it is whole.
class ShardWriter {
 public:
  /// `samples` are the records in their order; `first_sample` is the number of the first one.
  ShardWriter(std::filesystem::path path, std::vector<FeatureTensor> features,
              std::span<const TokenSample> samples, int64_t first_sample,
              const std::string& recipe_fingerprint);
  /// Takes away what was not finished.
  ~ShardWriter();
  ShardWriter(const ShardWriter&) = delete;
  ShardWriter& operator=(const ShardWriter&) = delete;

  /// One feature of record `index` (from 0), [tokens of the sample, width] row-major. Records may come in any
  /// order.
  void put(int64_t index, size_t feature, std::span<const std::byte> bytes);
  /// Marks a record as not usable; readers skip it.
  void refuse(int64_t index);
  /// Syncs, names and checksums the shard.
  [[nodiscard]] FeatureShard finish();

 private:
  std::filesystem::path path_;
  std::filesystem::path part_;
  std::vector<FeatureTensor> features_;
  int64_t first_sample_;
  std::vector<int64_t> starts_;
  std::vector<int64_t> lengths_;  // 0: refused
  std::vector<int64_t> refused_;
  std::unique_ptr<SafetensorsWriter> writer_;
};

}  // namespace sf
