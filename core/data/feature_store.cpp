#include "core/data/feature_store.hpp"

#include "core/base/error.hpp"
#include "core/base/file.hpp"
#include "core/data/feature_format.hpp"
#include "core/data/torch_file.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <unordered_map>

namespace sf {

namespace {

// A value is NaN or infinite when all bits of its exponent are set. Whole blocks are looked at without a
// branch for each.
template <class Bits>
int64_t first_with_all(std::span<const std::byte> bytes, Bits exponent) {
  const size_t count = bytes.size() / sizeof(Bits);
  constexpr size_t kBlock = 1024;
  Bits block[kBlock];
  for (size_t start = 0; start < count; start += kBlock) {
    const size_t here = std::min(kBlock, count - start);
    std::memcpy(block, bytes.data() + start * sizeof(Bits), here * sizeof(Bits));
    unsigned found = 0;
    for (size_t i = 0; i < here; ++i) found |= static_cast<unsigned>((block[i] & exponent) == exponent);
    if (found == 0) continue;
    for (size_t i = 0; i < here; ++i) {
      if ((block[i] & exponent) == exponent) return static_cast<int64_t>(start + i);
    }
  }
  return -1;
}

// A [1, s, ...] tensor of the reference as [s, ...].
void drop_leading_one(TensorView& view, size_t axes) {
  if (view.shape.size() == axes + 1 && view.shape[0] == 1) view.shape.erase(view.shape.begin());
}

// Integers of any width as int64, so that readers know one type.
TensorView as_int64(const TensorView& view) {
  if (view.dtype == Dtype::kI64) return view;
  auto numbers = std::make_shared<std::vector<int64_t>>();
  const auto widen = [&](auto zero) {
    using Number = decltype(zero);
    for (size_t at = 0; at + sizeof(Number) <= view.bytes.size(); at += sizeof(Number)) {
      Number number;
      std::memcpy(&number, view.bytes.data() + at, sizeof(number));
      numbers->push_back(static_cast<int64_t>(number));
    }
  };
  switch (view.dtype) {
    case Dtype::kBool:
    case Dtype::kU8:
      widen(uint8_t{0});
      break;
    case Dtype::kI8:
      widen(int8_t{0});
      break;
    case Dtype::kI16:
      widen(int16_t{0});
      break;
    case Dtype::kI32:
      widen(int32_t{0});
      break;
    default:
      return view;  // left for the check to refuse
  }
  TensorView result = view;
  result.dtype = Dtype::kI64;
  result.bytes = std::as_bytes(std::span(*numbers));
  result.owner = numbers;
  return result;
}

std::span<const int64_t> numbers_of(const TensorView& view, std::vector<int64_t>& aligned) {
  aligned.resize(view.bytes.size() / sizeof(int64_t));
  if (aligned.empty()) return {};  // a shard whose records were all refused
  std::memcpy(aligned.data(), view.bytes.data(), aligned.size() * sizeof(int64_t));
  return aligned;
}

void cut(TensorView& view, int64_t tokens) {
  if (view.shape[0] <= tokens) return;
  view.bytes =
      view.bytes.first(view.bytes.size() / static_cast<size_t>(view.shape[0]) * static_cast<size_t>(tokens));
  view.shape[0] = tokens;
}

// Some layers of a tensor that has more, or has them in another order.
TensorView take_columns(const TensorView& view, const std::vector<int64_t>& parts, int64_t part_width) {
  const auto tokens = static_cast<size_t>(view.shape[0]);
  const auto part_bytes = static_cast<size_t>(part_width * bytes_of(view.dtype));
  const size_t from_row = view.bytes.size() / tokens;
  const size_t to_row = part_bytes * parts.size();
  auto bytes = std::make_shared<std::vector<std::byte>>(tokens * to_row);
  for (size_t t = 0; t < tokens; ++t) {
    for (size_t i = 0; i < parts.size();) {
      size_t count = 1;  // neighbours go together
      while (i + count < parts.size() && parts[i + count] == parts[i] + static_cast<int64_t>(count)) ++count;
      std::memcpy(bytes->data() + t * to_row + i * part_bytes,
                  view.bytes.data() + t * from_row + static_cast<size_t>(parts[i]) * part_bytes, count * part_bytes);
      i += count;
    }
  }
  TensorView result = view;
  result.shape[1] = static_cast<int64_t>(parts.size()) * part_width;
  result.bytes = std::span<const std::byte>(*bytes);
  result.owner = bytes;
  return result;
}

constexpr const char* kAgainHint = "capture the features again, or take the file out of the folder";
constexpr const char* kCaptureAgainHint = "capture the features again";

std::string named_by_hint(const FeatureNeeds& needs) {
  return needs.named_by.empty() ? "sf-host capture makes such a folder"
                                : format("let {} name a folder that sf-host capture made, or one with .ckpt files", needs.named_by);
}

// Our format: all shards mapped, a table of records over them.
class ShardedStore final : public FeatureStore {
 public:
  ShardedStore(const std::filesystem::path& folder, FeatureNeeds needs) : FeatureStore(std::move(needs)) {
    const std::filesystem::path manifest_path = folder / kManifestName;
    const FeatureManifest manifest = FeatureManifest::read(manifest_path);
    fingerprint_ = manifest.fingerprint();
    target_fingerprint_ = manifest.target_fingerprint();
    check_manifest(manifest, manifest_path);
    for (const FeatureShard& entry : manifest.shards) {
      const std::filesystem::path path = folder / entry.file;
      if (!std::filesystem::is_regular_file(path)) {
        throw Error(ExitCode::kData, format("{}: the manifest names it, but it is missing", path),
                    "capture the features again");
      }
      Shard shard{SafetensorsFile::open(path), {}, {}};
      if (shard.file.file_bytes() != entry.bytes) {
        throw Error(
            ExitCode::kData,
            format("{}: has {} bytes, the manifest says {}", path, shard.file.file_bytes(), entry.bytes),
            "capture the features again");
      }
      if (needs_.verify_checksums && sha256_file(path) != entry.sha256) {
        throw Error(ExitCode::kData, format("{}: damaged: its SHA-256 is not the manifest's", path),
                    "capture the features again");
      }
      check_features(shard.file, manifest);
      add_records(shard, entry);
      shards_.push_back(std::move(shard));
    }
    if (records_.empty())
      throw Error(ExitCode::kData, format("{}: there is no record in these features", folder),
                  kCaptureAgainHint);
  }

