// core/doctor/token_page.hpp: records as a person can judge them: each token in its colour, on a terminal and on a page of its own.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <unordered_set>
#include <vector>

#include "core/doctor/token_statistics.hpp"
#include "core/doctor/vocabulary_sweep.hpp"

namespace sf {

/// A record with the text of its tokens (or "<17>" where no tokenizer is at hand).
struct ShownRecord {
  std::string id;
  std::vector<int64_t> ids;
  std::vector<uint8_t> mask;
  std::vector<std::string> texts;
};

/// `count` records spread evenly over the file.
[[nodiscard]] std::vector<ShownRecord> choose_records(const TokenFile& file, int64_t count);

/// Control characters made visible: "⏎" for a newline, followed by a real one when `breaks`.
[[nodiscard]] std::string visible(const std::string& text, bool breaks);

/// Supervised tokens green, alternately bright so that their borders show; others grey; outside the vocabulary underlined. Without `colours`:
/// supervised tokens in [brackets].
[[nodiscard]] std::string terminal_text(const ShownRecord& record, const std::unordered_set<int64_t>& vocabulary, bool colours);

struct PageContent {
  std::string title;                         // "data.train_data_path: /data/train.jsonl"
  TokenStatistics statistics;
  std::vector<ShownRecord> records;
  std::unordered_set<int64_t> vocabulary;    // the draft's; empty: all tokens
  std::vector<std::string> outside;          // what of the file's supervised tokens is outside of it, told in lines
};

/// One HTML file without scripts, fonts or pictures from elsewhere.
[[nodiscard]] std::string html_page(const std::vector<PageContent>& parts, const VocabularySweep* sweep);

}  // namespace sf
