// Shapes: b batch · t padded tokens · f width of a feature
#include "core/model/capture.hpp"

#include "core/base/error.hpp"
#include "core/data/feature_folder.hpp"
#include "core/data/feature_store.hpp"
#include "core/data/weight_folder.hpp"
#include "core/model/target.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <optional>
#include <utility>

namespace sf {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

at::ScalarType stored_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBF16:
      return at::kBFloat16;
    case Dtype::kF16:
      return at::kHalf;
    default:
      return at::kFloat;
  }
}

// A line every few seconds: how far, how fast, how long still.
class Progress {
 public:
  Progress(const CaptureOptions& options, int64_t tokens_total)
      : options_(options), tokens_total_(tokens_total) {}

  void add(int64_t tokens) {
    tokens_ += tokens;
    if (!options_.log || seconds_since(reported_) < options_.seconds_between_reports) return;
    reported_ = Clock::now();
    const double rate = static_cast<double>(tokens_) / std::max(seconds(), 1e-9);
    options_.log(
        Level::kInfo,
        format("capture  {} / {} tokens  {} tok/s  {} left", human_count(static_cast<uint64_t>(tokens_)),
               human_count(static_cast<uint64_t>(tokens_total_)), human_count(static_cast<uint64_t>(rate)),
               human_duration(static_cast<double>(tokens_total_ - tokens_) / std::max(rate, 1e-9))));
  }
  [[nodiscard]] int64_t tokens() const { return tokens_; }
  [[nodiscard]] double seconds() const { return seconds_since(start_); }

 private:
  const CaptureOptions& options_;
  int64_t tokens_total_;
  int64_t tokens_ = 0;
  Clock::time_point start_ = Clock::now();
  Clock::time_point reported_ = start_;
};

// Everything that one shard after the other is made with.
class Capture {
 public:
  Capture(const CaptureOptions& options, std::vector<FeatureTensor> features,
          std::vector<TokenSample> samples, const Target* target, Progress& progress)
      : options_(options),
        features_(std::move(features)),
        samples_(std::move(samples)),
        target_(target),
        progress_(progress) {
    for (const FeatureTensor& feature : features_) {
      last_state_ = last_state_ || feature.last_state;
      layer_ids_.insert(layer_ids_.end(), feature.layer_ids.begin(), feature.layer_ids.end());
    }
    std::sort(layer_ids_.begin(), layer_ids_.end());
    layer_ids_.erase(std::unique(layer_ids_.begin(), layer_ids_.end()), layer_ids_.end());
  }

