#include "core/plugin/tracker_call.hpp"

namespace sf {

std::int32_t record_figures(const sf_tracker& functions, sf_instance* instance, std::int64_t step,
                            const std::vector<std::pair<std::string, double>>& figures, sf_status& status) {
  std::vector<sf_figure> list;
  list.reserve(figures.size());
  for (const auto& [name, value] : figures) {
    list.push_back({.struct_size = sizeof(sf_figure), .reserved = 0, .name = name.c_str(), .value = value});
  }
  std::vector<const sf_figure*> pointers;
  pointers.reserve(list.size() + 1);
  for (const sf_figure& figure : list) {
    pointers.push_back(&figure);
  }
  pointers.push_back(nullptr);
  return functions.record(instance, step, pointers.data(), &status);
}

}  // namespace sf
