// core/plan/window_note.hpp: what the data that is there says about a plan: a window that takes more samples than there are. No LibTorch.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "core/plan/plan.hpp"

namespace sf {

/// How many training samples there are: the features' manifest.json says it, else the lines of data.train_data_path. Nothing when neither can be read.
[[nodiscard]] std::optional<std::int64_t> samples_at_hand(const Plan& plan);

/// "a window takes 12 samples, and there are 2: ..." when it does; else empty.
[[nodiscard]] std::string window_note(const Plan& plan);

}  // namespace sf
