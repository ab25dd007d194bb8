// core/checkpoint/presence.hpp: whether something has a name, for code that goes on when it can't be known. No LibTorch.
#pragma once

#include <filesystem>
#include <system_error>

namespace sf {

/// False also where the answer can't be had (a link to itself, a folder that can't be read): then what follows finds nothing, and nothing throws.
[[nodiscard]] inline bool is_there(const std::filesystem::path& path) {
  std::error_code unknown;
  return std::filesystem::exists(path, unknown);
}

}  // namespace sf
