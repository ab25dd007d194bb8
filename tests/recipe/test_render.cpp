#include <doctest/doctest.h>

#include <string>

#include "core/recipe/render.hpp"

using namespace sf;

TEST_CASE("render: the schema has every option with its default and refuses unknown keys") {
  Json schema = recipe_schema({host_manifest()});
  CHECK(schema.at("additionalProperties").as_bool() == false);
  const Json& training = schema.at("properties").at("training");
  CHECK(training.at("additionalProperties").as_bool() == false);
  CHECK(training.at("properties").at("max_grad_norm").at("default").as_double() == 0.5);
  CHECK(training.at("properties").at("max_grad_norm").at("exclusiveMinimum").as_double() == 0);
  CHECK(training.at("properties").at("lr_scheduler").at("enum").size() == 3);
  CHECK(training.at("properties").at("static_shape_buckets").at("items").at("type").as_string() == "integer");
  std::size_t count = 0;
  for (const auto& [name, property] : schema.at("properties").entries()) {
    const Json* inner = property.find("properties");
    count += inner == nullptr ? 1 : inner->size();
  }
  CHECK(count == host_manifest().options.size() + 1);  // and include
}

TEST_CASE("render: help and Markdown name every option once") {
  std::string help = options_help(host_manifest().options, 100);
  std::string markdown = recipes_markdown({host_manifest()});
  for (const Option& option : host_manifest().options) {
    CHECK_MESSAGE(help.find("  " + option.key + " ") != std::string::npos, option.key);
    CHECK_MESSAGE(
        markdown.find("| `" + option.key.substr(option.key.rfind('.') + 1) + "` |") != std::string::npos,
        option.key);
  }
  for (std::size_t at = 0; at < help.size();) {
    std::size_t end = help.find('\n', at);
    CHECK(end - at <= 110);
    at = end + 1;
  }
}

TEST_CASE("render: values are written as TOML that reads back") {
  CHECK(toml_text(Value(1.0)) == "1.0");
  CHECK(toml_text(Value(6e-4)) == "6e-04");
  CHECK(toml_text(Value(std::string("a\"b\\c\n"))) == "\"a\\\"b\\\\c\\n\"");
  CHECK(toml_text(Value(std::vector<std::string>{"a", "b"})) == "[\"a\", \"b\"]");
  CHECK(toml_text(Value(true)) == "true");
  CHECK(display_text(Value(std::int64_t{536870912}), Type::bytes) == "512.0 MiB");
}
