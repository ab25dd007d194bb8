// core/plugin/search_path.hpp
//
// Where plugins are looked for, and whether a folder may be trusted. In: flags and environment. Out:
// absolute, existing, safe folders, in order. Nothing here opens a library.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "core/base/diagnostics.hpp"

namespace sf {

struct PluginDir {
  std::filesystem::path path;  // absolute, symlinks resolved
  std::string origin;          // "--plugin-path", "SF_PLUGIN_PATH", "built-in"
};

struct SearchRequest {
  std::vector<std::string> flag_folders;    // --plugin-path, in order
  std::string environment;                  // SF_PLUGIN_PATH, split at ":"
  std::filesystem::path built_in;           // <prefix>/lib/sf/plugins; need not exist
  std::vector<std::string> allowed_unsafe;  // --allow-unsafe-path
};

/// Turns a request into folders to scan, in order: flags, environment, built-in. A folder that is relative
/// (plugin/bad-path), missing (plugin/bad-path) or unsafe (plugin/unsafe-path) becomes an error and is left
/// out; a missing built-in one is left out in silence.
[[nodiscard]] std::vector<PluginDir> plugin_dirs(const SearchRequest& request, Diagnostics& problems);

/// True when only root or this user can write `path` and every folder above it (folders above may have the
/// sticky bit instead, as /tmp). Symlinks are resolved first. `why` gets one sentence otherwise.
[[nodiscard]] bool is_safe_to_load_from(const std::filesystem::path& path, std::string& why);

/// True when `path` lies in a folder of `allowed`, which --allow-unsafe-path named.
[[nodiscard]] bool is_allowed_unsafe(const std::filesystem::path& path,
                                     const std::vector<std::string>& allowed);

}  // namespace sf
