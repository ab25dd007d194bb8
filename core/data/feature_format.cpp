#include "core/data/feature_format.hpp"

#include "core/base/error.hpp"
#include "core/base/file.hpp"

#include <utility>

namespace sf {

namespace {

constexpr const char* kFormat = "sf-features";
constexpr int64_t kVersion = 1;

Json features_json(const std::vector<FeatureTensor>& features) {
  Json result = Json::object();
  for (const FeatureTensor& feature : features) {
    Json entry = Json::object({{"dtype", dtype_name(feature.dtype)}, {"width", feature.width}});
    if (feature.last_state) {
      entry.set("layer", "last_state");
    } else {
      entry.set("layer_ids", Json::array_of(feature.layer_ids));
    }
    result.set(feature.key, std::move(entry));
  }
  return result;
}

// A number that others are added to or multiplied with: of bytes, records, tokens, samples.
int64_t count_at(const Json& entry, const char* key) {
  constexpr int64_t kMost = int64_t{1} << 48;
  const int64_t count = entry.at(key).as_int();
  if (count < 0 || count > kMost) throw JsonError(format("\"{}\" is {}, a number from 0 to 2^48 expected", key, count));
  return count;
}

std::span<const std::byte> bytes_of_numbers(const std::vector<int64_t>& numbers) {
  return std::as_bytes(std::span(numbers));
}

}  // namespace

int64_t FeatureManifest::records() const {
  int64_t sum = 0;
  for (const FeatureShard& shard : shards) sum += shard.records;
  return sum;
}

int64_t FeatureManifest::tokens() const {
  int64_t sum = 0;
  for (const FeatureShard& shard : shards) sum += shard.tokens;
  return sum;
}

std::string FeatureManifest::target_fingerprint() const {
  const Json* print = target.find("fingerprint");
  return print == nullptr ? "" : print->as_string();
}

std::string FeatureManifest::recipe_fingerprint() const {
  return sha256(std::string_view(format("{} {} {} {} {} {}", kFormat, kVersion, target_fingerprint(),
                                        features_json(features).dump(), tokens_sha256, max_length)));
}

std::string FeatureManifest::fingerprint() const {
  Sha256 sha;
  sha.add(recipe_fingerprint());
  for (const FeatureShard& shard : shards) sha.add(shard.sha256);
  return sha.hex();
}

Json FeatureManifest::to_json() const {
  Json list = Json::array();
  for (const FeatureShard& shard : shards) {
    Json entry = Json::object({{"file", shard.file},
                               {"bytes", shard.bytes},
                               {"sha256", shard.sha256},
                               {"first_sample", shard.first_sample},
                               {"records", shard.records},
                               {"tokens", shard.tokens}});
    if (!shard.refused.empty()) entry.set("refused", Json::array_of(shard.refused));
    list.push_back(std::move(entry));
  }
  return Json::object({{"format", kFormat},
                       {"version", kVersion},
                       {"fingerprint", fingerprint()},
                       {"target", target},
                       {"features", features_json(features)},
                       {"tokens_sha256", tokens_sha256},
                       {"max_length", max_length},
                       {"samples_unsupervised", samples_unsupervised},
                       {"records", records()},
                       {"tokens", tokens()},
                       {"shards", std::move(list)}});
}

FeatureManifest FeatureManifest::read(const std::filesystem::path& path) {
  FeatureManifest manifest;
  try {
    const Json json = Json::parse(read_file(path), path.string());
    if (!json.contains("format") || json.at("format").as_string() != kFormat) {
      throw Error(ExitCode::kData,
                  format("{}: not a manifest of features: there is no \"format\": \"{}\" in it", path, kFormat),
                  "capture the features again, or name another folder");
    }
    if (json.at("version").as_int() != kVersion) {
      throw Error(ExitCode::kData,
                  format("{}: written in version {} of the format, {} is understood", path,
                         json.at("version").as_int(), kVersion),
                  "capture the features again");
    }
    manifest.target = json.at("target");
    for (const auto& [key, entry] : json.at("features").entries()) {
      FeatureTensor feature;
      feature.key = key;
      const std::optional<Dtype> dtype = dtype_from_name(entry.at("dtype").as_string());
      if (!dtype) throw JsonError("unknown dtype " + entry.at("dtype").as_string());
      feature.dtype = *dtype;
      feature.width = count_at(entry, "width");
      feature.last_state = entry.contains("layer");
      if (!feature.last_state) {
        for (const Json& id : entry.at("layer_ids").items()) feature.layer_ids.push_back(id.as_int());
      }
      manifest.features.push_back(std::move(feature));
    }
    manifest.tokens_sha256 = json.at("tokens_sha256").as_string();
    manifest.max_length = count_at(json, "max_length");
    manifest.samples_unsupervised = count_at(json, "samples_unsupervised");
    for (const Json& entry : json.at("shards").items()) {
      FeatureShard shard;
      shard.file = entry.at("file").as_string();
      if (shard.file.empty() || shard.file.find('/') != std::string::npos)
        throw JsonError("shard '" + shard.file + "' is no file name");
      shard.bytes = count_at(entry, "bytes");
      shard.sha256 = entry.at("sha256").as_string();
      shard.first_sample = count_at(entry, "first_sample");
      shard.records = count_at(entry, "records");
      shard.tokens = count_at(entry, "tokens");
      if (const Json* refused = entry.find("refused")) {
        for (const Json& sample : refused->items()) shard.refused.push_back(sample.as_int());
      }
      manifest.shards.push_back(std::move(shard));
    }
    if (json.at("fingerprint").as_string() != manifest.fingerprint()) {
      throw Error(ExitCode::kData, format("{}: damaged: its content does not have its fingerprint", path),
                  "capture the features again");
    }
  } catch (const JsonError& error) {
    // What is no JSON names its place itself, file and all.
    throw Error(ExitCode::kData, error.line() > 0 ? error.what() : format("{}: {}", path, error.what()),
                "capture the features again");
  }
  return manifest;
}

int64_t shard_bytes(const std::vector<FeatureTensor>& features, int64_t records, int64_t tokens) {
  int64_t token_bytes = 2 * bytes_of(Dtype::kI64);
  for (const FeatureTensor& feature : features) token_bytes += feature.width * bytes_of(feature.dtype);
  return records * 3 * bytes_of(Dtype::kI64) + tokens * token_bytes;
}

ShardWriter::ShardWriter(std::filesystem::path path, std::vector<FeatureTensor> features,
                         std::span<const TokenSample> samples, int64_t first_sample,
                         const std::string& recipe_fingerprint)
    : path_(std::move(path)),
      part_(path_.string() + ".part"),
      features_(std::move(features)),
      first_sample_(first_sample) {
  const auto records = static_cast<int64_t>(samples.size());
  std::vector<int64_t> sample_numbers;
  std::vector<int64_t> ids;
  std::vector<int64_t> mask;
  for (const TokenSample& sample : samples) {
    sample_numbers.push_back(first_sample + static_cast<int64_t>(sample_numbers.size()));
    starts_.push_back(static_cast<int64_t>(ids.size()));
    lengths_.push_back(static_cast<int64_t>(sample.input_ids.size()));
    ids.insert(ids.end(), sample.input_ids.begin(), sample.input_ids.end());
    mask.insert(mask.end(), sample.loss_mask.begin(), sample.loss_mask.end());
  }
  const auto tokens = static_cast<int64_t>(ids.size());
  std::vector<TensorSpec> specs{{"record.sample", Dtype::kI64, {records}},
                                {"record.start", Dtype::kI64, {records}},
                                {"record.length", Dtype::kI64, {records}},
                                {"input_ids", Dtype::kI64, {tokens}},
                                {"loss_mask", Dtype::kI64, {tokens}}};
  for (const FeatureTensor& feature : features_)
    specs.push_back({feature.key, feature.dtype, {tokens, feature.width}});
  writer_ = std::make_unique<SafetensorsWriter>(
      part_, specs, std::map<std::string, std::string>{{"format", kFormat}, {"recipe", recipe_fingerprint}});
  writer_->write("record.sample", 0, bytes_of_numbers(sample_numbers));
  writer_->write("record.start", 0, bytes_of_numbers(starts_));
  writer_->write("input_ids", 0, bytes_of_numbers(ids));
  writer_->write("loss_mask", 0, bytes_of_numbers(mask));
}

ShardWriter::~ShardWriter() {
  if (writer_ == nullptr) return;
  writer_.reset();
  std::error_code ignored;
  std::filesystem::remove(part_, ignored);
}

void ShardWriter::put(int64_t index, size_t feature, std::span<const std::byte> bytes) {
  const FeatureTensor& what = features_.at(feature);
  const auto i = static_cast<size_t>(index);
  const int64_t row = what.width * bytes_of(what.dtype);
  SF_CHECK(static_cast<int64_t>(bytes.size()) == lengths_.at(i) * row,
           "record {} of '{}' has {} bytes, {} rows of {} expected", index, what.key, bytes.size(),
           lengths_.at(i), row);
  writer_->write(what.key, starts_.at(i) * row, bytes);
}

void ShardWriter::refuse(int64_t index) {
  lengths_.at(static_cast<size_t>(index)) = 0;
  refused_.push_back(first_sample_ + index);
}

FeatureShard ShardWriter::finish() {
  writer_->write("record.length", 0, bytes_of_numbers(lengths_));
  FeatureShard shard;
  shard.file = path_.filename().string();
  shard.bytes = writer_->file_bytes();
  shard.first_sample = first_sample_;
  for (const int64_t length : lengths_) {
    shard.records += length > 0 ? 1 : 0;
    shard.tokens += length;
  }
  shard.refused = refused_;
  writer_->finish();
  shard.sha256 = sha256_file(part_);
  std::error_code failed;
  std::filesystem::rename(part_, path_, failed);
  if (failed)
    throw Error(ExitCode::kData, format("{}: naming the finished shard: {}", path_, failed.message()));
  sync_path(path_.parent_path());
  writer_.reset();
  return shard;
}

}  // namespace sf
