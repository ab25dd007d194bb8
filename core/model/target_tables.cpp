#include "core/model/target_tables.hpp"

#include "core/base/error.hpp"
#include "core/data/feature_store.hpp"
#include "core/data/target_config.hpp"
#include "core/data/weight_folder.hpp"
#include "core/model/tensor_view.hpp"

#include <ATen/ATen.h>

namespace sf {

TargetTables load_target_tables(const TargetTableOptions& options) {
  const Json json = read_model_config(options.folder);
  const TargetConfig config = target_config(json, (options.folder / "config.json").string());
  const WeightFolder weights = WeightFolder::open(options.folder);
  const TargetTableViews views = find_target_tables(weights, config,
                                                    {.embedding = options.embedding_key,
                                                     .head = options.lm_head_key,
                                                     .wants_embedding = options.embedding,
                                                     .wants_head = options.head});
  // A copy also where the type fits already: a table must not sit on a file that someone may replace during
  // the run.
  const auto load = [&](const TensorView& view) {
    if (const int64_t at = first_not_finite(view.dtype, view.bytes); at >= 0) {
      throw Error(ExitCode::kData,
                  format("{}: '{}' has a value that is not finite (NaN or infinity) at token {}, column {}",
                         options.folder, view.name, at / config.hidden_size, at % config.hidden_size),
                  "the weights are damaged: fetch the model again");
    }
    return as_tensor(view).to(at::TensorOptions().dtype(options.dtype).device(options.device),
                              /*non_blocking=*/false, /*copy=*/true);
  };
  TargetTables tables;
  if (views.embedding != nullptr) tables.embedding_vh = load(*views.embedding);
  if (views.head != nullptr) {
    tables.head_vh = views.head == views.embedding ? tables.embedding_vh : load(*views.head);
    if (config.logits_width_multiplier != 0) tables.head_vh.div_(config.logits_width_multiplier);
  }
  return tables;
}

}  // namespace sf
