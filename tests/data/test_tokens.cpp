#include <doctest/doctest.h>

#include <string>

#include "core/data/tokens.hpp"
#include "scratch.hpp"

using namespace sf;
using sf::test::error_of;
using sf::test::Scratch;

TEST_CASE("tokens: samples are read with ids, masks and names, and cut to the length limit") {
  const Scratch scratch;
  const auto path = scratch.write("t.jsonl",
                                  "{\"input_ids\": [1, 2, 3], \"loss_mask\": [0, 1, 1], \"id\": \"first\"}\n"
                                  "\n"
                                  "{\"loss_mask\": [false, true], \"input_ids\": [4, 5], \"other\": {}}");
  const auto samples = read_tokens(path, {.vocab_size = 6, .max_length = 2});
  REQUIRE(samples.size() == 2);
  CHECK(samples[0].id == "first");
  CHECK(samples[0].input_ids == std::vector<int64_t>{1, 2});
  CHECK(samples[0].loss_mask == std::vector<uint8_t>{0, 1});
  CHECK(samples[1].id == "line 3");
  CHECK(samples[1].loss_mask == std::vector<uint8_t>{0, 1});
}

TEST_CASE("tokens: all broken lines are reported together, each with number, found and expected") {
  const Scratch scratch;
  const auto path = scratch.write("t.jsonl",
                                  "{\"input_ids\": [1, 2], \"loss_mask\": [0, 1]}\n"
                                  "{\"input_ids\": [1, 2\n"
                                  "{\"input_ids\": [1, 2]}\n"
                                  "{\"input_ids\": [1, 2], \"loss_mask\": [1]}\n"
                                  "{\"input_ids\": [1, 9], \"loss_mask\": [1, 1]}\n"
                                  "{\"input_ids\": [1, -2], \"loss_mask\": [1, 1]}\n"
                                  "{\"input_ids\": [1, 2], \"loss_mask\": [1, 2]}\n"
                                  "{\"input_ids\": [], \"loss_mask\": []}\n"
                                  "{\"input_ids\": \"1 2\", \"loss_mask\": []}\n"
                                  "[1]\n");
  const std::string message = error_of([&] { (void)read_tokens(path, {.vocab_size = 9}); }, &scratch);
  CHECK(message.rfind("t.jsonl: 9 of 10 lines can't be used\n  t.jsonl:2: column ", 0) == 0);
  const char* expected[] = {
      "t.jsonl:3: there is no key \"loss_mask\"",
      "t.jsonl:4: input_ids has 2 elements, loss_mask 1; the same number expected",
      "t.jsonl:5: input_ids[1] is 9, but the target has the tokens 0 to 8",
      "t.jsonl:6: input_ids[1] is -2, but the target has the tokens 0 to 8",
      "t.jsonl:7: loss_mask[1] is 2, 0 or 1 expected",
      "t.jsonl:8: input_ids is empty",
      "t.jsonl:9: expected an array, found a string",
      "t.jsonl:10: expected an object, found an array",
  };
  for (const char* part : expected) {
    CAPTURE(part);
    CHECK(message.find(part) != std::string::npos);
  }
}

TEST_CASE("tokens: what is no integer is named by key, place and value") {
  const Scratch scratch;
  const auto says = [&](const char* line) {
    return error_of([&] { (void)read_tokens(scratch.write("t.jsonl", line), {}); }, &scratch);
  };
  CHECK(says("{\"input_ids\": [1, 6.5], \"loss_mask\": [1, 1]}")
            .ends_with("t.jsonl:1: input_ids[1] is 6.5, an integer expected"));
  CHECK(says("{\"input_ids\": [99999999999999999999, 1], \"loss_mask\": [1, 1]}")
            .ends_with("t.jsonl:1: input_ids[0] is 1e+20, an integer expected"));
  CHECK(says("{\"input_ids\": [1, 2], \"loss_mask\": [1, \"x\"]}")
            .ends_with("t.jsonl:1: loss_mask[1] is \"x\", an integer expected"));
}

TEST_CASE("tokens: a zero byte behind a line's object is refused with its column") {
  const Scratch scratch;
  std::string text = "{\"input_ids\": [1, 2], \"loss_mask\": [0, 1]}\n{\"input_ids\": [1, 2], \"loss_mask\": [0, 1]}";
  text += '\0';
  text += '\n';
  CHECK(error_of([&] { (void)read_tokens(scratch.write("t.jsonl", text), {}); }, &scratch)
            .ends_with("t.jsonl:2: column 43: not valid JSON: a zero byte, which no JSON has"));
}

TEST_CASE("tokens: an empty file and a missing one are refused") {
  const Scratch scratch;
  CHECK(error_of([&] { (void)read_tokens(scratch.write("t.jsonl", "\n\n"), {}); }, &scratch) ==
        "t.jsonl: there is no sample in it");
  CHECK(error_of([&] { (void)read_tokens(scratch.path() / "none.jsonl", {}); }).find("none.jsonl") !=
        std::string::npos);
}

TEST_CASE("tokens: the fingerprint follows ids and masks and not the spelling") {
  const Scratch scratch;
  const auto print = [&](const char* text) {
    return tokens_fingerprint(read_tokens(scratch.write("t", text), {}));
  };
  const std::string base = print("{\"input_ids\": [1, 2], \"loss_mask\": [0, 1]}");
  CHECK(print("{\"loss_mask\":[0,1],\"input_ids\":[1,2],\"id\":\"x\"}\n") == base);
  CHECK(print("{\"input_ids\": [1, 3], \"loss_mask\": [0, 1]}") != base);
  CHECK(print("{\"input_ids\": [1, 2], \"loss_mask\": [1, 1]}") != base);
}

TEST_CASE("tokens: a pair needs two neighbours") {
  CHECK(has_supervised_pair({0, 1, 1, 0}));
  CHECK_FALSE(has_supervised_pair({1, 0, 1}));
  CHECK_FALSE(has_supervised_pair({1}));
  CHECK_FALSE(has_supervised_pair({}));
}
