// plugins/algorithm/eagle3/eagle3_options.hpp: the options of plugin.toml as a struct; what each means stands there.
#pragma once

#include <cstdint>
#include <string>

#include "sf/ops.hpp"

namespace sf {

struct Eagle3Options {
  int64_t ttt_length = 7;
  DistillLoss loss = DistillLoss::kl;
  double kl_scale = 1, kl_decay = 1;
  int64_t objective_chunk_rows = 1024;
  int64_t teacher_chunk_columns = 0;  // 0: as the device likes
  bool train_embedding = false;
  std::string vocab_mapping_path;     // empty: made from the training samples
  int64_t draft_vocab_size = 0;       // 0: as the configuration says
  bool eagle31 = false;               // for a configuration that is made here
};

}  // namespace sf