  /// False when a stop was requested; the shard is gone then.
  bool shard(const ShardPlan& plan, const std::filesystem::path& path, const std::string& recipe,
             FeatureShard& finished) {
    const auto samples = std::span(samples_).subspan(static_cast<size_t>(plan.first_sample),
                                                     static_cast<size_t>(plan.samples));
    ShardWriter writer(path, features_, samples, plan.first_sample, recipe);
    // Longest first: a batch holds samples of nearly one length, so little of it is padding, and memory peaks
    // at the start.
    std::vector<int64_t> order(samples.size());
    std::iota(order.begin(), order.end(), 0);
    const auto length = [&](int64_t i) {
      return static_cast<int64_t>(samples[static_cast<size_t>(i)].input_ids.size());
    };
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return length(a) > length(b); });
    for (size_t at = 0; at < order.size(); at += static_cast<size_t>(options_.batch_size)) {
      if (options_.stop_requested && options_.stop_requested()) return false;
      const size_t count = std::min(order.size() - at, static_cast<size_t>(options_.batch_size));
      batch(std::span(order).subspan(at, count), samples, writer);
    }
    finished = writer.finish();
    return true;
  }

 private:
  void batch(std::span<const int64_t> rows, std::span<const TokenSample> samples, ShardWriter& writer) {
    const auto b = static_cast<int64_t>(rows.size());
    int64_t t = 0;
    for (const int64_t row : rows)
      t = std::max(t, static_cast<int64_t>(samples[static_cast<size_t>(row)].input_ids.size()));
    at::Tensor ids_bt = at::zeros({b, t}, at::kLong);
    auto* ids = ids_bt.mutable_data_ptr<int64_t>();
    int64_t tokens = 0;
    for (int64_t j = 0; j < b; ++j) {
      const auto& sample = samples[static_cast<size_t>(rows[static_cast<size_t>(j)])].input_ids;
      std::copy(sample.begin(), sample.end(), ids + j * t);
      tokens += static_cast<int64_t>(sample.size());
    }
    if (target_ == nullptr) {   // tokens alone
      progress_.add(tokens);
      return;
    }
    const TargetStates states = target_->forward(
        {.input_ids_bt = ids_bt.to(options_.device), .layer_ids = layer_ids_, .last_state = last_state_});
    std::vector<bool> refused(rows.size(), false);
    for (size_t k = 0; k < features_.size(); ++k) {
      const FeatureTensor& feature = features_[k];
      std::vector<at::Tensor> parts;
      for (const int64_t id : feature.layer_ids) {
        const auto at = std::lower_bound(layer_ids_.begin(), layer_ids_.end(), id) - layer_ids_.begin();
        parts.push_back(states.layers_bth[static_cast<size_t>(at)]);
      }
      if (feature.last_state) parts.push_back(states.last_state_bth);
      const at::Tensor whole_btf = at::cat(parts, -1).to(stored_type(feature.dtype)).cpu().contiguous();
      const auto* bytes = static_cast<const std::byte*>(whole_btf.const_data_ptr());
      const auto row_bytes = static_cast<size_t>(feature.width * bytes_of(feature.dtype));
      for (size_t j = 0; j < rows.size(); ++j) {
        const TokenSample& sample = samples[static_cast<size_t>(rows[j])];
        const std::span<const std::byte> record(bytes + j * static_cast<size_t>(t) * row_bytes,
                                                sample.input_ids.size() * row_bytes);
        if (refused[j]) continue;
        if (const int64_t at = first_not_finite(feature.dtype, record); at >= 0) {
          refused[j] = true;
          writer.refuse(rows[j]);
          if (options_.log) {
            options_.log(
                Level::kWarn,
                format("sample '{}' is refused: '{}' is not finite (NaN or infinity) at token {}, column {}",
                       sample.id, feature.key, at / feature.width, at % feature.width));
          }
          continue;
        }
        writer.put(rows[j], k, record);
      }
    }
    progress_.add(tokens);
  }

  const CaptureOptions& options_;
  std::vector<FeatureTensor> features_;
  std::vector<TokenSample> samples_;
  const Target* target_;            // null: no feature is of its states
  Progress& progress_;
  std::vector<int64_t> layer_ids_;  // all that any feature needs, ascending
  bool last_state_ = false;
};

std::vector<FeatureTensor> described(const CaptureOptions& options, const TargetConfig& config,
                                     const std::string& source) {
  std::vector<FeatureTensor> features;
  for (const CapturedFeature& wanted : options.features) {
    for (const int64_t id : wanted.layer_ids) {
      if (id < 0 || id >= config.num_hidden_layers) {
        throw Error(ExitCode::kData,
                    format("{}: layer {} of '{}' does not exist, the target has the layers 0 to {}", source,
                           id, wanted.key, config.num_hidden_layers - 1),
                    "change model.target_layer_ids");
      }
    }
    SF_CHECK(wanted.last_state == wanted.layer_ids.empty(), "'{}' is layers or the last state", wanted.key);
    const auto parts = wanted.last_state ? int64_t{1} : static_cast<int64_t>(wanted.layer_ids.size());
    features.push_back(
        {wanted.key, options.dtype, parts * config.hidden_size, wanted.layer_ids, wanted.last_state});
  }
  return features;
}

size_t shards_missing(const FeatureFolder& folder) {
  size_t missing = 0;
  for (size_t i = 0; i < folder.plan().size(); ++i) missing += folder.has(i) ? 0 : 1;
  return missing;
}

}  // namespace

