#include <doctest/doctest.h>

#include "core/base/error.hpp"
#include "core/data/tokenizer_facts.hpp"
#include "tests/data/scratch.hpp"

TEST_CASE("tokenizer facts: length and mask token from vocabulary and added tokens, nothing without files") {
  const sf::test::Scratch scratch;
  sf::TokenizerFacts facts = sf::read_tokenizer_facts(scratch.path());
  CHECK(facts.tokens == -1);
  CHECK(facts.mask_token_id == -1);

  scratch.write("tokenizer.json",
      R"({"added_tokens": [{"id": 5, "content": "<|mask|>"}, {"id": 3, "content": "<|end|>"}], "model": {"vocab": {"a": 0, "b": 1, "c": 2}}})");
  facts = sf::read_tokenizer_facts(scratch.path());
  CHECK(facts.tokens == 6);
  CHECK(facts.mask_token_id == -1);
  scratch.write("tokenizer_config.json", R"({"mask_token": {"content": "<|mask|>"}})");
  CHECK(sf::read_tokenizer_facts(scratch.path()).mask_token_id == 5);
  scratch.write("tokenizer_config.json", R"({"mask_token": "b"})");
  CHECK(sf::read_tokenizer_facts(scratch.path()).mask_token_id == 1);

  scratch.write("tokenizer.json", R"({"model": {"vocab": [["x", -1.5], ["b", -2.5], ["z", -3.0]]}})");
  facts = sf::read_tokenizer_facts(scratch.path());
  CHECK(facts.tokens == 3);
  CHECK(facts.mask_token_id == 1);

  scratch.write("tokenizer.json", R"({"model": {"vocab": {"a": 0, "b": 9223372036854775807}}})");
  CHECK(sf::test::error_of([&] { (void)sf::read_tokenizer_facts(scratch.path()); }, &scratch) ==
        "tokenizer.json: the token \"b\" has the id 9223372036854775807, 0 to 2147483647 expected");

  scratch.write("tokenizer.json", "{");
  CHECK_THROWS_AS((void)sf::read_tokenizer_facts(scratch.path()), sf::Error);
}

TEST_CASE("tokenizer facts: a draft's configuration names the mask token when it has one, not when it has the key") {
  CHECK(sf::names_mask_token(R"({"mask_token_id": 3})"));
  CHECK(sf::names_mask_token(R"({"dflash_config": {"mask_token_id": 3}})"));
  CHECK(sf::names_mask_token(R"({"mask_token_id": "x"})"));  // refused later, and not passed over
  for (const char* none : {"", "{}", "[]", "{", R"({"mask_token_id": null})", R"({"dflash_config": {"mask_token_id": null}})", R"({"note": "\"mask_token_id\" is left out"})"}) {
    CHECK_FALSE_MESSAGE(sf::names_mask_token(none), none);
  }
}
