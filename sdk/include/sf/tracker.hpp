// sf/tracker.hpp: the C++ side of sf/tracker.h. A tracker in C++ is a class with these members, which may
// throw, and one line in its get_interface:
//
//   void begin(const sf::TrackedRun& run);
//   void record(std::int64_t step, const std::vector<sf::Figure>& figures);
//   void finish();
//   const void* get_interface(std::string_view id) { return id == SF_TRACKER ? sf::tracker_calls<Mine>() : nullptr; }
//
// The object that SF_PLUGIN creates is the one that is called.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "sf/plugin.hpp"
#include "sf/tracker.h"

namespace sf {

/// As sf_tracked_run.
struct TrackedRun {
  std::string run_id, run_folder, recipe;
  std::int64_t first_step = 1, steps_total = 0;
};

/// As sf_figure; the name is borrowed for the call.
struct Figure {
  std::string_view name;
  double value = 0;
};

/// The functions of sf_tracker for a class; what its members throw becomes a status.
template <class T>
[[nodiscard]] const sf_tracker* tracker_calls() {
  static constexpr sf_tracker kCalls = {
      sizeof(sf_tracker), 0,
      [](sf_instance* instance, const sf_tracked_run* run, sf_status* status) -> std::int32_t {
        return guard(status, [&] {
          PluginCalls<T>::self(instance).begin(TrackedRun{.run_id = run->run_id,
                                                          .run_folder = run->run_folder,
                                                          .recipe = run->recipe,
                                                          .first_step = run->first_step,
                                                          .steps_total = run->steps_total});
        });
      },
      [](sf_instance* instance, std::int64_t step, const sf_figure* const* figures, sf_status* status) -> std::int32_t {
        return guard(status, [&] {
          std::vector<Figure> all;
          for (const sf_figure* const* at = figures; *at != nullptr; ++at) {
            all.push_back({(*at)->name, (*at)->value});
          }
          PluginCalls<T>::self(instance).record(step, all);
        });
      },
      [](sf_instance* instance, sf_status* status) -> std::int32_t {
        return guard(status, [&] { PluginCalls<T>::self(instance).finish(); });
      }};
  return &kCalls;
}

}  // namespace sf
