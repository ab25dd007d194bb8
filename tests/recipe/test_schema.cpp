#include <doctest/doctest.h>

#include <filesystem>
#include <string>

#include "core/recipe/schema.hpp"

using namespace sf;

namespace {

Manifest manifest_of(const std::string& name, const std::string& options) {
  Diagnostics problems;
  auto manifest =
      parse_manifest("[plugin]\nname = \"" + name +
                         "\"\nversion = \"1.2.3\"\nkind = \"transform\"\nsummary = \"s\"\n" + options,
                     name, problems);
  REQUIRE_MESSAGE(manifest, problems.text());
  return *manifest;
}

struct Resolved {
  PlanValues values;
  Diagnostics problems;
};

Resolved resolve_texts(const std::vector<std::string>& sets, const std::vector<Manifest>& stack,
                       const std::vector<Manifest>& installed, bool is_partial = false) {
  Resolved out;
  Schema schema;
  schema.add(host_manifest(), out.problems);
  for (const Manifest& manifest : stack) {
    schema.add(manifest, out.problems);
  }
  RawValues raw;
  std::vector<std::string> all = {"model.target_model_path=/target", "algorithm.name=a"};
  all.insert(all.end(), sets.begin(), sets.end());
  apply_overrides(all, raw, out.problems);
  out.values = schema.resolve(raw, installed, is_partial, out.problems);
  return out;
}

Manifest fp8() {
  return manifest_of(
      "fp8",
      "[options.history]\ntype = \"int\"\ndefault = 16\nrange = [1, 1024]\nhelp = \"steps\"\nrenamed_from = "
      "\"plugin.fp8.past\"\n"
      "[options.old]\ntype = \"bool\"\ndefault = false\nhelp = \"x\"\ndeprecated = \"it does nothing any "
      "more\"\n"
      "[options.\"training.num_anchors\"]\ntype = \"int\"\ndefault = 512\nhelp = \"anchors\"\n");
}

}  // namespace

TEST_CASE("schema: values come from the recipe or the default and say so") {
  Resolved out = resolve_texts({"training.batch_size=4", "plugin.fp8.history=3"}, {fp8()}, {});
  REQUIRE_MESSAGE(!out.problems.has_errors(), out.problems.text());
  CHECK(std::get<std::int64_t>(out.values.at("training.batch_size").value) == 4);
  CHECK(out.values.at("training.batch_size").is_set);
  CHECK(out.values.at("training.batch_size").origin == "--set");
  CHECK(out.values.at("training.seed").origin == "default");
  CHECK_FALSE(out.values.at("training.seed").is_set);
  CHECK(out.values.at("training.num_anchors").origin == "default (fp8 1.2.3)");
  CHECK(std::get<std::int64_t>(out.values.at("plugin.fp8.history").value) == 3);
}

TEST_CASE(
    "schema: paths become absolute, from the recipe's folder or the current one, and empty ones stay empty") {
  Resolved out = resolve_texts({"data.train_data_path=x/../y.jsonl"}, {}, {});
  CHECK(std::get<std::string>(out.values.at("data.train_data_path").value) ==
        (std::filesystem::current_path() / "y.jsonl").string());
  CHECK(std::get<std::string>(out.values.at("data.eval_data_path").value).empty());
  CHECK(std::get<std::string>(out.values.at("output_dir").value) ==
        (std::filesystem::current_path() / "output").string());
}

TEST_CASE("schema: what only a shell puts a folder in the place of is refused, and a folder of that name can be said") {
  for (const char* path : {"~", "~/runs", "~anna/runs", "$SCRATCH/runs", "${HOME}"}) {
    CAPTURE(path);
    Resolved out = resolve_texts({std::string("output_dir=\"") + path + "\""}, {}, {});
    REQUIRE(out.problems.error_count() == 1);
    CHECK(out.problems.all()[0].id == "recipe/bad-form");
    CHECK(out.problems.all()[0].message.find("is nothing but a name here") != std::string::npos);
  }
  const Resolved cut = resolve_texts({"output_dir=\"a\\u0000b\""}, {}, {});
  REQUIRE(cut.problems.error_count() == 1);
  CHECK(cut.problems.all()[0].message.find("no path has a zero byte") != std::string::npos);
  for (const char* path : {"./~/runs", "a/~/b", "a$b"}) {
    CHECK_MESSAGE(!resolve_texts({std::string("output_dir=\"") + path + "\""}, {}, {}).problems.has_errors(), path);
  }
}

TEST_CASE("schema: all problems of a recipe are reported at once, each with its place") {
  Resolved out = resolve_texts(
      {"training.bach_size=4", "training.seed=\"x\"", "training.max_grad_norm=0",
       "training.lr_scheduler=cosin", "data.shard_bytes=12parsecs", "training.static_shape_buckets=[1, 0.5]"},
      {}, {});
  CHECK(out.problems.error_count() == 6);
  std::string text = out.problems.text();
  CHECK(text.find("unknown option \"bach_size\" in [training]\n  did you mean \"batch_size\"?") !=
        std::string::npos);
  CHECK(text.find("training.seed is \"x\" (a string), expected an int") != std::string::npos);
  CHECK(text.find("training.max_grad_norm is 0.0, expected more than 0") != std::string::npos);
  CHECK(text.find("expected one of cosine, cosine_reference, constant\n  did you mean \"cosine\"?") !=
        std::string::npos);
  CHECK(text.find("expected a size such as") != std::string::npos);
  CHECK(text.find("expected a list of ints") != std::string::npos);
}