  [[nodiscard]] int64_t size() const override { return static_cast<int64_t>(records_.size()); }
  [[nodiscard]] std::string record_name(int64_t index) const override {
    const Place& place = records_.at(static_cast<size_t>(index));
    return format("{}: record {}", shards_[place.shard].file.path(), place.record);
  }
  [[nodiscard]] const std::string& fingerprint() const override { return fingerprint_; }
  [[nodiscard]] std::string target_fingerprint() const override { return target_fingerprint_; }

 protected:
  [[nodiscard]] std::vector<TensorView> stored(int64_t index) const override {
    const Place& place = records_.at(static_cast<size_t>(index));
    const Shard& shard = shards_[place.shard];
    std::vector<TensorView> views;
    for (const TensorView& whole : shard.file.tensors()) {
      if (whole.name.starts_with("record.")) continue;
      TensorView view = whole;
      const int64_t row = static_cast<int64_t>(whole.bytes.size()) / whole.shape[0];
      view.shape[0] = place.length;
      view.bytes = whole.bytes.subspan(static_cast<size_t>(place.start * row),
                                       static_cast<size_t>(place.length * row));
      views.push_back(std::move(view));
    }
    return views;
  }

 private:
  struct Shard {
    SafetensorsFile file;
    std::vector<int64_t> starts, lengths;
  };
  struct Place {
    size_t shard;
    int64_t record, start, length;
  };

