#include "core/plugin/search_path.hpp"
#include "tests/plugin/fake_files.hpp"

#include <sys/stat.h>

using namespace sf;

TEST_CASE(
    "search path: flags go before the environment, the built-in folder comes last, repeated ones count "
    "once") {
  TemporaryFolder folder;
  for (const char* name : {"a", "b", "c"}) {
    fs::create_directory(folder.path / name);
    fs::permissions(folder.path / name, fs::perms(0755));
  }
  Diagnostics problems;
  auto dirs = plugin_dirs({.flag_folders = {folder.path / "a"},
                           .environment = (folder.path / "b").string() + "::" + (folder.path / "a").string(),
                           .built_in = folder.path / "c",
                           .allowed_unsafe = {}},
                          problems);
  REQUIRE_MESSAGE(!problems.has_errors(), problems.text());
  REQUIRE(dirs.size() == 3);
  CHECK(dirs[0].path == folder.path / "a");
  CHECK(dirs[0].origin == "--plugin-path");
  CHECK(dirs[1].origin == "SF_PLUGIN_PATH");
  CHECK(dirs[2].origin == "built-in");
}

TEST_CASE("search path: relative and missing folders are errors, a missing built-in one is not") {
  Diagnostics problems;
  auto dirs = plugin_dirs({.flag_folders = {"plugins"},
                           .environment = "/nonexistent/x",
                           .built_in = "/nonexistent/y",
                           .allowed_unsafe = {}},
                          problems);
  CHECK(dirs.empty());
  CHECK(problems.error_count() == 2);
  CHECK(problems.contains("plugin/bad-path"));
}

TEST_CASE("search path: a folder that others can write is refused unless it is allowed by name") {
  TemporaryFolder folder;
  fs::path open = folder.path / "open";
  fs::create_directory(open);
  std::string why;
  fs::permissions(open, fs::perms(0755));
  CHECK(is_safe_to_load_from(open, why));
  fs::permissions(open, fs::perms(0777));
  CHECK_FALSE(is_safe_to_load_from(open, why));
  CHECK(why.find("can be written by everybody") != std::string::npos);
  fs::permissions(open, fs::perms(0775));
  CHECK_FALSE(is_safe_to_load_from(open, why));
  CHECK(why.find("can be written by group") != std::string::npos);

  fs::path below = open / "below";
  fs::create_directory(below);
  fs::permissions(below, fs::perms(0755));
  CHECK_FALSE(is_safe_to_load_from(below, why));  // whoever writes the folder above can replace this one
  chmod(open.c_str(), 01777);
  CHECK(is_safe_to_load_from(below, why));  // as below /tmp
  CHECK_FALSE(is_safe_to_load_from(open, why));

  fs::create_symlink(open, folder.path / "link");
  CHECK_FALSE(is_safe_to_load_from(folder.path / "link", why));

  Diagnostics refused;
  CHECK(
      plugin_dirs({.flag_folders = {open}, .environment = "", .built_in = {}, .allowed_unsafe = {}}, refused)
          .empty());
  CHECK(refused.contains("plugin/unsafe-path"));
  Diagnostics allowed;
  CHECK(plugin_dirs({.flag_folders = {open}, .environment = "", .built_in = {}, .allowed_unsafe = {open}},
                    allowed)
            .size() == 1);
  CHECK_FALSE(allowed.has_errors());
  CHECK(is_allowed_unsafe(below, {open}));
  CHECK_FALSE(is_allowed_unsafe(folder.path, {open}));
}
