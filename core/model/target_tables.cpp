#include "core/model/target_tables.hpp"

#include "core/base/error.hpp"
#include "core/data/target_config.hpp"
#include "core/data/weight_folder.hpp"
#include "core/model/tensor_view.hpp"

#include <ATen/ATen.h>

namespace sf {

namespace {

at::Tensor load_table(const WeightFolder& weights, const std::string& key, const char* option,
                      const char* what, const TargetConfig& config, const TargetTableOptions& options) {
  const TensorView* view = weights.find_in_decoder(key);
  if (view == nullptr) {
    const std::string near = did_you_mean(key, weights.names());
    throw Error(ExitCode::kData, format("{}: the target has no {} '{}'", options.folder, what, key),
                format("name its tensor with {}{}", option,
                       near.empty() ? "" : format("; did you mean '{}'?", near)));
  }
  const std::vector<int64_t> expected{config.vocab_size, config.hidden_size};
  if (view->shape != expected) {
    throw Error(ExitCode::kData,
                format("{}: '{}' has shape {}, but config.json says {} (vocab_size, hidden_size)",
                       options.folder, view->name, view->shape, expected),
                "configuration and weights are of different models, or padded_vocab_size is missing");
  }
  if (!is_floating(view->dtype)) {
    throw Error(ExitCode::kData, format("{}: '{}' is {}, a floating type expected", options.folder,
                                        view->name, dtype_name(view->dtype)));
  }
  // A copy also where the type fits already: the table must not sit on a file that someone may replace during
  // the run.
  return as_tensor(*view).to(at::TensorOptions().dtype(options.dtype).device(options.device),
                             /*non_blocking=*/false, /*copy=*/true);
}

}  // namespace

TargetTables load_target_tables(const TargetTableOptions& options) {
  const Json json = read_model_config(options.folder);
  const TargetConfig config = target_config(json, (options.folder / "config.json").string());
  const WeightFolder weights = WeightFolder::open(options.folder);
  TargetTables tables;
  if (options.embedding || (options.head && config.tied_embeddings)) {
    tables.embedding_vh =
        load_table(weights, options.embedding_key, "model.embedding_key", "embedding", config, options);
  }
  if (options.head) {
    if (config.tied_embeddings) {
      tables.head_vh = tables.embedding_vh;
    } else {
      tables.head_vh = load_table(weights, options.lm_head_key, "model.lm_head_key", "head", config, options);
      if (config.logits_width_multiplier != 0) tables.head_vh.div_(config.logits_width_multiplier);
    }
  }
  if (!options.embedding) tables.embedding_vh = at::Tensor();
  return tables;
}

}  // namespace sf
