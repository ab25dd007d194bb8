// core/data/feature_folder.hpp
//
// The folder that a capture writes: what of it is there already, how large the rest will be, and what makes
// it finished. A folder is known by its content: an interrupted capture goes on, a finished one is
// recognised, another one is not touched.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/base/file.hpp"
#include "core/data/feature_format.hpp"

namespace sf {

/// Neighbouring samples that share a shard.
struct ShardPlan {
  std::string file;
  int64_t first_sample = 0;
  int64_t samples = 0;
  int64_t tokens = 0;
  int64_t bytes = 0;  // without the header
};

/// Fills one shard after the other up to `bytes_max`; a sample that is larger alone gets a shard of its own.
[[nodiscard]] std::vector<ShardPlan> plan_shards(const std::vector<FeatureTensor>& features,
                                                 const std::vector<TokenSample>& samples, int64_t bytes_max);

class FeatureFolder {
 public:
  /// Makes the folder or looks at what is in it, and keeps other captures out until it is destroyed. `wanted`
  /// is the manifest without shards. Shards of an earlier capture of the same content are taken over when
  /// their checksums hold: of a finished one whatever their size, of a stopped one when `plan` cuts in the same
  /// places. Throws sf::Error (data) when the folder holds something else, shards without a manifest among it,
  /// or another capture writes to it; nothing is removed then.
  FeatureFolder(const std::filesystem::path& folder, FeatureManifest wanted, std::vector<ShardPlan> plan);
  FeatureFolder(const FeatureFolder&) = delete;
  FeatureFolder& operator=(const FeatureFolder&) = delete;

  [[nodiscard]] const std::vector<ShardPlan>& plan() const { return plan_; }
  [[nodiscard]] bool has(size_t shard) const { return shards_.at(shard).has_value(); }
  /// True when the manifest was there and every shard holds.
  [[nodiscard]] bool was_finished() const { return was_finished_; }
  [[nodiscard]] int64_t bytes_left() const;
  [[nodiscard]] int64_t tokens_left() const;
  /// Of the shards that are there; refused ones do not count.
  [[nodiscard]] int64_t records() const { return manifest_so_far().records(); }
  /// Throws sf::Error (data) when the disk has no room for what is left.
  void require_room() const;

  [[nodiscard]] std::filesystem::path shard_path(size_t shard) const {
    return folder_ / plan_.at(shard).file;
  }
  /// Notes a finished shard, so that it stays after a kill.
  void add(size_t shard, FeatureShard finished);
  /// All shards are there: writes the manifest. Returns it.
  FeatureManifest finish();
  /// With the shards that are there.
  [[nodiscard]] FeatureManifest manifest_so_far() const;

 private:
  void take_over(const FeatureManifest& found);

  std::filesystem::path folder_;
  FeatureManifest wanted_;
  std::vector<ShardPlan> plan_;
  std::vector<std::optional<FeatureShard>> shards_;
  bool was_finished_ = false;
  std::unique_ptr<FolderLock> lock_;
};

}  // namespace sf
