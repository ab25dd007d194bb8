// tests/plugin/fake_files.hpp: the built fake plugins, and copies of them with changed bytes.
#pragma once

#include <doctest/doctest.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <string>

#include "core/base/file.hpp"
#include "core/plugin/catalog.hpp"
#include "sf/plugin.h"

#include <unistd.h>

namespace sf {

namespace fs = std::filesystem;

inline fs::path good_plugins() {
  return fs::path(SF_BUILD_DIR) / "tests" / "plugins" / "good";
}
inline fs::path bad_plugins() {
  return fs::path(SF_BUILD_DIR) / "tests" / "plugins" / "bad";
}

/// A folder of this test that only we can write, gone at the end.
struct TemporaryFolder {
  fs::path path = fs::canonical(fs::temp_directory_path()) / ("sf-test-plugin-" + std::to_string(getpid()));
  TemporaryFolder() {
    fs::remove_all(path);
    fs::create_directories(path);
    fs::permissions(path, fs::perms::owner_all);
  }
  ~TemporaryFolder() { fs::remove_all(path); }
};

inline void write_plugin(const fs::path& path, const std::string& bytes) {
  atomic_write(path, bytes);
  fs::permissions(path, fs::perms(0755));
}

/// Bytes of a good plugin with its build note changed.
inline std::string with_note(const fs::path& plugin, const std::function<void(sf_build&)>& change) {
  std::string bytes = read_file(plugin);
  sf_build build{};
  build.struct_size = sizeof build;
  std::string head(reinterpret_cast<const char*>(&build.struct_size), 4);
  // The owner, padded to twelve bytes, is followed by the note itself.
  std::size_t at = bytes.find(std::string(SF_NOTE_OWNER) + std::string(3, '\0') + head);
  REQUIRE(at != std::string::npos);
  at += 12;
  std::memcpy(&build, bytes.data() + at, sizeof build);
  change(build);
  std::memcpy(bytes.data() + at, &build, sizeof build);
  return bytes;
}

/// Bytes of a good plugin with a text replaced by another of the same length.
inline std::string with_text(const fs::path& plugin, const std::string& from, const std::string& to) {
  std::string bytes = read_file(plugin);
  REQUIRE(from.size() == to.size());
  std::size_t at = bytes.find(from);
  REQUIRE(at != std::string::npos);
  return bytes.replace(at, from.size(), to);
}

template <std::size_t N>
void set_field(char (&field)[N], const std::string& text) {
  std::memset(field, 0, N);
  std::memcpy(field, text.data(), std::min(text.size(), N - 1));
}

/// This host, as if it had LibTorch 2.11.0+cu130.
inline HostBuild torch_host() {
  return this_host("2.11.0+cu130", "/nonexistent");
}

}  // namespace sf
