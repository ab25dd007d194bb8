#include "core/data/feature_folder.hpp"

#include "core/base/error.hpp"
#include "core/base/file.hpp"

#include <algorithm>
#include <utility>

namespace sf {

namespace {

constexpr int64_t kHeaderBytes = 4096;  // of a shard, generously
constexpr int64_t kRoomKept =
    64ll << 20;  // left free on the disk, so that logs and manifests can still be written

bool is_shard_name(const std::string& name) {
  return name.starts_with("shard-") &&
         (name.ends_with(".safetensors") || name.ends_with(".safetensors.part"));
}

}  // namespace

std::vector<ShardPlan> plan_shards(const std::vector<FeatureTensor>& features,
                                   const std::vector<TokenSample>& samples, int64_t bytes_max) {
  std::vector<ShardPlan> plan;
  for (size_t i = 0; i < samples.size(); ++i) {
    const auto tokens = static_cast<int64_t>(samples[i].input_ids.size());
    if (plan.empty() ||
        shard_bytes(features, plan.back().samples + 1, plan.back().tokens + tokens) > bytes_max) {
      std::string number = std::to_string(plan.size());
      number.insert(0, 5 - std::min<size_t>(number.size(), 5), '0');
      plan.push_back(
          {.file = format("shard-{}.safetensors", number), .first_sample = static_cast<int64_t>(i)});
    }
    plan.back().samples += 1;
    plan.back().tokens += tokens;
    plan.back().bytes = shard_bytes(features, plan.back().samples, plan.back().tokens);
  }
  return plan;
}

FeatureFolder::FeatureFolder(const std::filesystem::path& folder, FeatureManifest wanted,
                             std::vector<ShardPlan> plan)
    : folder_(folder), wanted_(std::move(wanted)), plan_(std::move(plan)), shards_(plan_.size()) {
  std::error_code failed;
  std::filesystem::create_directories(folder_, failed);
  if (failed) throw Error(ExitCode::kData, format("{}: making the folder: {}", folder_, failed.message()));
  lock_ = std::make_unique<FolderLock>(folder_, ExitCode::kData, "another capture is writing to this folder",
                                       "wait for it, or name another folder");
  const bool finished = std::filesystem::exists(folder_ / kManifestName);
  const bool begun = std::filesystem::exists(folder_ / kUnfinishedName);
  if (finished || begun) {
    const std::filesystem::path path = folder_ / (finished ? kManifestName : kUnfinishedName);
    FeatureManifest found;
    try {
      found = FeatureManifest::read(path);
    } catch (const Error& error) {
      throw Error(error.code(), error.what(), format("remove {} to capture again", folder_));
    }
    if (found.recipe_fingerprint() != wanted_.recipe_fingerprint()) {
      std::string differs;
      const auto note = [&](bool different, const char* what) {
        if (different) differs += (differs.empty() ? "" : ", ") + std::string(what);
      };
      note(found.target_fingerprint() != wanted_.target_fingerprint(), "target");
      note(found.tokens_sha256 != wanted_.tokens_sha256, "tokens");
      note(found.features != wanted_.features, "layers, type or keys of the features");
      note(found.max_length != wanted_.max_length, "max_length");
      throw Error(ExitCode::kData,
                  format("{}: this folder holds another capture; different: {}", folder_, differs),
                  "name another folder, or remove this one");
    }
    take_over(found);
    was_finished_ = finished && std::all_of(shards_.begin(), shards_.end(),
                                            [](const auto& shard) { return shard.has_value(); });
  }
  for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(kManifestName) || name.starts_with(kUnfinishedName)) continue;
    if (!is_shard_name(name)) {
      throw Error(ExitCode::kData, format("{}: the folder has something else in it: '{}'", folder_, name),
                  "name a folder that is empty or does not exist yet");
    }
    if (!finished && !begun) {  // a capture writes capture.json before its first shard, so nobody knows whose this is
      throw Error(ExitCode::kData, format("{}: there is '{}' in it, but neither {} nor {}, which say what it belongs to", folder_, name, kManifestName, kUnfinishedName),
                  format("bring {} back to it, name another folder, or remove this one", kManifestName));
    }
  }
  if (was_finished_) return;
  // What is left of a killed capture, or of shards that were damaged, is written again.
  for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
    const std::string name = entry.path().filename().string();
    const bool kept = std::any_of(shards_.begin(), shards_.end(),
                                  [&](const auto& shard) { return shard && shard->file == name; });
    if (is_shard_name(name) && !kept) std::filesystem::remove(entry.path());
  }
  atomic_write(folder_ / kUnfinishedName, manifest_so_far().to_json().dump(2) + "\n");
  std::filesystem::remove(folder_ / kManifestName);
}

