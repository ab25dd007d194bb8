#include <doctest/doctest.h>

#include <string>

#include "core/data/inspect.hpp"
#include "scratch.hpp"

using namespace sf;
using sf::test::error_of;
using sf::test::Scratch;

namespace {

const std::filesystem::path kData = std::filesystem::path(SF_TEST_DATA);

}  // namespace

TEST_CASE("inspect: a target is told by its facts, and whether capture can run it") {
  CHECK(inspect_target(kData / "parity/golden/target_llama_tied", {}) ==
        "llama, 6 layers, hidden size 64, 320 tokens, tied embeddings, F32, 242.5 k parameters; capture can "
        "run it");
  const Scratch scratch;
  Json config = read_model_config(kData / "parity/golden/target_llama_tied");
  config.set("model_type", "gemma9");
  scratch.write("config.json", config.dump());
  std::filesystem::copy(kData / "parity/golden/target_llama_tied/model.safetensors",
                        scratch.path() / "model.safetensors");
  CHECK(inspect_target(scratch.path(), {}).find("capture can't run it (model_type \"gemma9\" is not among") !=
        std::string::npos);
  config.set("num_hidden_layers", 60);
  scratch.write("config.json", config.dump());
  CHECK(error_of([&] { (void)inspect_target(scratch.path(), {}); })
            .ends_with("config.json says 60 layers (num_hidden_layers), but the weights have 6, up to layer 5"));
  config.set("num_hidden_layers", 5).set("model_type", "llama");
  scratch.write("config.json", config.dump());
  CHECK(error_of([&] {
          (void)inspect_target(scratch.path(), {});
        }).find("config.json says 5 layers") != std::string::npos);
  config.set("model_type", "gemma9");  // may keep layers of another kind behind the decoder's
  scratch.write("config.json", config.dump());
  CHECK_NOTHROW((void)inspect_target(scratch.path(), {}));
  CHECK(error_of([&] {
          (void)inspect_target(scratch.path(), {.embedding = "wte"});
        }).ends_with("the target has no embedding 'wte'"));
}

TEST_CASE("inspect: tokens are counted, and a file without supervision is refused") {
  const Scratch scratch;
  scratch.write("t.jsonl",
                "{\"input_ids\": [1, 2, 3, 4], \"loss_mask\": [0, 1, 1, 0]}\n"
                "{\"input_ids\": [1, 2, 3, 4, 5, 6], \"loss_mask\": [0, 0, 0, 0, 1, 1]}\n");
  CHECK(inspect_tokens(scratch.path() / "t.jsonl", 10, 0) ==
        "2 samples, 10 tokens, 4 supervised (40 %), longest 6");
  CHECK(inspect_tokens(scratch.path() / "t.jsonl", 10, 5) ==
        "2 samples, 9 tokens, 3 supervised (33 %), longest 6; 1 are cut to max_length 5; 1 without two "
        "neighbouring supervised tokens "
        "will be left out");
  CHECK(error_of([&] { (void)inspect_tokens(scratch.path() / "t.jsonl", 10, 2); }, &scratch) ==
        "t.jsonl: none of its 2 samples has two neighbouring supervised tokens within max_length 2");
}

TEST_CASE("inspect: features are read whole, whichever way they are stored") {
  const std::string text = inspect_features({.folder = kData / "data/features_eagle3", .vocab_size = 320});
  CHECK(text == "6 records, 234 tokens, hidden_state 64 (BF16), aux_hidden_state 192 (BF16); whole");
  CHECK(error_of([] {
          (void)inspect_features({.folder = kData / "data/nothing"});
        }).ends_with("there is no such folder of features"));
  CHECK(error_of([] {
          (void)inspect_features({.folder = kData / "data/features_eagle3", .vocab_size = 7});
        }).find("'input_ids' has the token ") != std::string::npos);
}
