#include "core/data/inspect.hpp"

#include "core/base/error.hpp"
#include "core/data/feature_format.hpp"
#include "core/data/feature_store.hpp"
#include "core/data/torch_file.hpp"

#include <algorithm>

namespace sf {

namespace {

std::string count_text(int64_t count) {
  return human_count(static_cast<uint64_t>(count));
}

// What a folder offers, as needs: from its manifest, or from the keys of one of its .ckpt files.
FeatureNeeds offered(const FeatureInspection& what, std::string& features) {
  FeatureNeeds needs{.vocab_size = what.vocab_size,
                     .max_length = what.max_length,
                     .target_fingerprint = what.target_fingerprint,
                     .verify_checksums = true,
                     .named_by = what.named_by};
  const auto add = [&](FeatureNeed need, Dtype dtype) {
    features += format(", {} {} ({}{})", need.key, need.width, dtype_name(dtype),
                       need.layer_ids.empty() ? "" : format(", layers {}", need.layer_ids));
    needs.features.push_back(std::move(need));
  };
  if (std::filesystem::exists(what.folder / kManifestName)) {
    for (const FeatureTensor& feature : FeatureManifest::read(what.folder / kManifestName).features) {
      add({.key = feature.key,
           .width = feature.width,
           .layer_ids = feature.layer_ids,
           .last_state = feature.last_state},
          feature.dtype);
    }
    return needs;
  }
  const auto store = FeatureStore::open(what.folder, needs);
  const TorchFile first = TorchFile::open(store->record_name(0));
  for (const TensorView& tensor : first.tensors()) {
    if (is_floating(tensor.dtype) && !tensor.shape.empty())
      add({.key = tensor.name, .width = tensor.shape.back()}, tensor.dtype);
  }
  return needs;
}

}  // namespace

std::string inspect_target(const std::filesystem::path& folder, const TargetTableKeys& keys) {
  const Json json = read_model_config(folder);
  const TargetConfig config = target_config(json, (folder / "config.json").string());
  const WeightFolder weights = WeightFolder::open(folder);
  const TargetTableViews tables = find_target_tables(weights, config, keys);
  check_layer_count(weights, config);
  int64_t parameters = 0;
  for (const std::string& name : weights.names())
    parameters += element_count(weights.find(name)->shape).value_or(0);
  const std::string reason = why_not_runnable(json, config);
  const TensorView* table = tables.embedding != nullptr ? tables.embedding : tables.head;
  return format("{}, {} layers, hidden size {}, {} tokens, {}, {}, {} parameters; {}", config.model_type,
                config.num_hidden_layers, config.hidden_size, config.vocab_size,
                config.tied_embeddings ? "tied embeddings" : "a head of its own",
                table == nullptr ? "no tables" : dtype_name(table->dtype), count_text(parameters),
                reason.empty()
                    ? "capture can run it"
                    : format("capture can't run it ({}), features must come from elsewhere", reason));
}

std::string inspect_tokens(const std::filesystem::path& path, int64_t vocab_size, int64_t max_length) {
  int64_t tokens = 0;
  int64_t supervised = 0;
  int64_t cut = 0;
  int64_t unusable = 0;
  size_t longest = 0;
  const std::vector<TokenSample> samples = read_tokens(path, {.vocab_size = vocab_size});
  for (const TokenSample& sample : samples) {
    longest = std::max(longest, sample.input_ids.size());
    const size_t kept = max_length > 0 ? std::min(sample.loss_mask.size(), static_cast<size_t>(max_length))
                                       : sample.loss_mask.size();
    cut += kept < sample.loss_mask.size() ? 1 : 0;
    const std::vector<uint8_t> mask(sample.loss_mask.begin(),
                                    sample.loss_mask.begin() + static_cast<ptrdiff_t>(kept));
    tokens += static_cast<int64_t>(kept);
    supervised += std::count(mask.begin(), mask.end(), 1);
    unusable += has_supervised_pair(mask) ? 0 : 1;
  }
  if (unusable == static_cast<int64_t>(samples.size())) {
    throw Error(
        ExitCode::kData,
        format("{}: none of its {} samples has two neighbouring supervised tokens within max_length {}", path,
               samples.size(), max_length),
        "check loss_mask, or raise data.max_length");
  }
  std::string text =
      format("{} samples, {} tokens, {} supervised ({} %), longest {}", samples.size(), count_text(tokens),
             count_text(supervised), 100 * supervised / std::max<int64_t>(tokens, 1), longest);
  if (cut > 0) text += format("; {} are cut to max_length {}", cut, max_length);
  if (unusable > 0)
    text += format("; {} without two neighbouring supervised tokens will be left out", unusable);
  return text;
}

std::string inspect_features(const FeatureInspection& what) {
  std::string features;
  FeatureNeeds needs;
  needs.named_by = what.named_by;
  if (std::filesystem::is_directory(what.folder)) needs = offered(what, features);
  const auto store = FeatureStore::open(what.folder, needs);
  int64_t tokens = 0;
  int64_t unusable = 0;
  for (int64_t i = 0; i < store->size(); ++i) {
    (void)store->record(i);
    const TokenSample sample = store->sample_tokens(i);
    tokens += static_cast<int64_t>(sample.input_ids.size());
    unusable += has_supervised_pair(sample.loss_mask) ? 0 : 1;
  }
  if (unusable == store->size()) {
    throw Error(ExitCode::kData,
                format("{}: none of its {} records has two neighbouring supervised tokens", what.folder,
                       store->size()),
                "check loss_mask, or raise data.max_length");
  }
  std::string text = format("{} records, {} tokens{}; whole", store->size(), count_text(tokens), features);
  if (unusable > 0) text += format("; {} without two neighbouring supervised tokens", unusable);
  return text;
}

}  // namespace sf