void FeatureFolder::take_over(const FeatureManifest& found) {
  // A finished capture counts whatever its shard size was; an unfinished one only where its shards are those
  // of the plan.
  int64_t samples = 0;
  for (const ShardPlan& shard : plan_) samples += shard.samples;
  int64_t samples_found = 0;
  for (const FeatureShard& shard : found.shards)
    samples_found += shard.records + static_cast<int64_t>(shard.refused.size());
  if (samples_found == samples) {
    plan_.clear();
    for (const FeatureShard& shard : found.shards) {
      const auto count = shard.records + static_cast<int64_t>(shard.refused.size());
      plan_.push_back({shard.file, shard.first_sample, count, shard.tokens, shard.bytes});
    }
    shards_.assign(plan_.size(), std::nullopt);
  }
  size_t placed = 0;
  int64_t largest = 0;
  for (const FeatureShard& shard : found.shards) {
    largest = std::max(largest, shard.bytes);
    for (size_t i = 0; i < plan_.size(); ++i) {
      const std::filesystem::path path = folder_ / shard.file;
      std::error_code failed;
      const bool same_place = shard.file == plan_[i].file && shard.first_sample == plan_[i].first_sample &&
                              shard.records + static_cast<int64_t>(shard.refused.size()) == plan_[i].samples;
      placed += same_place ? 1 : 0;
      if (same_place && std::filesystem::file_size(path, failed) == static_cast<uintmax_t>(shard.bytes) &&
          !failed && sha256_file(path) == shard.sha256) {
        shards_[i] = shard;
      }
    }
  }
  if (placed < found.shards.size()) {
    throw Error(ExitCode::kData,
                format("{}: the capture that was stopped here cut its shards in other places: {} of its {} finished ones do not fit, and going on would capture their samples again",
                       folder_, found.shards.size() - placed, found.shards.size()),
                format("set data.shard_bytes as it was (the largest one there has {}), or remove this folder to capture anew", human_bytes(static_cast<uint64_t>(largest))));
  }
}

int64_t FeatureFolder::bytes_left() const {
  int64_t sum = 0;
  for (size_t i = 0; i < plan_.size(); ++i) sum += has(i) ? 0 : plan_[i].bytes + kHeaderBytes;
  return sum;
}

int64_t FeatureFolder::tokens_left() const {
  int64_t sum = 0;
  for (size_t i = 0; i < plan_.size(); ++i) sum += has(i) ? 0 : plan_[i].tokens;
  return sum;
}

void FeatureFolder::require_room() const {
  const uint64_t free = free_bytes(folder_);
  const auto needed = static_cast<uint64_t>(bytes_left() + kRoomKept);
  if (needed > free) {
    throw Error(ExitCode::kData,
                format("{}: the features need {} and the disk has {} free", folder_, human_bytes(needed),
                       human_bytes(free)),
                "make room, name a folder on another disk, or capture fewer samples");
  }
}

FeatureManifest FeatureFolder::manifest_so_far() const {
  FeatureManifest manifest = wanted_;
  manifest.shards.clear();
  for (const auto& shard : shards_) {
    if (shard) manifest.shards.push_back(*shard);
  }
  return manifest;
}

void FeatureFolder::add(size_t shard, FeatureShard finished) {
  shards_.at(shard) = std::move(finished);
  atomic_write(folder_ / kUnfinishedName, manifest_so_far().to_json().dump(2) + "\n");
}

FeatureManifest FeatureFolder::finish() {
  SF_CHECK(std::all_of(shards_.begin(), shards_.end(), [](const auto& shard) { return shard.has_value(); }),
           "a capture with {} tokens left is not finished", tokens_left());
  FeatureManifest manifest = manifest_so_far();
  if (was_finished_) return manifest;
  atomic_write(folder_ / kManifestName, manifest.to_json().dump(2) + "\n");
  std::filesystem::remove(folder_ / kUnfinishedName);
  return manifest;
}

}  // namespace sf
