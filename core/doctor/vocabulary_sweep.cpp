#include "core/doctor/vocabulary_sweep.hpp"

#include "core/base/error.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace sf {

namespace {

// The most frequent successor of each token, among the tokens of a vocabulary.
std::unordered_map<int64_t, int64_t> best_successors(const TokenFile& file, const std::unordered_set<int64_t>& vocabulary) {
  std::map<std::pair<int64_t, int64_t>, int64_t> pairs;
  for (const TokenSample& sample : file.samples) {
    for (std::size_t t = 1; t < sample.input_ids.size(); ++t) {
      if (sample.loss_mask[t] != 0 && vocabulary.contains(sample.input_ids[t])) ++pairs[{sample.input_ids[t - 1], sample.input_ids[t]}];
    }
  }
  std::unordered_map<int64_t, std::pair<int64_t, int64_t>> best;  // token -> count, successor
  for (const auto& [pair, count] : pairs) {
    auto& found = best[pair.first];
    if (count > found.first) found = {count, pair.second};
  }
  std::unordered_map<int64_t, int64_t> result;
  for (const auto& [token, found] : best) result[token] = found.second;
  return result;
}

double covered(const TokenCounts& counts, const std::unordered_set<int64_t>& vocabulary) {
  int64_t all = 0;
  int64_t inside = 0;
  for (const auto& [token, count] : counts) {
    all += count;
    inside += vocabulary.contains(token) ? count : 0;
  }
  return static_cast<double>(inside) / static_cast<double>(std::max<int64_t>(all, 1));
}

std::string cell(const std::string& text, std::size_t width) {
  return std::string(text.size() < width ? width - text.size() : 0, ' ') + text;
}

}  // namespace

std::vector<int64_t> draft_vocabulary(const TokenFile& train, int64_t size) {
  std::vector<std::pair<int64_t, int64_t>> order;  // -count, token; by first appearance
  std::unordered_map<int64_t, std::size_t> places;
  for (const TokenSample& sample : train.samples) {
    std::vector<int64_t> tokens;
    for (std::size_t t = 0; t < sample.input_ids.size(); ++t) {
      if (sample.loss_mask[t] != 0) tokens.push_back(sample.input_ids[t]);
    }
    std::sort(tokens.begin(), tokens.end());
    for (const int64_t token : tokens) {
      const auto [place, is_new] = places.emplace(token, order.size());
      if (is_new) order.emplace_back(0, token);
      --order[place->second].first;
    }
  }
  std::stable_sort(order.begin(), order.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<int64_t> chosen;
  for (std::size_t i = 0; i < order.size() && static_cast<int64_t>(i) < size; ++i) chosen.push_back(order[i].second);
  for (int64_t id = 0; static_cast<int64_t>(chosen.size()) < size; ++id) {
    if (!places.contains(id)) chosen.push_back(id);
  }
  return chosen;
}

std::vector<int64_t> usual_sizes(int64_t vocabulary) {
  std::vector<int64_t> sizes;
  for (int64_t size = 1024; size < vocabulary; size *= 2) sizes.push_back(size);
  sizes.push_back(vocabulary);
  return sizes;
}

VocabularySweep sweep_vocabulary(const TokenFile& train, const TokenFile* measured, std::vector<int64_t> sizes, int64_t draft_length) {
  SF_CHECK(draft_length > 0, "a draft of {} tokens", draft_length);
  VocabularySweep sweep{.draft_length = draft_length, .hit_rates = {0.5, 0.7, 0.9}, .is_held_out = measured != nullptr};
  const TokenFile& file = measured != nullptr ? *measured : train;
  const TokenCounts counts = supervised_counts(train);
  const TokenCounts measured_counts = supervised_counts(file);
  std::sort(sizes.begin(), sizes.end());
  sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
  for (const int64_t size : sizes) {
    const std::vector<int64_t> tokens = draft_vocabulary(train, size);
    const std::unordered_set<int64_t> vocabulary(tokens.begin(), tokens.end());
    const std::unordered_map<int64_t, int64_t> successors = best_successors(train, vocabulary);
    SweepRow row{.size = size, .train_coverage = covered(counts, vocabulary), .coverage = covered(measured_counts, vocabulary), .expected = std::vector<double>(sweep.hit_rates.size(), 0)};
    int64_t places = 0;
    double runs = 0;
    double hits = 0;
    for (const TokenSample& sample : file.samples) {
      const std::size_t end = sample.input_ids.size();
      for (std::size_t t = 0; t + 1 < end; ++t) {
        if (sample.loss_mask[t] == 0 || sample.loss_mask[t + 1] == 0) continue;
        ++places;
        const std::size_t last = std::min(end, t + 1 + static_cast<std::size_t>(draft_length));
        std::size_t run = t + 1;
        while (run < last && sample.loss_mask[run] != 0 && vocabulary.contains(sample.input_ids[run])) ++run;
        const auto length = static_cast<int64_t>(run - t - 1);
        runs += static_cast<double>(length);
        for (std::size_t i = 0; i < sweep.hit_rates.size(); ++i) {
          double chance = 1;
          for (int64_t k = 0; k < length; ++k) row.expected[i] += chance *= sweep.hit_rates[i];
        }
        for (std::size_t k = t + 1; k < run; ++k) {
          const auto guess = successors.find(sample.input_ids[k - 1]);
          if (guess == successors.end() || guess->second != sample.input_ids[k]) break;
          hits += 1;
        }
      }
    }
    const auto count = static_cast<double>(std::max<int64_t>(places, 1));
    row.ceiling = 1 + runs / count;
    row.bigram = 1 + hits / count;
    for (double& value : row.expected) value = 1 + value / count;
    sweep.rows.push_back(std::move(row));
  }
  return sweep;
}

Json VocabularySweep::to_json() const {
  Json list = Json::array();
  for (const SweepRow& row : rows) {
    list.push_back(Json::object({{"size", row.size},
                                 {"train_coverage", row.train_coverage},
                                 {"coverage", row.coverage},
                                 {"ceiling", row.ceiling},
                                 {"expected", Json::array_of(row.expected)},
                                 {"bigram", row.bigram}}));
  }
  return Json::object({{"draft_length", draft_length}, {"hit_rates", Json::array_of(hit_rates)}, {"held_out", is_held_out}, {"sizes", std::move(list)}});
}

std::string VocabularySweep::text() const {
  std::string out = format("draft vocabulary: coverage of supervised tokens, and acceptance length of drafts of {} tokens ({})\n", draft_length,
                           is_held_out ? "held-out records" : "the training records themselves: there are no held-out ones");
  out += cell("size", 10) + cell("train", 10) + cell(is_held_out ? "held out" : "same", 10) + cell("ceiling", 10);
  for (const double rate : hit_rates) out += cell(format("hits {} %", std::lround(rate * 100)), 11);
  out += cell("bigram", 10) + "\n";
  for (const SweepRow& row : rows) {
    out += cell(std::to_string(row.size), 10) + cell(format_fixed(100 * row.train_coverage, 2) + " %", 10) + cell(format_fixed(100 * row.coverage, 2) + " %", 10) +
           cell(format_fixed(row.ceiling, 3), 10);
    for (const double value : row.expected) out += cell(format_fixed(value, 3), 11);
    out += cell(format_fixed(row.bigram, 3), 10) + "\n";
  }
  return out + "ceiling: a draft that is right whenever it can say the token; hits: one that is right that often; bigram: a table of pairs that may say these tokens\n";
}

}  // namespace sf
