// What decides whether an answer is the target's own, and the figures over passes. About 1 s.
#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <stdexcept>
#include <utility>

#include "core/base/error.hpp"
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

namespace {

// A draft that guesses whatever it is told to, or the target's own next tokens.
struct GuessingDrafter final : Drafter {
  std::vector<std::string> reads() const override { return {}; }
  int64_t drafted_tokens_at_most() const override { return 0; }
  void remember(DraftUnits&, DraftMemory&, const SeenTokens&) const override {}
  DraftAnswer propose(DraftUnits&, const DraftMemory&, const DraftQuestion& question) const override { return answer(question); }
  std::function<DraftAnswer(const DraftQuestion&)> answer;
};

struct NoUnits final : DraftUnits {
  std::vector<at::Tensor> run(int64_t, const std::vector<at::Tensor>&) override { return {}; }
  UnitContext& context(int64_t) override { throw std::logic_error("it has no units"); }
};

std::vector<std::vector<int64_t>> decoded(const GuessingDrafter& drafter, int64_t tokens, const Target& target = tiny()) {
  const DecodingLimits limits{.max_new_tokens = 8};
  const PromptGroup group(target, {kPrompt, {.id = "two", .category = "all", .ids = {1, 40}}}, 0, limits, {}, tokens);
  NoUnits units;
  const DecodingDraft draft{.name = "guesser", .drafter = &drafter, .units = &units, .description = {}, .tokens = tokens};
  return group.speculative(draft).answers;
}

}  // namespace

TEST_CASE("speculative: whatever a draft guesses, the answers are the target's; what it may not answer is refused by name") {
  const std::vector<std::vector<int64_t>> own = {best_tokens(kPrompt.ids, 8), best_tokens({1, 40}, 8)};
  GuessingDrafter drafter;
  for (const int64_t guess : {0, 7, 319}) {
    drafter.answer = [&](const DraftQuestion& question) { return DraftAnswer{.ids_bk = at::full({question.known_ids_b.size(0), question.tokens}, guess, at::kLong), .advised_b = {}, .scores_bkv = {}}; };
    CHECK(decoded(drafter, 3) == own);
  }
  drafter.answer = [&](const DraftQuestion& question) {  // the right ones, where it stands
    at::Tensor ids = at::zeros({question.known_ids_b.size(0), question.tokens}, at::kLong);
    for (int64_t j = 0; j < ids.size(0); ++j) {
      for (int64_t k = 0; k < ids.size(1); ++k) {
        for (size_t row = 0; row < own.size(); ++row) {
          const int64_t at = question.positions_b[j].item<int64_t>() - (row == 0 ? 4 : 2) + 1 + k;
          if (at < 8 && question.known_ids_b[j].item<int64_t>() == own[row][static_cast<size_t>(at - 1 - k)]) ids[j][k] = own[row][static_cast<size_t>(at)];
        }
      }
    }
    return DraftAnswer{.ids_bk = ids, .advised_b = {}, .scores_bkv = {}};
  };
  CHECK(decoded(drafter, 3) == own);

  const auto refused = [&](const std::function<DraftAnswer(const DraftQuestion&)>& answer, const char* said) {
    drafter.answer = answer;
    CHECK_THROWS_WITH_AS((void)decoded(drafter, 3), doctest::Contains(said), Error);
  };
  refused([](const DraftQuestion&) { return DraftAnswer(); }, "guesser: propose() was asked for 3 tokens of each of 2 sequences and gave none");
  refused([](const DraftQuestion& q) { return DraftAnswer{.ids_bk = at::zeros({q.known_ids_b.size(0), 2}, at::kLong), .advised_b = {}, .scores_bkv = {}}; }, "ids_bk of shape [2, 2]");
  refused([](const DraftQuestion& q) { return DraftAnswer{.ids_bk = at::zeros({q.known_ids_b.size(0), 3}), .advised_b = {}, .scores_bkv = {}}; }, "and type Float");
  refused([](const DraftQuestion& q) { return DraftAnswer{.ids_bk = at::full({q.known_ids_b.size(0), 3}, 320, at::kLong), .advised_b = {}, .scores_bkv = {}}; }, "the token 320, and there are 0 to 319");
  refused([](const DraftQuestion& q) { return DraftAnswer{.ids_bk = at::zeros({q.known_ids_b.size(0), 3}, at::kLong), .advised_b = at::zeros({1}, at::kLong), .scores_bkv = {}}; }, "advised_b of shape [1]");
}

