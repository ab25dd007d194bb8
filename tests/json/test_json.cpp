#include <doctest/doctest.h>

#include <chrono>
#include <cmath>
#include <limits>
#include <string>

#include "sf/json.hpp"

using sf::Json;
using sf::JsonError;

namespace {

std::string message_of(const auto& call) {
  try {
    call();
  } catch (const JsonError& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace

TEST_CASE("json: every kind of value survives a round trip") {
  const std::string text =
      R"({"null": null, "yes": true, "int": -9007199254740993, "float": 0.1, "whole": 2.0, "text": "a\"\n\u00e9", )"
      R"("list": [1, [], {}]})";
  const Json value = Json::parse(text);
  CHECK(value.at("null").is_null());
  CHECK(value.at("yes").as_bool());
  CHECK(value.at("int").as_int() == -9007199254740993);
  CHECK(value.at("float").as_double() == 0.1);
  CHECK(value.at("whole").is_double());
  CHECK(value.at("text").as_string() == "a\"\n\xc3\xa9");
  CHECK(value.at("list").items().size() == 3);
  CHECK(Json::parse(value.dump()) == value);
  CHECK(Json::parse(value.dump(2)) == value);
  CHECK(Json::parse(value.dump()).at("whole").is_double());
}

TEST_CASE("json: keys keep the order in which they came") {
  const Json value = Json::parse(R"({"b": 1, "a": 2, "c": 3})");
  CHECK(value.dump() == R"({"b": 1, "a": 2, "c": 3})");
  CHECK(value == Json::parse(R"({"c": 3, "b": 1, "a": 2})"));
  CHECK_FALSE(value == Json::parse(R"({"c": 3, "b": 1, "a": 1})"));
}

TEST_CASE("json: a syntax error names source, line and column") {
  try {
    (void)Json::parse("{\n  \"a\": 1,\n  \"b\" 2\n}", "config.json");
    FAIL("accepted");
  } catch (const JsonError& error) {
    CHECK(error.source() == "config.json");
    CHECK(error.line() == 3);
    CHECK(error.column() == 7);
    CHECK(std::string(error.what()).rfind("config.json:3:7: not valid JSON: ", 0) == 0);
  }
  CHECK_THROWS_AS((void)Json::parse(""), JsonError);
  CHECK_THROWS_AS((void)Json::parse("{} {}"), JsonError);
  CHECK_THROWS_AS((void)Json::parse("[1, 2"), JsonError);
}

TEST_CASE("json: a zero byte is refused wherever it stands, and not taken for the end of the text") {
  for (const std::string& text : {std::string("{\"a\": 1}\0", 9), std::string("{\"a\": 1}\0, 2", 12), std::string("[1,\0 2]", 7), std::string("[\"a\0\"]", 6)}) {
    CAPTURE(text.size());
    std::string message = "no error";
    try {
      (void)Json::parse(text, "x.json");
    } catch (const JsonError& error) {
      message = error.what();
      CHECK(error.column() == static_cast<int>(text.find('\0')) + 1);
    }
    CHECK(message.find("not valid JSON: a zero byte") != std::string::npos);
  }
}

TEST_CASE("json: a text of megabytes that is torn is not all of the message") {
  try {
    (void)Json::parse("{\"text\": \"" + std::string(3'000'000, 'x'), "rows.jsonl");
    FAIL("accepted");
  } catch (const JsonError& error) {
    CHECK(std::string(error.what()).size() < 400);
    CHECK(std::string(error.what()).find("missing closing quote") != std::string::npos);
  }
}

TEST_CASE("json: a key that appears twice is refused") {
  CHECK(message_of([] { (void)Json::parse(R"({"a": 1, "a": 2})", "x.json"); }) ==
        "x.json: not valid JSON: key \"a\" appears twice in one object");
}

TEST_CASE("json: an object with very many keys is read in time that grows with their number") {
  std::string text = "{";
  for (int i = 0; i < 200000; ++i) text += (i > 0 ? ",\"" : "\"") + std::to_string(i) + "\":0";
  const auto start = std::chrono::steady_clock::now();
  CHECK(Json::parse(text + "}").size() == 200000);
  // A tenth of a second here; looking through all keys for each would take minutes.
#ifdef __SANITIZE_THREAD__
  constexpr auto kLimit = std::chrono::seconds(100);
#else
  constexpr auto kLimit = std::chrono::seconds(10);
#endif
  CHECK(std::chrono::steady_clock::now() - start < kLimit);
}

TEST_CASE("json: text nested too deeply is refused and not a crash") {
  CHECK_THROWS_AS((void)Json::parse(std::string(100000, '[')), JsonError);
}

TEST_CASE("json: a value of another kind and a missing key are told apart") {
  const Json value = Json::parse(R"({"a": "text", "n": 1.5})");
  CHECK(message_of([&] { (void)value.at("a").as_int(); }) == "expected an integer, found a string");
  CHECK(message_of([&] { (void)value.at("n").as_int(); }) == "expected an integer, found a number");
  CHECK(message_of([&] { (void)value.at("b"); }) == "there is no key \"b\"");
  CHECK(message_of([&] { (void)value.at("a").items(); }) == "expected an array, found a string");
  CHECK(value.find("b") == nullptr);
  CHECK(value.at("a").find("b") == nullptr);
}

TEST_CASE("json: values are built, replaced and removed") {
  Json value;
  value.set("a", 1).set("b", Json::array_of(std::vector<int64_t>{1, 2})).set("a", "new");
  CHECK(value.dump() == R"({"a": "new", "b": [1, 2]})");
  CHECK(value.dump(2) == "{\n  \"a\": \"new\",\n  \"b\": [\n    1,\n    2\n  ]\n}");
  CHECK(value.remove("a"));
  CHECK_FALSE(value.remove("a"));
  CHECK(value.dump() == R"({"b": [1, 2]})");
}

TEST_CASE("json: numbers beyond JSON become null and bytes that are not UTF-8 are replaced") {
  CHECK(Json(std::numeric_limits<double>::quiet_NaN()).dump() == "null");
  CHECK(Json(std::string("a\xff")).dump() == "\"a\xef\xbf\xbd\"");
}
