// core/base/file_system.hpp: failures of std::filesystem in our words, for where nobody nearer to the path has said what it is for.
#pragma once

#include <filesystem>

#include "core/base/text.hpp"
#include "sf/error.hpp"

namespace sf {

/// A path that can't be looked at (no permission on the way there, a link to itself, a disk that fails) is a failure of the world and not a mistake of this program.
[[nodiscard]] inline Error told_of_path(const std::filesystem::filesystem_error& error) {
  const std::filesystem::path& path = error.path1();
  return Error(ExitCode::kData, format("{}{}", path.empty() ? std::string() : path.string() + ": ", error.code().message()),
               "check the path, its links and the permissions of the folders on the way there");
}

}  // namespace sf
