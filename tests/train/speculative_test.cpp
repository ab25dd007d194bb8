// What decides whether an answer is the target's own, and the figures over passes. About 1 s.
#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include <filesystem>

#include "core/train/acceptance_stats.hpp"
#include "core/train/speculative.hpp"

using namespace sf;

namespace {

const Target& tiny() {
  static const Target* target =
      new Target(Target::load({.folder = std::filesystem::path(SF_TEST_DATA) / "parity" / "golden" / "target_llama_tied", .head_needed = true}));
  return *target;
}

const Prompt kPrompt{.id = "one", .category = "all", .ids = {1, 18, 21, 24}};

std::vector<int64_t> best_tokens(std::vector<int64_t> ids, int64_t count) {
  std::vector<int64_t> answer;
  for (int64_t i = 0; i < count; ++i) {
    const at::Tensor logits = tiny().forward({.input_ids_bt = at::tensor(ids, at::kLong).unsqueeze(0), .layer_ids = {}, .logits = true}).logits_btv;
    answer.push_back(logits[0][static_cast<int64_t>(ids.size()) - 1].argmax().item<int64_t>());
    ids.push_back(answer.back());
  }
  return answer;
}

}  // namespace

TEST_CASE("speculative: an answer that leaves the target's own is found, with the place and how much worse it is") {
  const std::vector<int64_t> own = best_tokens(kPrompt.ids, 8);
  CHECK_FALSE(judge_difference(tiny(), kPrompt, own, own).has_value());

  std::vector<int64_t> changed = own;
  changed[5] = (changed[5] + 7) % 320;
  const auto found = judge_difference(tiny(), kPrompt, own, changed);
  REQUIRE(found.has_value());
  CHECK_FALSE(found->is_tie);
  CHECK(found->position == 5);
  CHECK(found->expected == own[5]);
  CHECK(found->found == changed[5]);
  CHECK(found->margin > found->tolerance);

  const std::vector<int64_t> shorter(own.begin(), own.begin() + 6);
  const auto ended = judge_difference(tiny(), kPrompt, own, shorter);
  REQUIRE(ended.has_value());
  CHECK_FALSE(ended->is_tie);
  CHECK(ended->position == 6);
  CHECK(ended->found == -1);
}

TEST_CASE("speculative: a token that is as good as the best to within rounding is a tie, and only while what follows is the target's best, too") {
  // The best answer called a difference from some other one: every token of it is the target's best.
  const std::vector<int64_t> own = best_tokens(kPrompt.ids, 8);
  std::vector<int64_t> other = own;
  other[3] = (other[3] + 1) % 320;
  const auto tie = judge_difference(tiny(), kPrompt, other, own);
  REQUIRE(tie.has_value());
  CHECK(tie->is_tie);
  CHECK(tie->position == 3);
  CHECK(tie->margin == 0);

  std::vector<int64_t> later = own;
  later[6] = (later[6] + 3) % 320;
  const auto wrong = judge_difference(tiny(), kPrompt, other, later);
  REQUIRE(wrong.has_value());
  CHECK_FALSE(wrong->is_tie);
  CHECK(wrong->position == 6);
}

TEST_CASE("speculative: the whole pass tells a token that the target would not have said") {
  const std::vector<int64_t> own = best_tokens(kPrompt.ids, 6);
  const WholePass good = whole_pass(tiny(), {kPrompt}, {own}, {1, 3});
  CHECK(good.tokens_checked == 6);
  CHECK(good.worst_margin <= good.tolerance);
  CHECK(good.layers_bth.size() == 2);
  CHECK(good.layers_bth[0].size(1) == 10);
  std::vector<int64_t> changed = own;
  changed[2] = (changed[2] + 7) % 320;
  const WholePass bad = whole_pass(tiny(), {kPrompt, kPrompt}, {own, changed}, {1});
  CHECK(bad.worst_margin > bad.tolerance);
}

TEST_CASE("speculative: a feature is its layers side by side, as they are stored") {
  const at::Tensor a = at::full({1, 2, 3}, 1.001), b = at::full({1, 2, 3}, 2.0);
  const at::Tensor feature = feature_of({7, 4}, {4, 7}, {a, b});
  CHECK(feature.sizes().vec() == std::vector<int64_t>{1, 2, 6});
  CHECK(feature[0][0][0].item<float>() == 2.0F);
  CHECK(feature[0][0][3].item<float>() == 1.0F);  // 1.001 in bfloat16
}

TEST_CASE("speculative: acceptance length is tokens over passes, with an interval over prompts") {
  std::vector<PromptAcceptance> prompts;
  for (int i = 0; i < 50; ++i) prompts.push_back({.category = i % 2 == 0 ? "even" : "odd", .passes = 10, .tokens = i % 2 == 0 ? 20 : 30});
  prompts.push_back({.category = "none"});
  const AcceptanceLength all = acceptance_of(prompts);
  CHECK(all.value == doctest::Approx(2.5));
  CHECK(all.prompts == 50);
  CHECK(all.passes == 500);
  // Residuals of 5 tokens each: 1.96 * sqrt(50 * 25 * 50 / 49) / 500.
  CHECK(all.high - all.value == doctest::Approx(1.959964 * std::sqrt(1250.0 * 50 / 49) / 500));
  CHECK(all.value - all.low == doctest::Approx(all.high - all.value));
  const auto groups = acceptance_by_category(prompts);
  CHECK(groups.at("even").value == doctest::Approx(2));
  CHECK(groups.at("odd").value == doctest::Approx(3));
  CHECK(groups.at("odd").low == doctest::Approx(3));
  CHECK(groups.at("none").passes == 0);

  std::vector<PositionAcceptance> positions;
  add_pass(positions, 4, 4);
  add_pass(positions, 4, 1);
  add_pass(positions, 2, 0);
  REQUIRE(positions.size() == 4);
  CHECK(positions[0].reached == 3);
  CHECK(positions[0].accepted == 2);
  CHECK(positions[1].reached == 2);
  CHECK(positions[1].accepted == 1);
  CHECK(positions[3].reached == 1);
  CHECK(positions[3].accepted == 1);
}
