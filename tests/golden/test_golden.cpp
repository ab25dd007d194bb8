// recipes/NAME.toml → expected/NAME.txt: the plan, or all problems, as a user reads them. The first lines of
// a recipe may say
//   #! set KEY=VALUE      #! backend A+B      #! plugins bad      #! ranks N      #! run
// docs/recipes.md and docs/errors.md are compared with what the manifests say, too.
#include <algorithm>
#include <cstdlib>
#include <sstream>

#include "core/plan/print.hpp"
#include "core/plan/problem_list.hpp"
#include "core/plan/resolve.hpp"
#include "core/recipe/render.hpp"
#include "tests/plugin/fake_files.hpp"

using namespace sf;

namespace {

const bool kUpdate = std::getenv("SF_UPDATE_GOLDEN") != nullptr;

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  for (std::size_t at = text.find(from); at != std::string::npos;
       at = text.find(from, at + (from.find(to) == std::string::npos ? to.size() : 0))) {
    text.replace(at, from.size(), to);
  }
  return text;
}

// Without what differs between machines: folders, the compiler.
std::string neutral(std::string text) {
  text = replaced(text, fs::canonical(good_plugins()).string(), "GOOD");
  text = replaced(text, fs::canonical(bad_plugins()).string(), "BAD");
  text = replaced(text, SF_TEST_DATA "/golden", "GOLDEN");
  text = replaced(text, fs::current_path().string(), "HERE");
  for (std::size_t at = text.find(", g++ "); at != std::string::npos; at = text.find(", g++ ", at + 6)) {
    text.replace(at + 6, text.find(')', at) - at - 6, "X");
  }
  return replaced(text, "   ", "  ");  // columns are as wide as this machine's folders
}

std::string result_of(const fs::path& recipe) {
  ResolveRequest request{
      .recipe = recipe, .machine = Machine{.gpus = 0, .processors = 2}, .torch_variant = "2.11.0+cu130"};
  SearchRequest search{
      .flag_folders = {good_plugins()}, .environment = "", .built_in = {}, .allowed_unsafe = {}};
  std::istringstream lines(read_file(recipe));
  for (std::string line; std::getline(lines, line) && line.starts_with("#! ");) {
    std::string rest = line.substr(line.find(' ', 3) + 1);
    if (line.starts_with("#! set ")) {
      request.overrides.push_back(rest);
    } else if (line.starts_with("#! backend ")) {
      request.backend = rest;
    } else if (line == "#! plugins bad") {
      search.flag_folders.push_back(bad_plugins());
    } else if (line.starts_with("#! ranks ")) {
      request.ranks = {.count = std::stoll(rest), .on_this_machine = std::stoll(rest), .origin = "sf-host --nproc " + rest};
    } else if (line == "#! run") {
      request.will_run = true;
    } else {
      FAIL("unknown line in a golden recipe: " << line);
    }
  }
  Diagnostics problems;
  Catalog catalog(search, {}, torch_host(), problems);
  Resolution out = resolve(request, catalog, problems);
  if (out.plan) {
    return plan_text(*out.plan, {{"weights", 20971520, "10.5 M parameters, bfloat16"},
                                 {"optimizer", 125829120, "masters and moments, float32"},
                                 {"total", 146800640, "per process"}});
  }
  return out.problems.text() + "exit code " + std::to_string(static_cast<int>(out.code)) + "\n";
}

void compare(const fs::path& expected, const std::string& text) {
  if (kUpdate) {
    atomic_write(expected, text);
  }
  bool exists = fs::exists(expected);
  CHECK_MESSAGE(exists, expected << " is missing; SF_UPDATE_GOLDEN=1 build/bin/test_golden writes it");
  if (exists) {
    CHECK_MESSAGE(
        read_file(expected) == text,
        expected << " is not what the program says now; SF_UPDATE_GOLDEN=1 build/bin/test_golden updates it");
  }
}

fs::path repository() {
  return fs::path(SF_TEST_DATA).parent_path();
}