CaptureResult capture_features(const CaptureOptions& options) {
  const auto say = [&](Level level, const std::string& line) {
    if (options.log) options.log(level, line);
  };
  const std::string source = (options.target_folder / "config.json").string();
  const Json json = read_model_config(options.target_folder);
  const TargetConfig config = target_config(json, source);

  const WeightFolder weights = WeightFolder::open(options.target_folder);
  check_layer_count(weights, config);

  CaptureResult result;
  FeatureManifest wanted;
  wanted.features = described(options, config, source);
  wanted.max_length = options.max_length;
  wanted.target =
      Json::object({{"model_type", config.model_type},
                    {"hidden_size", config.hidden_size},
                    {"num_hidden_layers", config.num_hidden_layers},
                    {"vocab_size", config.vocab_size},
                    {"fingerprint", target_fingerprint(json, weights)}});
  std::vector<TokenSample> samples =
      read_tokens(options.tokens_path, {.vocab_size = config.vocab_size, .max_length = options.max_length});
  const size_t read = samples.size();
  std::erase_if(samples, [](const TokenSample& sample) { return !has_supervised_pair(sample.loss_mask); });
  wanted.samples_unsupervised = static_cast<int64_t>(read - samples.size());
  if (samples.empty()) {
    throw Error(
        ExitCode::kData,
        format("{}: none of its {} samples has two neighbouring supervised tokens within max_length {}",
               options.tokens_path, read, options.max_length),
        "check loss_mask, or raise data.max_length");
  }
  if (wanted.samples_unsupervised > 0) {
    say(Level::kWarn, format("{} of {} samples have no two neighbouring supervised tokens and are left out",
                             wanted.samples_unsupervised, read));
  }
  wanted.tokens_sha256 = tokens_fingerprint(samples);

  FeatureFolder folder(options.output, wanted, plan_shards(wanted.features, samples, options.shard_bytes));
  if (folder.was_finished()) {
    result.manifest = folder.finish();
    result.was_finished = true;
    say(Level::kInfo,
        format("'{}' has these features already: {} records, {} tokens", options.output,
               result.manifest.records(), human_count(static_cast<uint64_t>(result.manifest.tokens()))));
    return result;
  }
  folder.require_room();
  const size_t shards_left = shards_missing(folder);
  say(Level::kInfo,
      format("capturing {} samples, {} tokens, into '{}': {} in {} shards{}", samples.size(),
             human_count(static_cast<uint64_t>(folder.tokens_left())), options.output,
             human_bytes(static_cast<uint64_t>(folder.bytes_left())), shards_left,
             shards_left == folder.plan().size() ? ""
                                                 : format("; {} of {} shards are there already",
                                                          folder.plan().size() - shards_left, folder.plan().size())));

  int64_t layers_needed = 0;
  for (const FeatureTensor& feature : wanted.features) {
    if (feature.last_state) layers_needed = config.num_hidden_layers;
    for (const int64_t id : feature.layer_ids) layers_needed = std::max(layers_needed, id + 1);
  }
  std::optional<Target> target;
  if (!wanted.features.empty()) {
    target = Target::load({.folder = options.target_folder,
                           .dtype = compute_type(config, options.device),
                           .device = options.device,
                           .layers_needed = layers_needed,
                           .embedding_key = options.embedding_key,
                           .lm_head_key = options.lm_head_key});
  } else {
    say(Level::kInfo, "the algorithm reads nothing of the target's states: tokens and masks are stored alone");
  }
  Progress progress(options, folder.tokens_left());
  Capture capture(options, wanted.features, std::move(samples), target ? &*target : nullptr, progress);
  const std::string recipe = wanted.recipe_fingerprint();
  for (size_t i = 0; i < folder.plan().size(); ++i) {
    if (folder.has(i)) continue;
    FeatureShard finished;
    if (!capture.shard(folder.plan()[i], folder.shard_path(i), recipe, finished)) {
      result.interrupted = true;
      say(Level::kWarn,
          format("stopped; run the same capture again to go on from its {} finished shards",
                 folder.plan().size() - shards_missing(folder)));
      break;
    }
    folder.add(i, std::move(finished));
  }
  result.tokens_captured = progress.tokens();
  result.seconds = progress.seconds();
  if (result.interrupted) {
    result.manifest = folder.manifest_so_far();
    return result;
  }
  if (folder.records() == 0) {
    throw Error(ExitCode::kData, format("{}: not one sample gave finite features", options.output),
                "check the target's weights and data type");
  }
  result.manifest = folder.finish();
  say(Level::kInfo,
      format("captured {} records, {} tokens in {} ({} tok/s)", result.manifest.records(),
             human_count(static_cast<uint64_t>(result.manifest.tokens())), human_duration(result.seconds),
             human_count(static_cast<uint64_t>(static_cast<double>(result.tokens_captured) /
                                               std::max(result.seconds, 1e-9)))));
  return result;
}

}  // namespace sf