  void check_manifest(const FeatureManifest& manifest, const std::filesystem::path& path) {
    const std::string found = manifest.target_fingerprint();
    if (!needs_.target_fingerprint.empty() && found != needs_.target_fingerprint) {
      throw Error(ExitCode::kData,
                  format("{}: these features are of another target: its fingerprint is {}, "
                         "model.target_model_path has {}",
                         path, found.substr(0, 12), needs_.target_fingerprint.substr(0, 12)),
                  "capture features of this target, or name the target that they come from");
    }
    for (const FeatureNeed& need : needs_.features) {
      if (const FeatureTensor* feature = find(manifest, need)) {
        sources_[need.key] = source(*feature, need);
      } else if (!need.optional) {
        refuse(manifest, path, need);
      }
    }
  }

  // The stored tensor that has what is needed: of that name if it fits, else the one with the fewest layers.
  static const FeatureTensor* find(const FeatureManifest& manifest, const FeatureNeed& need) {
    const bool by_name = need.layer_ids.empty() && !need.last_state;
    const FeatureTensor* found = nullptr;
    for (const FeatureTensor& candidate : manifest.features) {
      const auto has = [&](int64_t id) {
        return std::find(candidate.layer_ids.begin(), candidate.layer_ids.end(), id) != candidate.layer_ids.end();
      };
      const bool fits = by_name           ? candidate.key == need.key
                        : need.last_state ? candidate.last_state
                                          : std::all_of(need.layer_ids.begin(), need.layer_ids.end(), has);
      if (!fits) continue;
      if (found == nullptr || candidate.key == need.key ||
          (found->key != need.key && candidate.layer_ids.size() < found->layer_ids.size()))
        found = &candidate;
    }
    return found;
  }

  static Source source(const FeatureTensor& feature, const FeatureNeed& need) {
    if (need.layer_ids.empty() || feature.layer_ids == need.layer_ids) return {feature.key, need.width};
    Source result{feature.key, feature.width};
    result.part_width = feature.width / static_cast<int64_t>(feature.layer_ids.size());
    for (const int64_t id : need.layer_ids) {
      result.parts.push_back(std::find(feature.layer_ids.begin(), feature.layer_ids.end(), id) - feature.layer_ids.begin());
    }
    return result;
  }

  [[noreturn]] static void refuse(const FeatureManifest& manifest, const std::filesystem::path& path, const FeatureNeed& need) {
    std::string there;
    std::vector<int64_t> missing = need.layer_ids;
    for (const FeatureTensor& feature : manifest.features) {
      there += format("{}'{}' ({})", there.empty() ? "" : ", ", feature.key,
                      feature.last_state ? std::string("the last state") : format("layers {}", feature.layer_ids));
      // What the tensor lacks that lacks the least.
      std::vector<int64_t> lacking;
      for (const int64_t id : need.layer_ids) {
        if (std::find(feature.layer_ids.begin(), feature.layer_ids.end(), id) == feature.layer_ids.end()) lacking.push_back(id);
      }
      if (lacking.size() < missing.size()) missing = lacking;
    }
    if (need.last_state) {
      throw Error(ExitCode::kData,
                  format("{}: the target's last state, which the draft reads as '{}', was not captured; there are: {}", path, need.key, there),
                  "capture again with this recipe, or with sf-host capture --for naming all algorithms that are to read it");
    }
    if (!need.layer_ids.empty()) {
      throw Error(ExitCode::kData,
                  format("{}: the draft reads layers {} as '{}', and layers {} were not captured; there are: {}", path, need.layer_ids, need.key,
                         missing, there),
                  "capture again with this recipe (sf-host capture --for takes what several algorithms read), or set model.target_layer_ids to captured ones");
    }
    throw Error(ExitCode::kData, format("{}: there is no feature '{}'; there are: {}", path, need.key, there), "capture the features for this algorithm");
  }

  // A type that was changed in the header alone would give wrong numbers without a word.
  static void check_features(const SafetensorsFile& file, const FeatureManifest& manifest) {
    for (const FeatureTensor& feature : manifest.features) {
      const TensorView& view = file.at(feature.key);
      if (view.dtype != feature.dtype) {
        throw Error(ExitCode::kData,
                    format("{}: '{}' is {}, the manifest says {}", file.path(), feature.key,
                           dtype_name(view.dtype), dtype_name(feature.dtype)),
                    kCaptureAgainHint);
      }
      if (view.shape.size() != 2 || view.shape[1] != feature.width) {
        throw Error(ExitCode::kData,
                    format("{}: '{}' has shape {}, the manifest says [tokens, {}]", file.path(), feature.key,
                           view.shape, feature.width),
                    kCaptureAgainHint);
      }
    }
  }

