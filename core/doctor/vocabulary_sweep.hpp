// core/doctor/vocabulary_sweep.hpp: what a draft vocabulary of some size costs, known before anything is trained: how much of what the target says it
// covers, and how long accepted drafts can get at best.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sf/json.hpp"

#include "core/doctor/token_statistics.hpp"

namespace sf {

struct SweepRow {
  int64_t size = 0;
  double train_coverage = 0;      // share of supervised tokens of the file that the vocabulary is chosen from
  double coverage = 0;            // of the held-out file; of the same file when there is none
  double ceiling = 0;             // acceptance length of a draft that is right whenever its vocabulary has the token
  std::vector<double> expected;   // acceptance length at each of the hit rates
  double bigram = 0;              // acceptance length of a table of pairs that may only say these tokens
};

struct VocabularySweep {
  int64_t draft_length = 0;       // tokens drafted at once
  std::vector<double> hit_rates;  // of a draft, for tokens that it can say
  bool is_held_out = false;
  std::vector<SweepRow> rows;

  [[nodiscard]] Json to_json() const;
  [[nodiscard]] std::string text() const;
};

/// The tokens that a draft with so many would have, by the rule of sdk/draft/draft_vocabulary.hpp: the most frequent supervised ones; among equals those of the
/// earlier record, in a record the lower id; when fewer occur, 0, 1, 2 ... fill it up.
[[nodiscard]] std::vector<int64_t> draft_vocabulary(const TokenFile& train, int64_t size);

/// `measured` is where coverage and acceptance are measured; nullptr: on `train`. Acceptance is 1 + the leading drafted tokens that are right, averaged
/// over all supervised places that a supervised token follows.
[[nodiscard]] VocabularySweep sweep_vocabulary(const TokenFile& train, const TokenFile* measured, std::vector<int64_t> sizes, int64_t draft_length);

/// 1024, 2048, ... below the vocabulary, then the vocabulary.
[[nodiscard]] std::vector<int64_t> usual_sizes(int64_t vocabulary);

}  // namespace sf
