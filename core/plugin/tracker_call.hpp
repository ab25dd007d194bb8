// core/plugin/tracker_call.hpp: how figures are handed to a tracker: the list of pointers that sf/tracker.h asks for. The trainer and sf-plugin-check call
// trackers through this alone, so that both hand over the same.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "sf/tracker.h"

namespace sf {

/// Calls `record` of a tracker with figures by name, in their order; none is an empty list. `status` is the tracker's answer, as the code is.
[[nodiscard]] std::int32_t record_figures(const sf_tracker& functions, sf_instance* instance, std::int64_t step,
                                          const std::vector<std::pair<std::string, double>>& figures, sf_status& status);

}  // namespace sf
