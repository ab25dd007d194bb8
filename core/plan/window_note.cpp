#include "core/plan/window_note.hpp"

#include <exception>
#include <filesystem>
#include <fstream>

#include "core/base/file.hpp"
#include "core/base/text.hpp"
#include "sf/json.hpp"

namespace sf {

namespace fs = std::filesystem;

std::optional<std::int64_t> samples_at_hand(const Plan& plan) {
  if (plan.has("data.hidden_states_path") && !plan.get<fs::path>("data.hidden_states_path").empty()) {
    const fs::path manifest = plan.get<fs::path>("data.hidden_states_path") / "manifest.json";
    try {
      return Json::parse(read_file(manifest), manifest.string()).at("records").as_int();
    } catch (const std::exception&) {  // not captured yet, or not in our format; training says what is wrong with them
    }
  }
  if (!plan.has("data.train_data_path") || plan.get<fs::path>("data.train_data_path").empty()) {
    return std::nullopt;
  }
  std::ifstream file(plan.get<fs::path>("data.train_data_path"));
  if (!file) {
    return std::nullopt;
  }
  std::int64_t lines = 0;
  for (std::string line; std::getline(file, line);) {
    lines += trim(line).empty() ? 0 : 1;
  }
  return lines;
}

std::string window_note(const Plan& plan) {
  const std::optional<std::int64_t> samples = samples_at_hand(plan);
  const std::int64_t taken = plan.get<std::int64_t>("training.batch_size") * plan.get<std::int64_t>("training.accumulation_steps") * plan.ranks.count;
  if (!samples || taken <= *samples) {
    return "";
  }
  return format("a window takes {} samples ({} ranks x {} micro-steps x {}), and there are {}: it goes through the data more than once", taken,
                plan.ranks.count, plan.get<std::int64_t>("training.accumulation_steps"), plan.get<std::int64_t>("training.batch_size"), *samples);
}

}  // namespace sf