std::vector<Manifest> shipped_manifests() {
  std::vector<Manifest> out = {host_manifest()};
  std::vector<fs::path> paths;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(repository() / "plugins")) {
    if (entry.path().filename() == "plugin.toml") {
      paths.push_back(entry.path());
    }
  }
  std::sort(paths.begin(), paths.end());
  for (const fs::path& path : paths) {
    Diagnostics problems;
    auto manifest = parse_manifest(read_file(path), path.string(), problems);
    REQUIRE_MESSAGE(manifest, problems.text());
    out.push_back(std::move(*manifest));
  }
  return out;
}

// A page keeps what a person wrote above the marker; below it everything is generated.
void compare_page(const fs::path& page, const std::string& generated) {
  const std::string marker =
      "<!-- From here on generated from the manifests: SF_UPDATE_GOLDEN=1 build/bin/test_golden -->\n";
  std::string text = read_file(page);
  std::size_t at = text.find(marker);
  REQUIRE_MESSAGE(at != std::string::npos, page << " has no marker line");
  compare(page, text.substr(0, at) + marker + generated);
}

std::string sources_below(const fs::path& folder) {
  std::string out;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file() && entry.path().filename() != "problem_list.cpp") {
      out += read_file(entry.path());
    }
  }
  return out;
}

}  // namespace

TEST_CASE("golden: plans and problems read as they did") {
  std::vector<fs::path> recipes;
  for (const fs::directory_entry& entry : fs::directory_iterator(SF_TEST_DATA "/golden/recipes")) {
    if (entry.path().extension() == ".toml") {
      recipes.push_back(entry.path());
    }
  }
  std::sort(recipes.begin(), recipes.end());
  CHECK(recipes.size() > 10);
  for (const fs::path& recipe : recipes) {
    compare(fs::path(SF_TEST_DATA "/golden/expected") / (recipe.stem().string() + ".txt"),
            neutral(result_of(recipe)));
  }
}

TEST_CASE("golden: docs/recipes.md, docs/plugins.md and docs/errors.md say what the manifests say") {
  compare_page(repository() / "docs" / "plugins.md", plugins_markdown(shipped_manifests()));
  compare_page(repository() / "docs" / "recipes.md", recipes_markdown(shipped_manifests()));
  compare_page(repository() / "docs" / "errors.md", errors_markdown(shipped_manifests()));
}

TEST_CASE(
    "golden: every problem in the sources is listed, every listed one is in the sources and in a test") {
  std::string sources;
  for (const char* folder : {"recipe", "plugin", "plan"}) {
    sources += sources_below(repository() / "core" / folder);
  }
  sources += sources_below(repository() / "tools" / "sf-host");
  sources += sources_below(repository() / "sdk" / "draft");
  std::string tests = sources_below(SF_TEST_DATA);
  std::vector<std::string> listed;
  for (const ProblemKind& kind : problem_kinds()) {
    REQUIRE(kind.id != nullptr);
    CHECK_MESSAGE(sources.find("\"" + std::string(kind.id) + "\"") != std::string::npos,
                  kind.id << " is listed, but nothing reports it");
    CHECK_MESSAGE(tests.find(kind.id) != std::string::npos, kind.id << " has no test");
    listed.emplace_back(kind.id);
  }
  for (const char* prefix : {"\"recipe/", "\"plugin/", "\"model/", "\"device/", "\"draft/"}) {
    for (std::size_t at = sources.find(prefix); at != std::string::npos; at = sources.find(prefix, at + 1)) {
      std::string id = sources.substr(at + 1, sources.find('"', at + 1) - at - 1);
      bool is_prefix = id.back() == '/';
      CHECK_MESSAGE((is_prefix || std::find(listed.begin(), listed.end(), id) != listed.end()),
                    id << " is not in core/plan/problem_list.cpp");
    }
  }
  for (const Manifest& manifest : shipped_manifests()) {
    for (const Rule& rule : manifest.rules) {
      CHECK_MESSAGE(
          tests.find("\"" + rule.id + "\"") + tests.find("[" + rule.id + "]") != 2 * std::string::npos,
          "rule " << rule.id << " has no test");
    }
  }
}
