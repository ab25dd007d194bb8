// core/plugin/catalog.hpp: what is installed: build notes and manifests of all files in the plugin folders,
// judged but not opened (checks 1 to 8, 10 and 11 of the design's list; 9 is the stack's, the rest the
// loader's).
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "core/base/diagnostics.hpp"
#include "core/plugin/search_path.hpp"
#include "core/recipe/manifest.hpp"
#include "sf/plugin.h"

namespace sf {

/// What a plugin must fit.
struct HostBuild {
  std::uint16_t abi_major = SF_ABI_MAJOR, abi_minor = SF_ABI_MINOR;
  std::string sdk_version = SF_SDK_VERSION;
  std::string torch_variant;  // "2.11.0+cu130"; empty: this host has no LibTorch
  std::uint32_t flags = 0;    // SF_BUILD_*
  std::vector<std::filesystem::path>
      library_folders;  // where the engine finds LibTorch and what comes with it
};

/// The host that this program is: compiler flags of this build, LibTorch's variant, library folders from the
/// engine's file when it is there.
[[nodiscard]] HostBuild this_host(const std::string& torch_variant, const std::filesystem::path& engine);

struct PluginFile {
  std::filesystem::path path;  // absolute
  std::string origin;          // of its folder, or "--plugin"
  std::string stem;            // "fp8" of fp8.so
  std::optional<sf_build> build;
  std::optional<Manifest> manifest;
  Diagnostics problems;  // why it can't be opened; all that could be found out

  [[nodiscard]] bool fits() const { return !problems.has_errors(); }
  /// Its name by the note, otherwise by the file.
  [[nodiscard]] std::string name() const;
  /// "/opt/sf/lib/sf/plugins/fp8.so (version 0.3.1, g++ 13.2.0)"
  [[nodiscard]] std::string describe() const;
};

[[nodiscard]] const char* kind_name(std::uint32_t kind);  // "sharding", ... or "unknown"
[[nodiscard]] bool is_plugin_name(std::string_view text);

/// Reads and judges one file.
[[nodiscard]] PluginFile inspect_plugin(const std::filesystem::path& path, const std::string& origin,
                                        const HostBuild& host);

class Catalog {
 public:
  /// Scans the request's folders for *.so. `named` are "name=/absolute/file.so" texts of --plugin; such a
  /// file goes before all folders. Problems: those of plugin_dirs, and plugin/bad-flag.
  Catalog(const SearchRequest& request, const std::vector<std::string>& named, const HostBuild& host,
          Diagnostics& problems);

  [[nodiscard]] const std::vector<PluginFile>& files() const { return files_; }
  [[nodiscard]] const std::vector<PluginDir>& dirs() const { return dirs_; }
  /// Manifests of all files that have a readable one.
  [[nodiscard]] std::vector<Manifest> manifests() const;

  /// The plugin of that name, if it may be opened. Otherwise null and plugin/bad-name, plugin/not-found,
  /// plugin/duplicate or what inspect_plugin found.
  [[nodiscard]] const PluginFile* find(const std::string& name, const Place& place,
                                       Diagnostics& problems) const;

 private:
  std::vector<PluginDir> dirs_;
  std::vector<PluginFile> files_;
};

}  // namespace sf
