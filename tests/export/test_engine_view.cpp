// An exported draft as engines see it, where the folder is not what our export writes.
#include "core/data/safetensors.hpp"
#include "core/export/engine_view.hpp"
#include "tests/data/scratch.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <limits>
#include <span>

namespace sf {
namespace {

using test::Scratch;

bool any_has(const std::vector<std::string>& problems, const char* part) {
  return std::any_of(problems.begin(), problems.end(), [&](const std::string& problem) { return problem.find(part) != std::string::npos; });
}

std::vector<std::string> problems_with(const char* hidden_size, int64_t offset_of_second_token) {
  const Scratch scratch;
  scratch.write("config.json", format(R"({"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": {}, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
    "intermediate_size": 16, "vocab_size": 4, "draft_vocab_size": 2, "rms_norm_eps": 1e-6, "max_position_embeddings": 64, "dtype": "float32"})", hidden_size));
  const std::array<std::byte, 4> t2d = {std::byte{1}, std::byte{0}, std::byte{1}, std::byte{0}};
  const std::array<int64_t, 2> d2t = {0, offset_of_second_token};
  write_safetensors(scratch.path() / "model.safetensors",
                    {{"d2t", Dtype::kI64, {2}, std::as_bytes(std::span(d2t)), nullptr}, {"t2d", Dtype::kBool, {4}, std::span<const std::byte>(t2d), nullptr}});
  return look_as_engine(scratch.path(), Json()).problems;
}

TEST_CASE("engine view: an offset of a draft token that leads nowhere is a problem, however large it is") {
  CHECK_FALSE(any_has(problems_with("8", 1), "d2t says"));
  for (const int64_t offset : {int64_t{100}, int64_t{-2}, std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()}) {
    CAPTURE(offset);
    CHECK(any_has(problems_with("8", offset), "d2t says that draft token 1 is the target's"));
  }
}

TEST_CASE("engine view: a size that no weight could have is a problem and not a product that overflows") {
  CHECK(any_has(problems_with("4611686018427387904", 1), "\"hidden_size\" is 4611686018427387904, at most 2^30 expected"));
}

}  // namespace
}  // namespace sf
