// core/doctor: looks into data before a run is spent on it. In: token files, features, a target's folder. Out: figures, pages, and a verdict where there
// is one. Most faults of data never crash a run, they spoil it. No LibTorch.
//
// token_statistics.hpp: what a token file is made of.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "sf/json.hpp"

#include "core/data/tokens.hpp"

namespace sf {

/// A message's content within a record, as prepare notes it: tokens [begin, end).
struct RoleRange {
  std::string role;
  int64_t begin = 0, end = 0;
};

struct TokenFile {
  std::filesystem::path path;
  std::vector<TokenSample> samples;
  std::vector<std::vector<RoleRange>> roles;  // of each sample; empty where the file has none
};

/// Reads all of it, roles included. Throws Error(data) as read_tokens does.
[[nodiscard]] TokenFile read_token_file(const std::filesystem::path& path, const TokenLimits& limits);

struct Share {
  int64_t tokens = 0, supervised = 0;
};

struct TokenStatistics {
  int64_t records = 0, tokens = 0, supervised = 0;
  int64_t without_pair = 0;            // capture leaves these out
  int64_t longest = 0, median = 0;
  std::vector<int64_t> histogram;      // records by length, ten bins of `bin_width`
  int64_t bin_width = 1;
  std::vector<Share> turns;            // [i]: the i-th run of supervised tokens of every record, and the tokens before it
  std::map<std::string, Share> roles;  // by role; "template" is what belongs to no message. Empty when the file notes none
  int64_t duplicates = 0;              // records whose ids another one before has
  int64_t repeated_questions = 0;      // likewise for the ids before the first supervised token

  [[nodiscard]] Json to_json() const;
  [[nodiscard]] std::string text() const;
};

[[nodiscard]] TokenStatistics token_statistics(const TokenFile& file);

/// How often each token is supervised.
using TokenCounts = std::unordered_map<int64_t, int64_t>;
[[nodiscard]] TokenCounts supervised_counts(const TokenFile& file);

}  // namespace sf