  void add_records(Shard& shard, const FeatureShard& entry) {
    const auto column = [&](const char* name) {
      const TensorView& view = shard.file.at(name);
      if (view.dtype != Dtype::kI64 || view.shape.size() != 1) {
        throw Error(ExitCode::kData,
                    format("{}: '{}' is {} {}, I64 [records] expected", shard.file.path(), name,
                           dtype_name(view.dtype), view.shape),
                    kCaptureAgainHint);
      }
      std::vector<int64_t> numbers;
      (void)numbers_of(view, numbers);
      return numbers;
    };
    shard.starts = column("record.start");
    shard.lengths = column("record.length");
    const std::vector<int64_t> samples = column("record.sample");
    if (samples.size() != shard.lengths.size() || shard.starts.size() != shard.lengths.size()) {
      throw Error(ExitCode::kData,
                  format("{}: 'record.sample' has {} entries, 'record.start' {} and 'record.length' {}; one for each record expected", shard.file.path(),
                         samples.size(), shard.starts.size(), shard.lengths.size()),
                  kCaptureAgainHint);
    }
    const TensorView& ids = shard.file.at("input_ids");
    const int64_t tokens = ids.shape.empty() ? 0 : ids.shape[0];
    for (const TensorView& tensor : shard.file.tensors()) {
      if (!tensor.name.starts_with("record.") && (tensor.shape.empty() || tensor.shape[0] != tokens)) {
        throw Error(ExitCode::kData,
                    format("{}: '{}' has shape {}, but 'input_ids' {}", shard.file.path(), tensor.name,
                           tensor.shape, ids.shape),
                    kCaptureAgainHint);
      }
    }
    int64_t records = 0;
    for (size_t i = 0; i < shard.lengths.size(); ++i) {
      const int64_t length = shard.lengths[i];
      if (length == 0) continue;  // refused by the capture
      if (length < 0 || shard.starts[i] < 0 || shard.starts[i] > tokens - length) {
        throw Error(ExitCode::kData,
                    format("{}: record {} lies outside its {} tokens", shard.file.path(), i, tokens),
                    kCaptureAgainHint);
      }
      if (const auto [before, is_new] = record_of_sample_.emplace(samples[i], records_.size()); !is_new) {  // it would count twice in every epoch
        const Place& other = records_[before->second];
        const std::filesystem::path other_path = other.shard == shards_.size() ? shard.file.path() : shards_[other.shard].file.path();
        throw Error(ExitCode::kData,
                    format("{}: record {} is sample {}, which record {} of {} is already", shard.file.path(), i, samples[i], other.record,
                           other_path.filename()),
                    kCaptureAgainHint);
      }
      records_.push_back({shards_.size(), static_cast<int64_t>(i), shard.starts[i], length});
      ++records;
    }
    if (records != entry.records) {
      throw Error(ExitCode::kData,
                  format("{}: has {} records, the manifest says {}", shard.file.path(), records,
                         entry.records),
                  kCaptureAgainHint);
    }
  }

  [[nodiscard]] Source source_of(const FeatureNeed& need) const override {
    const auto found = sources_.find(need.key);
    return found == sources_.end() ? FeatureStore::source_of(need) : found->second;
  }

