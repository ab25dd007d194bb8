#include "core/data/tokens.hpp"

#include "sf/json.hpp"

#include "core/base/error.hpp"
#include "core/base/file.hpp"

#include <algorithm>

namespace sf {

namespace {

constexpr size_t kReportedMax = 20;

int64_t integer_at(const char* key, const Json::Array& list, size_t i) {
  try {
    return list[i].as_int();
  } catch (const JsonError&) {
    throw JsonError(format("{}[{}] is {}, an integer expected", key, i, list[i].dump()));
  }
}

// One line's sample. Throws JsonError with what is wrong.
TokenSample parse_sample(std::string_view line, const TokenLimits& limits) {
  const Json record = Json::parse(line, "line");
  if (!record.is_object()) throw JsonError(std::string("expected an object, found ") + record.kind_name());
  TokenSample sample;
  if (const Json* id = record.find("id"); id != nullptr && !id->is_null()) {
    sample.id = id->is_string() ? id->as_string() : id->dump();
  }
  const Json::Array& ids = record.at("input_ids").items();
  const Json::Array& mask = record.at("loss_mask").items();
  if (ids.empty()) throw JsonError("input_ids is empty");
  if (ids.size() != mask.size()) {
    throw JsonError(
        format("input_ids has {} elements, loss_mask {}; the same number expected", ids.size(), mask.size()));
  }
  const size_t kept =
      limits.max_length > 0 ? std::min(ids.size(), static_cast<size_t>(limits.max_length)) : ids.size();
  sample.input_ids.reserve(kept);
  sample.loss_mask.reserve(kept);
  for (size_t i = 0; i < ids.size(); ++i) {
    const int64_t id = integer_at("input_ids", ids, i);
    if (id < 0 || (limits.vocab_size > 0 && id >= limits.vocab_size)) {
      throw JsonError(
          format("input_ids[{}] is {}, but the target has the tokens 0 to {}", i, id, limits.vocab_size - 1));
    }
    const int64_t supervised =
        mask[i].is_bool() ? static_cast<int64_t>(mask[i].as_bool()) : integer_at("loss_mask", mask, i);
    if (supervised != 0 && supervised != 1)
      throw JsonError(format("loss_mask[{}] is {}, 0 or 1 expected", i, supervised));
    if (i >= kept) continue;  // checked all the same
    sample.input_ids.push_back(id);
    sample.loss_mask.push_back(static_cast<uint8_t>(supervised));
  }
  return sample;
}

}  // namespace

std::vector<TokenSample> read_tokens(const std::filesystem::path& path, const TokenLimits& limits) {
  const MappedFile file(path);
  std::vector<TokenSample> samples;
  std::string problems;
  size_t broken = 0;
  std::string_view rest = file.text();
  for (int64_t number = 1; !rest.empty(); ++number) {
    const size_t end = rest.find('\n');
    const std::string_view line = rest.substr(0, end);
    rest = end == std::string_view::npos ? std::string_view() : rest.substr(end + 1);
    if (trim(line).empty()) continue;
    try {
      samples.push_back(parse_sample(line, limits));
      if (samples.back().id.empty()) samples.back().id = format("line {}", number);
    } catch (const JsonError& error) {
      if (++broken <= kReportedMax) {
        std::string what = error.what();
        if (error.line() > 0) {  // the text's own place, counted in the file
          const size_t reason = what.find("not valid JSON");
          what =
              format("column {}: {}", error.column(), what.substr(reason == std::string::npos ? 0 : reason));
        }
        problems += format("\n  {}:{}: {}", path, number, what);
      }
    }
  }
  if (broken > 0) {
    if (broken > kReportedMax) problems += format("\n  and {} more", broken - kReportedMax);
    throw Error(ExitCode::kData,
                format("{}: {} of {} lines can't be used{}", path, broken, broken + samples.size(), problems),
                "each line is an object with input_ids and loss_mask, lists of integers of the same length");
  }
  if (samples.empty()) throw Error(ExitCode::kData, format("{}: there is no sample in it", path), "one object a line is expected: {\"input_ids\": [...], \"loss_mask\": [...]}; sf-host prepare makes them of conversations");
  return samples;
}

std::string tokens_fingerprint(const std::vector<TokenSample>& samples) {
  Sha256 sha;
  for (const TokenSample& sample : samples) {
    const int64_t count = static_cast<int64_t>(sample.input_ids.size());
    sha.add(std::as_bytes(std::span(&count, 1)));
    sha.add(std::as_bytes(std::span(sample.input_ids)));
    sha.add(std::as_bytes(std::span(sample.loss_mask)));
  }
  return sha.hex();
}

bool has_supervised_pair(const std::vector<uint8_t>& loss_mask) {
  for (size_t i = 0; i + 1 < loss_mask.size(); ++i) {
    if (loss_mask[i] != 0 && loss_mask[i + 1] != 0) return true;
  }
  return false;
}

}  // namespace sf