TEST_CASE("schema: a required key that is missing is an error") {
  Diagnostics problems;
  Schema schema;
  schema.add(host_manifest(), problems);
  (void)schema.resolve({}, {}, false, problems);
  CHECK(problems.error_count() == 2);
  CHECK(problems.contains("recipe/missing"));
}

TEST_CASE("schema: a reference key that moved is refused with its new name") {
  for (const auto& [from, to] : {std::pair("training.strategy=x", "algorithm.name"),
                                 std::pair("training.backend=fsdp2", "backend.sharding"),
                                 std::pair("training.fp8_linear=true", "backend.transforms"),
                                 std::pair("training.checkpoint_async=true", "backend.checkpoint"),
                                 std::pair("training.resume_from=x", "--resume")}) {
    Resolved out = resolve_texts({from}, {}, {});
    REQUIRE(out.problems.contains("recipe/moved-key"));
    CHECK(out.problems.text().find(to) != std::string::npos);
  }
}

TEST_CASE("schema: a key of an installed plugin outside the stack says whose it is") {
  for (const char* key : {"training.num_anchors=3", "plugin.fp8.history=3"}) {
    Resolved out = resolve_texts({key}, {}, {fp8()});
    CHECK(out.problems.text().find("belongs to plugin \"fp8\", which is not in this run's stack") !=
          std::string::npos);
  }
}

TEST_CASE("schema: when a manifest is missing only sure mistakes are called unknown") {
  Resolved out = resolve_texts(
      {"training.num_anchors=3", "plugin.acme.x=1", "training.sed=3", "model.colour=1"}, {}, {}, true);
  CHECK(out.problems.error_count() == 2);
  CHECK(out.problems.text().find("num_anchors") == std::string::npos);
  CHECK(out.problems.text().find("\"sed\"") != std::string::npos);
  CHECK(out.problems.text().find("\"colour\"") != std::string::npos);
}

TEST_CASE("schema: renamed and deprecated keys work and warn") {
  Resolved out = resolve_texts({"plugin.fp8.past=9", "plugin.fp8.old=true"}, {fp8()}, {});
  CHECK_FALSE(out.problems.has_errors());
  CHECK(std::get<std::int64_t>(out.values.at("plugin.fp8.history").value) == 9);
  CHECK(out.problems.contains("recipe/renamed-key"));
  CHECK(out.problems.contains("recipe/deprecated"));
}

TEST_CASE("schema: two owners of one key are refused") {
  Diagnostics problems;
  Schema schema;
  schema.add(host_manifest(), problems);
  schema.add(manifest_of("thief", "[options.\"training.seed\"]\ntype = \"int\"\ndefault = 1\nhelp = \"x\"\n"),
             problems);
  CHECK(problems.contains("plugin/option-clash"));
}

TEST_CASE("schema: bytes are read with units, and ranges hold at their ends") {
  CHECK(std::get<std::int64_t>(
            resolve_texts({"data.shard_bytes=\"2MiB\""}, {}, {}).values.at("data.shard_bytes").value) ==
        2097152);
  CHECK_FALSE(resolve_texts({"training.warmup_ratio=1"}, {}, {}).problems.has_errors());
  CHECK(resolve_texts({"training.warmup_ratio=1.01"}, {}, {}).problems.contains("recipe/out-of-range"));
  CHECK(resolve_texts({"training.learning_rate=inf"}, {}, {}).problems.contains("recipe/out-of-range"));
  CHECK(resolve_texts({"data.shard_bytes=\"1kB\""}, {}, {}).problems.contains("recipe/out-of-range"));
}

TEST_CASE("schema: run_id is a name and never a path") {
  for (const char* name : {"a", "qwen3-8b_dflash2.v1", "...", "0"}) {
    CHECK_MESSAGE(!resolve_texts({std::string("run_id=\"") + name + "\""}, {}, {}).problems.has_errors(), name);
  }
  const std::string long_name(201, 'a'), huge_name(2000000, 'a');
  for (const std::string& name : {std::string(), std::string("."), std::string(".."), std::string("../evil"), std::string("a/b"), std::string("a b"),
                                  std::string("a\\n"), std::string("a\\u0000b"), std::string("\u00e4"), long_name, huge_name}) {
    CAPTURE(name.substr(0, 20));
    Resolved out = resolve_texts({"run_id=\"" + name + "\""}, {}, {});
    REQUIRE(out.problems.error_count() == 1);
    CHECK(out.problems.all()[0].id == "recipe/bad-form");
    CHECK(out.problems.all()[0].message.find("expected 1 to 200 letters, digits and . _ -, and not . or ..") != std::string::npos);
  }
}

TEST_CASE("schema: a section of a plugin that is not installed, and a table written as a list, are told as what they are") {
  Resolved plugin = resolve_texts({"plugin.fp9.history=3"}, {fp8()}, {fp8()});
  REQUIRE(plugin.problems.error_count() == 1);
  CHECK(plugin.problems.text().find("is for a plugin that is not installed: \"fp9\"") != std::string::npos);
  CHECK(plugin.problems.text().find("did you mean [plugin.fp8]?") != std::string::npos);
  Resolved list = resolve_texts({"training=[{seed = 1}]"}, {}, {});
  REQUIRE(list.problems.error_count() == 1);
  CHECK(list.problems.all()[0].id == "recipe/wrong-type");
  CHECK(list.problems.text().find("training is a list, expected a table") != std::string::npos);
}
