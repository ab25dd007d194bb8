#include "core/plugin/search_path.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "core/base/text.hpp"

#include <grp.h>
#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

namespace sf {
namespace {

namespace fs = std::filesystem;

std::string user_name(uid_t user) {
  std::array<char, 4096> buffer{};
  passwd entry{};
  passwd* found = nullptr;
  getpwuid_r(user, &entry, buffer.data(), buffer.size(), &found);
  return found != nullptr ? format("user \"{}\"", found->pw_name) : format("user {}", user);
}

std::string group_name(gid_t group) {
  std::array<char, 4096> buffer{};
  struct group entry {};
  struct group* found = nullptr;
  getgrgid_r(group, &entry, buffer.data(), buffer.size(), &found);
  return found != nullptr ? format("group \"{}\"", found->gr_name) : format("group {}", group);
}

}  // namespace

bool is_safe_to_load_from(const fs::path& path, std::string& why) {
  std::error_code error;
  fs::path real = fs::canonical(path, error);
  if (error) {
    why = format("\"{}\" can't be resolved: {}", path, error.message());
    return false;
  }
  bool is_above = false;
  for (fs::path at = real;; at = at.parent_path()) {
    struct stat info {};
    if (stat(at.c_str(), &info) != 0) {
      why = format("\"{}\" can't be examined: {}", at, std::strerror(errno));
      return false;
    }
    if (info.st_uid != 0 && info.st_uid != geteuid()) {
      why = format("\"{}\" belongs to {}", at, user_name(info.st_uid));
      return false;
    }
    bool is_sticky =
        is_above && (info.st_mode & S_ISVTX) != 0;  // others can't replace an entry that isn't theirs
    if ((info.st_mode & S_IWOTH) != 0 && !is_sticky) {
      why = format("\"{}\" can be written by everybody", at);
      return false;
    }
    if ((info.st_mode & S_IWGRP) != 0 && !is_sticky) {
      why = format("\"{}\" can be written by {}", at, group_name(info.st_gid));
      return false;
    }
    if (at == at.root_path()) {
      return true;
    }
    is_above = true;
  }
}

bool is_allowed_unsafe(const fs::path& path, const std::vector<std::string>& allowed) {
  return std::any_of(allowed.begin(), allowed.end(), [&](const std::string& folder) {
    fs::path wanted = fs::weakly_canonical(folder);
    fs::path real = fs::weakly_canonical(path);
    return std::mismatch(wanted.begin(), wanted.end(), real.begin(), real.end()).first == wanted.end();
  });
}

std::vector<PluginDir> plugin_dirs(const SearchRequest& request, Diagnostics& problems) {
  std::vector<PluginDir> wanted;
  for (const std::string& folder : request.flag_folders) {
    wanted.push_back({folder, "--plugin-path"});
  }
  for (const std::string& folder : split(request.environment, ':')) {
    if (!folder.empty()) {
      wanted.push_back({folder, "SF_PLUGIN_PATH"});
    }
  }
  if (!request.built_in.empty() && fs::is_directory(request.built_in)) {
    wanted.push_back({request.built_in, "built-in"});
  }
  std::vector<PluginDir> out;
  for (const PluginDir& dir : wanted) {
    if (!dir.path.is_absolute()) {
      problems.error({.id = "plugin/bad-path",
                      .message = format("{} has the relative folder \"{}\"", dir.origin, dir.path),
                      .why = "what a relative folder means depends on where the program is started",
                      .fix = "give the absolute path"});
      continue;
    }
    std::error_code error;
    if (!fs::is_directory(dir.path, error)) {
      problems.error({.id = "plugin/bad-path",
                      .message = format("\"{}\" of {} is not a folder", dir.path, dir.origin),
                      .fix = "check the path, or leave it out"});
      continue;
    }
    std::string why;
    if (!is_safe_to_load_from(dir.path, why) && !is_allowed_unsafe(dir.path, request.allowed_unsafe)) {
      problems.error(
          {.id = "plugin/unsafe-path",
           .message = format("{}; plugins are loaded only from folders that only root or you can write", why),
           .file = dir.path.string(),
           .why = "whoever can write there can run code as you",
           .fix = format("chmod go-w, another folder, or --allow-unsafe-path {}", dir.path)});
      continue;
    }
    fs::path real = fs::canonical(dir.path);
    if (std::none_of(out.begin(), out.end(), [&](const PluginDir& other) { return other.path == real; })) {
      out.push_back({real, dir.origin});
    }
  }
  return out;
}

}  // namespace sf
