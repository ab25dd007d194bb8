// The layout rules of the source tree: which folder may include which, and which library is included where.
#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <sstream>
#include <string>
#include <vector>

#include "core/base/file.hpp"

using namespace sf;
namespace fs = std::filesystem;

namespace {

struct Include {
  std::string file;    // relative to the repository
  std::string target;  // as written, without < > or quotes
};

std::vector<Include> all_includes() {
  std::vector<Include> out;
  fs::path root = fs::path(SF_TEST_DATA).parent_path();
  for (const char* folder : {"core", "sdk", "plugins", "tools"}) {
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(root / folder)) {
      std::string extension = entry.path().extension().string();
      if (extension != ".hpp" && extension != ".cpp" && extension != ".h" && extension != ".cu") {
        continue;
      }
      std::istringstream lines(read_file(entry.path()));
      for (std::string line; std::getline(lines, line);) {
        if (line.starts_with("#include ") && line.size() > 11) {
          std::size_t end = line.find_first_of("\">", 10);
          out.push_back({fs::relative(entry.path(), root).string(), line.substr(10, end - 10)});
        }
      }
    }
  }
  return out;
}

}  // namespace

TEST_CASE("layout: a folder of core includes only itself and what stands before it") {
  const std::vector<std::string> order = {"base",   "recipe", "plugin",  "plan", "data", "prepare", "doctor", "checkpoint",
                                          "export", "kernels", "model", "dist", "train"};
  auto place = [&](const std::string& path) {
    std::string folder = path.substr(5, path.find('/', 5) - 5);
    return std::find(order.begin(), order.end(), folder) - order.begin();
  };
  int seen = 0;
  for (const Include& include : all_includes()) {
    if (include.file.starts_with("core/") && include.target.starts_with("core/")) {
      CHECK_MESSAGE(place(include.target) <= place(include.file),
                    include.file << " includes " << include.target);
      ++seen;
    }
    // The host for tests and the checker are made of the trainer's own parts; authors get them as binaries.
    bool is_made_of_core = include.file.starts_with("sdk/testing/") || include.file.starts_with("sdk/check/");
    bool is_outside = (include.file.starts_with("sdk/") && !is_made_of_core) || include.file.starts_with("plugins/");
    CHECK_MESSAGE(!(is_outside && include.target.starts_with("core/")),
                  include.file << " includes " << include.target);
  }
  CHECK(seen > 50);
}

TEST_CASE("layout: each foreign library is included in its one place") {
  struct Rule {
    const char* prefix;
    std::vector<std::string> places;
  };
  const std::vector<Rule> rules = {{"spdlog/", {"core/base/log.cpp"}},
                                   {"fmt/", {"core/base/log.cpp"}},
                                   {"toml++/", {"core/recipe/toml_reader.cpp"}},
                                   {"nlohmann/", {"sdk/json/json.cpp"}},
                                   {"boost/", {"tools/sf-host/main.cpp", "core/plugin/loader.cpp"}},
                                   {"torch/torch.h", {}},
                                   {"torch/nn", {}}};
  for (const Include& include : all_includes()) {
    for (const Rule& rule : rules) {
      if (include.target.starts_with(rule.prefix)) {
        CHECK_MESSAGE(std::find(rule.places.begin(), rule.places.end(), include.file) != rule.places.end(),
                      include.file << " includes " << include.target);
      }
    }
  }
}

TEST_CASE("layout: headers have one LibTorch header at most, the small one, and none below the plan") {
  for (const Include& include : all_includes()) {
    bool is_header = include.file.ends_with(".hpp") || include.file.ends_with(".h");
    bool is_torch = include.target.starts_with("ATen/") || include.target.starts_with("torch/") ||
                    include.target.starts_with("c10/");
    if (is_header && is_torch) {
      CHECK_MESSAGE(include.target == "ATen/core/Tensor.h", include.file << " includes " << include.target);
    }
    for (const char* folder :
         {"core/base/", "core/recipe/", "core/plugin/", "core/plan/", "core/data/", "core/prepare/", "core/doctor/", "tools/"}) {
      CHECK_MESSAGE(!(is_torch && include.file.starts_with(folder)),
                    include.file << " includes " << include.target);
    }
  }
}