  std::map<std::string, Source> sources_;  // by the key of the need
  std::vector<Shard> shards_;
  std::vector<Place> records_;
  std::unordered_map<int64_t, size_t> record_of_sample_;
  std::string fingerprint_;
  std::string target_fingerprint_;
};

// The reference's layout: one file a record.
class TorchFolderStore final : public FeatureStore {
 public:
  TorchFolderStore(const std::filesystem::path& folder, std::vector<std::filesystem::path> files,
                   FeatureNeeds needs)
      : FeatureStore(std::move(needs)), files_(std::move(files)) {
    // Names, sizes and both ends of each file: enough to notice another data set, cheap for a hundred
    // thousand files.
    Sha256 sha;
    constexpr size_t kEnd = 4096;
    for (const std::filesystem::path& path : files_) {
      const MappedFile file(path);
      const auto bytes = file.bytes();
      sha.add(format("{} {};", path.lexically_relative(folder), bytes.size()));
      sha.add(bytes.first(std::min(kEnd, bytes.size())));
      sha.add(bytes.last(std::min(kEnd, bytes.size())));
    }
    fingerprint_ = sha.hex();
  }

  [[nodiscard]] int64_t size() const override { return static_cast<int64_t>(files_.size()); }
  [[nodiscard]] std::string record_name(int64_t index) const override {
    return files_.at(static_cast<size_t>(index)).string();
  }
  [[nodiscard]] const std::string& fingerprint() const override { return fingerprint_; }

 protected:
  [[nodiscard]] std::vector<TensorView> stored(int64_t index) const override {
    return TorchFile::open(files_.at(static_cast<size_t>(index))).tensors();
  }

 private:
  std::vector<std::filesystem::path> files_;
  std::string fingerprint_;
};

std::vector<std::filesystem::path> torch_files(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (entry.is_regular_file() && (name.ends_with(".ckpt") || name.ends_with(".ckpt.gz"))) {
      files.push_back(std::filesystem::absolute(entry.path()).lexically_normal());
    }
  }
  std::sort(files.begin(), files.end(), [](const auto& a, const auto& b) { return a.string() < b.string(); });
  return files;
}

}  // namespace

int64_t first_not_finite(Dtype dtype, std::span<const std::byte> bytes) {
  switch (dtype) {
    case Dtype::kBF16:
      return first_with_all<uint16_t>(bytes, 0x7f80);
    case Dtype::kF16:
      return first_with_all<uint16_t>(bytes, 0x7c00);
    case Dtype::kF32:
      return first_with_all<uint32_t>(bytes, 0x7f800000);
    case Dtype::kF64:
      return first_with_all<uint64_t>(bytes, 0x7ff0000000000000);
    case Dtype::kF8E4M3:
      return first_with_all<uint8_t>(bytes, 0x7f);  // this type has no infinity and one NaN
    case Dtype::kF8E5M2:
      return first_with_all<uint8_t>(bytes, 0x7c);
    default:
      return -1;
  }
}

std::unique_ptr<FeatureStore> FeatureStore::open(const std::filesystem::path& folder,
                                                 const FeatureNeeds& needs) {
  if (!std::filesystem::is_directory(folder)) {
    throw Error(ExitCode::kData, format("{}: there is no such folder of features", folder), named_by_hint(needs));
  }
  std::unique_ptr<FeatureStore> store;
  if (std::filesystem::exists(folder / kManifestName)) {
    store = std::make_unique<ShardedStore>(folder, needs);
  } else if (std::filesystem::exists(folder / kUnfinishedName)) {
    throw Error(ExitCode::kData, format("{}: the capture of these features was not finished", folder),
                "run sf-host capture with the same recipe again: it goes on where it stopped");
  } else {
    std::vector<std::filesystem::path> files = torch_files(folder);
    if (files.empty()) {
      throw Error(ExitCode::kData,
                  format("{}: there are no features in this folder: no {}, no *.ckpt, no *.ckpt.gz", folder,
                         kManifestName),
                  named_by_hint(needs));
    }
    store = std::make_unique<TorchFolderStore>(folder, std::move(files), needs);
  }
  (void)store->record(0);
  return store;
}

std::vector<TensorView> FeatureStore::record(int64_t index) const {
  return checked(index, needs_.features);
}