TEST_CASE("speculative: guesses behind an answer's end count neither as right nor as wrong") {
  const std::vector<int64_t> own = best_tokens(kPrompt.ids, 12);
  GuessingDrafter drafter;  // always right, also behind the end
  drafter.answer = [&](const DraftQuestion& question) {
    const int64_t known = question.positions_b[0].item<int64_t>() - static_cast<int64_t>(kPrompt.ids.size());
    at::Tensor ids = at::zeros({1, question.tokens}, at::kLong);
    for (int64_t k = 0; k < question.tokens; ++k) ids[0][k] = own[static_cast<size_t>(known + 1 + k)];
    return DraftAnswer{.ids_bk = ids, .advised_b = at::full({1}, 3, at::kLong), .scores_bkv = {}};
  };
  const auto passes = [&](int64_t new_tokens, std::vector<int64_t> stops = {}) {
    const DecodingLimits limits{.max_new_tokens = new_tokens, .stop_tokens = std::move(stops)};
    const PromptGroup group(tiny(), {kPrompt}, 0, limits, {}, 4);
    NoUnits units;
    return group.speculative({.name = "guesser", .drafter = &drafter, .units = &units, .description = {}, .tokens = 4}).passes;
  };
  // One token comes with the prompt, five with the first pass; the second has room for two of its five.
  const std::vector<SpeculativePass> cut = passes(8);
  REQUIRE(cut.size() == 2);
  CHECK(cut[0].judged == 4);
  CHECK(cut[0].accepted == 4);
  CHECK(cut[1].judged == 2);
  CHECK(cut[1].accepted == 2);
  std::vector<PositionAcceptance> positions;
  for (const SpeculativePass& pass : cut) add_pass(positions, pass.judged, pass.accepted);
  for (const PositionAcceptance& position : positions) CHECK(position.accepted == position.reached);

  const auto stop = std::find(own.begin() + 1, own.end(), own[3]);
  const std::vector<SpeculativePass> stopped = passes(12, {own[3]});
  REQUIRE(stopped.size() == 1);
  CHECK(stopped[0].judged == stop - own.begin());
  CHECK(stopped[0].accepted == stopped[0].judged);
}

TEST_CASE("speculative: the verdict is lossless with ties alone, and names the first answer that is not the target's or the cache's fault") {
  const auto compared = [](std::vector<std::vector<int64_t>> found) {  // with the target's own answers; as `eval --speculative` compares
    ComparedAnswers answers{.draft = "draft", .answers = static_cast<int64_t>(found.size()), .exact = 0, .differences = {}};
    const std::vector<int64_t> own = best_tokens(kPrompt.ids, 8);
    for (size_t i = 0; i < found.size(); ++i) {
      const auto difference = judge_difference(tiny(), kPrompt, own, found[i]);
      if (difference) {
        answers.differences.emplace_back(std::to_string(i), *difference);
      } else {
        ++answers.exact;
      }
    }
    return answers;
  };
  const std::vector<int64_t> own = best_tokens(kPrompt.ids, 8);
  std::vector<int64_t> wrong = own, shorter(own.begin(), own.begin() + 3);
  wrong[5] = (wrong[5] + 7) % 320;
  const WholeCheck fine{.tokens = 24, .worst_margin = 0.0, .tolerance = 1e-3};

  const LosslessVerdict good = lossless_verdict({compared({own, own}), compared({own, own})}, fine);
  CHECK(good.lossless);
  CHECK(good.text == "lossless: 4 of 4 answers are the target's own token for token; 24 tokens of them checked by whole passes");

  ComparedAnswers tied = compared({own});
  tied.answers = 2;
  tied.differences.emplace_back("tied", Difference{.position = 2, .expected = 5, .found = 6, .margin = 1e-6, .tolerance = 1e-3, .is_tie = true});
  const LosslessVerdict tie = lossless_verdict({tied}, fine);
  CHECK(tie.lossless);
  CHECK(tie.ties == 1);
  CHECK(tie.text.find("1 leave it where two tokens are equally good") != std::string::npos);

  for (const auto& [answer, place] : {std::pair(wrong, format("token 6 of the answer: the target alone says {}, decoding with the draft gave {}", own[5], wrong[5])),
                                      std::pair(shorter, format("token 4 of the answer: the target alone says {}, decoding with the draft gave -1", own[3]))}) {
    const LosslessVerdict bad = lossless_verdict({tied, compared({own, own, answer, wrong})}, fine);
    CHECK_FALSE(bad.lossless);
    CHECK(bad.exact == 3);
    CHECK(bad.ties == 1);
    CHECK(bad.first.find("draft, prompt '2', " + place) == 0);
    CHECK(bad.text == "NOT LOSSLESS: " + bad.first);
  }

  const LosslessVerdict stale = lossless_verdict({compared({own})}, {.tokens = 8, .worst_margin = 0.5, .tolerance = 1e-3});
  CHECK_FALSE(stale.lossless);
  CHECK(stale.text == "NOT LOSSLESS: decoding with a cache leaves what one whole pass of the target says, by 0.5000 where rounding explains 0.0010");
  CHECK_FALSE(lossless_verdict({compared({own})}, {.tokens = 8, .worst_margin = std::nan(""), .tolerance = 1e-3}).lossless);
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
