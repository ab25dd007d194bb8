#include <doctest/doctest.h>

#include <filesystem>
#include <string>

#include "core/base/file.hpp"
#include "core/recipe/recipe_reader.hpp"

#include <unistd.h>

using namespace sf;
namespace fs = std::filesystem;

namespace {

struct TemporaryFolder {
  fs::path path = fs::temp_directory_path() / ("sf-test-recipe-" + std::to_string(getpid()));
  TemporaryFolder() { fs::create_directories(path / "base"); }
  ~TemporaryFolder() { fs::remove_all(path); }
};

}  // namespace

TEST_CASE("recipe: what follows an include wins over its base, and each value knows file, line and folder") {
  TemporaryFolder folder;
  atomic_write(folder.path / "base" / "b.toml", "run_id = \"base\"\n[training]\nseed = 1\nbatch_size = 2\n");
  atomic_write(folder.path / "r.toml", "include = \"base/b.toml\"\n[training]\nseed = 7\n");
  Diagnostics problems;
  RawValues values = read_recipe(folder.path / "r.toml", problems);
  REQUIRE_MESSAGE(!problems.has_errors(), problems.text());
  CHECK(values.size() == 3);
  CHECK(values.at("training.seed").node.integer == 7);
  CHECK(values.at("training.seed").origin == "r.toml:3");
  CHECK(values.at("training.batch_size").origin == "b.toml:4");
  CHECK(values.at("run_id").folder == folder.path / "base");
}

TEST_CASE("recipe: a cycle of includes, a missing base and bad TOML are told with their place") {
  TemporaryFolder folder;
  atomic_write(folder.path / "a.toml", "include = \"b.toml\"\n");
  atomic_write(folder.path / "b.toml", "include = \"a.toml\"\n");
  Diagnostics cycle;
  (void)read_recipe(folder.path / "a.toml", cycle);
  CHECK(cycle.contains("recipe/include-cycle"));

  atomic_write(folder.path / "c.toml", "include = \"nothing.toml\"\n");
  Diagnostics missing;
  (void)read_recipe(folder.path / "c.toml", missing);
  CHECK(missing.text().find("nothing.toml") != std::string::npos);

  atomic_write(folder.path / "d.toml", "[training]\nseed = = 3\n");
  Diagnostics syntax;
  (void)read_recipe(folder.path / "d.toml", syntax);
  REQUIRE(syntax.contains("recipe/syntax"));
  CHECK(syntax.all()[0].place.line == 2);
  CHECK_FALSE(syntax.all()[0].fix.empty());

  atomic_write(folder.path / "e.toml", "include = 3\n");
  Diagnostics type;
  (void)read_recipe(folder.path / "e.toml", type);
  REQUIRE(type.contains("recipe/wrong-type"));
  CHECK_FALSE(type.all()[0].fix.empty());

  std::filesystem::create_directory(folder.path / "folder.toml");
  Diagnostics not_a_file;
  (void)read_recipe(folder.path / "folder.toml", not_a_file);
  REQUIRE(not_a_file.contains("recipe/not-readable"));
  CHECK_FALSE(not_a_file.all()[0].fix.empty());
}

TEST_CASE("recipe: --set reads TOML, takes bare words as text, and the last one wins") {
  RawValues values;
  Diagnostics problems;
  apply_overrides(
      {"training.seed=1", "training.seed = 2", "run_id=my-run", "training.static_shape_buckets=[128, 256]",
       "data.train_data_path=/a/b.jsonl", "training.learning_rate=6e-4"},
      values, problems);
  REQUIRE_MESSAGE(!problems.has_errors(), problems.text());
  CHECK(values.at("training.seed").node.integer == 2);
  CHECK(values.at("training.seed").origin == "--set");
  CHECK(values.at("run_id").node.string == "my-run");
  CHECK(values.at("data.train_data_path").node.string == "/a/b.jsonl");
  CHECK(values.at("training.static_shape_buckets").node.items.size() == 2);
  CHECK(values.at("training.learning_rate").node.real == doctest::Approx(6e-4));

  Diagnostics bad;
  apply_overrides({"training.seed", "=3", "training.x=[1,", "training.y=\"open"}, values, bad);
  CHECK(bad.error_count() == 4);
  CHECK(bad.all()[0].id == "recipe/bad-override");
}

TEST_CASE("recipe: a key in --set with a dot too many is told as such, and not its value") {
  for (const char* key : {"training..batch_size", ".training", "training."}) {
    RawValues values;
    Diagnostics problems;
    apply_overrides({std::string(key) + "=2"}, values, problems);
    CHECK(problems.text() == "error[recipe/bad-override] \"--set " + std::string(key) + "=2\": the key \"" + key +
                                 "\" has a dot too many\n  fix:  write section.option: --set training.batch_size=4\n");
  }
}

TEST_CASE("recipe: a number in --set that fits nowhere is told as such, and a name that starts like a number is text") {
  for (const char* number : {"99999999999999999999", "-99999999999999999999", "1e400", "+2e999"}) {
    RawValues values;
    Diagnostics problems;
    apply_overrides({std::string("training.seed=") + number}, values, problems);
    CHECK(values.empty());
    REQUIRE_MESSAGE(problems.error_count() == 1, number);
    CHECK(problems.all()[0].id == "recipe/bad-override");
    CHECK_MESSAGE(problems.all()[0].message.find("is not a number that fits into 64 bits") != std::string::npos,
                  problems.all()[0].message);
  }
  for (const char* name : {"3b-model", "007", "2024-11-run", "1.2.3", "-x"}) {
    RawValues values;
    Diagnostics problems;
    apply_overrides({std::string("run_id=") + name}, values, problems);
    REQUIRE_MESSAGE(!problems.has_errors(), problems.text());
    CHECK(values.at("run_id").node.string == name);
  }
}