std::vector<TensorView> FeatureStore::checked(int64_t index, const std::vector<FeatureNeed>& wanted) const {
  SF_CHECK(index >= 0 && index < size(), "record {} of {}", index, size());
  const auto refuse = [&](const std::string& what) -> Error {
    return Error(ExitCode::kData, format("{}: {}", record_name(index), what), kAgainHint);
  };
  std::vector<TensorView> all = stored(index);
  const auto take = [&](const std::string& key) -> TensorView* {
    for (TensorView& view : all) {
      if (view.name == key) return &view;
    }
    return nullptr;
  };
  const auto required = [&](const std::string& key) -> TensorView& {
    if (TensorView* view = take(key)) return *view;
    std::string keys;
    for (const TensorView& view : all) keys += (keys.empty() ? "" : ", ") + view.name;
    throw refuse(format("there is no key '{}'; there are: {}", key, keys));
  };

  std::vector<TensorView> result;
  int64_t tokens = -1;
  for (const char* key : {"input_ids", "loss_mask"}) {
    TensorView view = as_int64(required(key));
    drop_leading_one(view, 1);
    if (view.dtype != Dtype::kI64 || view.shape.size() != 1) {
      throw refuse(format("'{}' is {} {}, I64 [tokens] expected", key, dtype_name(view.dtype), view.shape));
    }
    if (tokens >= 0 && view.shape[0] != tokens) {
      throw refuse(format("'{}' has {} tokens, 'input_ids' has {}", key, view.shape[0], tokens));
    }
    tokens = view.shape[0];
    result.push_back(std::move(view));
  }
  if (tokens == 0) throw refuse("it has no tokens");
  std::vector<int64_t> aligned;
  for (const int64_t id : numbers_of(result[0], aligned)) {
    if (id < 0 || (needs_.vocab_size > 0 && id >= needs_.vocab_size)) {
      throw refuse(format("'input_ids' has the token {}, but the target has the tokens 0 to {}", id,
                          needs_.vocab_size - 1));
    }
  }
  const std::span<const int64_t> mask = numbers_of(result[1], aligned);
  for (size_t i = 0; i < mask.size(); ++i) {
    if (mask[i] != 0 && mask[i] != 1)
      throw refuse(format("'loss_mask' has the value {} at token {}, 0 or 1 expected", mask[i], i));
  }

  for (const FeatureNeed& need : wanted) {
    const Source source = source_of(need);
    if (need.optional && take(source.key) == nullptr) continue;
    TensorView view = required(source.key);
    drop_leading_one(view, 2);
    if (!is_floating(view.dtype)) {
      throw refuse(format("'{}' is {}, a floating type expected", need.key, dtype_name(view.dtype)));
    }
    if (view.shape.size() != 2 || view.shape[0] != tokens || view.shape[1] != source.width ||
        (!source.parts.empty() && static_cast<int64_t>(source.parts.size()) * source.part_width != need.width)) {
      throw refuse(format(
          "'{}' has shape {}, [{}, {}] expected (tokens, {})", source.key, view.shape, tokens, need.width,
          need.layer_ids.empty() ? std::string("hidden_size")
                                 : format("{} layers x hidden_size {}", need.layer_ids.size(),
                                          need.width / static_cast<int64_t>(need.layer_ids.size()))));
    }
    if (needs_.max_length > 0) cut(view, needs_.max_length);
    if (!source.parts.empty()) view = take_columns(view, source.parts, source.part_width);
    view.name = need.key;
    if (const int64_t at = first_not_finite(view.dtype, view.bytes); at >= 0) {
      throw refuse(format("'{}' has a value that is not finite (NaN or infinity) at token {}, column {}",
                          need.key, at / need.width, at % need.width));
    }
    result.push_back(std::move(view));
  }
  if (needs_.max_length > 0) {
    for (TensorView& view : result) cut(view, needs_.max_length);
  }
  return result;
}

TokenSample FeatureStore::sample_tokens(int64_t index) const {
  TokenSample sample;
  for (const TensorView& view : checked(index, {})) {
    std::vector<int64_t> numbers;
    if (view.name == "input_ids") {
      (void)numbers_of(view, sample.input_ids);
    } else if (view.name == "loss_mask") {
      for (const int64_t value : numbers_of(view, numbers))
        sample.loss_mask.push_back(static_cast<uint8_t>(value != 0));
    }
  }
  sample.id = record_name(index);
  return sample;
}

}  // namespace sf
