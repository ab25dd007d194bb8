#include "core/doctor/token_statistics.hpp"

#include "core/base/error.hpp"
#include "core/base/file.hpp"

#include <algorithm>
#include <span>
#include <unordered_set>

namespace sf {

namespace {

constexpr std::size_t kBins = 10;
constexpr std::size_t kTurnsTold = 12;

std::string digest_of(std::span<const int64_t> ids) {
  return sha256(std::as_bytes(ids));
}

std::string percent(int64_t part, int64_t whole) {
  return format("{} %", format_fixed(100.0 * static_cast<double>(part) / static_cast<double>(std::max<int64_t>(whole, 1)), 1));
}

std::string padded(std::string text, std::size_t width) {
  text.insert(0, text.size() < width ? width - text.size() : 0, ' ');
  return text;
}

}  // namespace

TokenFile read_token_file(const std::filesystem::path& path, const TokenLimits& limits) {
  TokenFile file{path, read_tokens(path, limits), {}};
  const MappedFile bytes(path);
  for (std::string_view rest = bytes.text(); !rest.empty();) {
    const std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(line.size() + 1, rest.size()));
    if (trim(line).empty()) continue;
    std::vector<RoleRange>& ranges = file.roles.emplace_back();
    if (line.find("\"roles\"") == std::string_view::npos) continue;
    const int64_t count = static_cast<int64_t>(file.samples.at(file.roles.size() - 1).input_ids.size());
    const Json record = Json::parse(line, path.string());
    const Json* roles = record.find("roles");
    if (roles == nullptr || !roles->is_array()) continue;
    for (const Json& role : roles->items()) {
      try {
        RoleRange range{role.at(size_t{0}).as_string(), role.at(size_t{1}).as_int(), role.at(size_t{2}).as_int()};
        range.begin = std::clamp<int64_t>(range.begin, 0, count);
        range.end = std::clamp<int64_t>(range.end, range.begin, count);
        ranges.push_back(std::move(range));
      } catch (const JsonError& error) {
        throw Error(ExitCode::kData, format("{}: record {}: roles: {}", path, file.roles.size(), error.what()), "roles is a list of [role, begin, end], as sf-host prepare writes it");
      }
    }
  }
  return file;
}

TokenStatistics token_statistics(const TokenFile& file) {
  TokenStatistics result;
  std::vector<int64_t> lengths;
  std::unordered_set<std::string> seen, asked;
  const bool has_roles = std::any_of(file.roles.begin(), file.roles.end(), [](const auto& roles) { return !roles.empty(); });
  for (std::size_t i = 0; i < file.samples.size(); ++i) {
    const TokenSample& sample = file.samples[i];
    const std::size_t count = sample.input_ids.size();
    ++result.records;
    result.tokens += static_cast<int64_t>(count);
    result.without_pair += has_supervised_pair(sample.loss_mask) ? 0 : 1;
    lengths.push_back(static_cast<int64_t>(count));
    result.duplicates += seen.insert(digest_of(sample.input_ids)).second ? 0 : 1;
    const auto first = std::find(sample.loss_mask.begin(), sample.loss_mask.end(), 1);
    if (first != sample.loss_mask.begin() && first != sample.loss_mask.end()) {  // what is supervised from its first token on has no question
      const auto length = static_cast<std::size_t>(first - sample.loss_mask.begin());
      result.repeated_questions += asked.insert(digest_of(std::span(sample.input_ids).first(length))).second ? 0 : 1;
    }
    std::size_t turn = 0;
    for (std::size_t t = 0; t < count; ++t) {
      const bool is_supervised = sample.loss_mask[t] != 0;
      if (t > 0 && !is_supervised && sample.loss_mask[t - 1] != 0) ++turn;
      if (turn >= result.turns.size()) result.turns.resize(turn + 1);
      ++result.turns[turn].tokens;
      result.turns[turn].supervised += is_supervised ? 1 : 0;
      result.supervised += is_supervised ? 1 : 0;
    }
    if (!has_roles) continue;
    std::vector<const char*> owner(count, "template");
    for (const RoleRange& range : file.roles[i]) {
      for (int64_t t = range.begin; t < range.end; ++t) owner[static_cast<std::size_t>(t)] = range.role.c_str();
    }
    for (std::size_t t = 0; t < count; ++t) {
      Share& share = result.roles[owner[t]];
      ++share.tokens;
      share.supervised += sample.loss_mask[t] != 0 ? 1 : 0;
    }
  }
  std::sort(lengths.begin(), lengths.end());
  result.longest = lengths.empty() ? 0 : lengths.back();
  result.median = lengths.empty() ? 0 : lengths[lengths.size() / 2];
  result.bin_width = std::max<int64_t>(1, (result.longest + static_cast<int64_t>(kBins) - 1) / static_cast<int64_t>(kBins));
  result.histogram.assign(kBins, 0);
  for (const int64_t length : lengths) ++result.histogram[std::min<std::size_t>(kBins - 1, static_cast<std::size_t>((length - 1) / result.bin_width))];
  return result;
}

