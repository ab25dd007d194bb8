// core/data/plugin_services.hpp: the services of sf/services.h for one plugin.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "sf/services.h"

namespace sf {

class PluginServices {
 public:
  /// `run_folder` need not exist yet.
  PluginServices(std::string plugin, std::uint64_t seed, const std::filesystem::path& run_folder);
  PluginServices(const PluginServices&) = delete;
  PluginServices& operator=(const PluginServices&) = delete;

  /// The service, or null when it is none of these; valid as long as this object.
  [[nodiscard]] const void* find(std::string_view id) const;

 private:
  std::string plugin_;
  std::uint64_t seed_;
  std::string folder_;
  sf_random random_{};
  sf_run_files files_{};
};

}  // namespace sf