TokenCounts supervised_counts(const TokenFile& file) {
  TokenCounts counts;
  for (const TokenSample& sample : file.samples) {
    for (std::size_t t = 0; t < sample.input_ids.size(); ++t) {
      if (sample.loss_mask[t] != 0) ++counts[sample.input_ids[t]];
    }
  }
  return counts;
}

Json TokenStatistics::to_json() const {
  const auto share = [](const Share& one) { return Json::object({{"tokens", one.tokens}, {"supervised", one.supervised}}); };
  Json by_turn = Json::array();
  for (const Share& turn : turns) by_turn.push_back(share(turn));
  Json by_role = Json::object();
  for (const auto& [role, one] : roles) by_role.set(role, share(one));
  return Json::object({{"records", records},
                       {"tokens", tokens},
                       {"supervised", supervised},
                       {"without_supervised_pair", without_pair},
                       {"median_length", median},
                       {"longest", longest},
                       {"histogram", Json::object({{"bin_width", bin_width}, {"records", Json::array_of(histogram)}})},
                       {"turns", std::move(by_turn)},
                       {"roles", std::move(by_role)},
                       {"duplicates", duplicates},
                       {"repeated_questions", repeated_questions}});
}

std::string TokenStatistics::text() const {
  std::string out = format("{} records, {} tokens, {} supervised ({})\n", records, tokens, supervised, percent(supervised, tokens));
  if (without_pair > 0) out += format("  {} records without two neighbouring supervised tokens: capture leaves them out\n", without_pair);
  out += format("  duplicates: {}; questions that come again: {}\n", duplicates, repeated_questions);
  out += format("  length: median {}, longest {}\n", median, longest);
  const int64_t most = std::max<int64_t>(1, *std::max_element(histogram.begin(), histogram.end()));
  for (std::size_t i = 0; i < histogram.size(); ++i) {
    const auto bar = static_cast<std::size_t>((histogram[i] * 40 + most - 1) / most);
    out += format("    {} .. {} {} {}\n", padded(std::to_string(static_cast<int64_t>(i) * bin_width + 1), 7), padded(std::to_string((static_cast<int64_t>(i) + 1) * bin_width), 7),
                  padded(std::to_string(histogram[i]), 8), std::string(bar, '#'));
  }
  out += "  by turn: tokens, supervised\n";
  for (std::size_t i = 0; i < std::min(turns.size(), kTurnsTold); ++i) {
    out += format("    {} {} {} ({})\n", padded(std::to_string(i + 1), 8), padded(std::to_string(turns[i].tokens), 10), padded(std::to_string(turns[i].supervised), 10),
                  percent(turns[i].supervised, turns[i].tokens));
  }
  if (turns.size() > kTurnsTold) out += format("    and {} turns more\n", turns.size() - kTurnsTold);
  if (!roles.empty()) out += "  by role: tokens, supervised\n";
  for (const auto& [role, share] : roles) {
    out += format("    {} {} {} ({})\n", padded(role, 10), padded(std::to_string(share.tokens), 10), padded(std::to_string(share.supervised), 10), percent(share.supervised, share.tokens));
  }
  return out;
}

}  // namespace sf
