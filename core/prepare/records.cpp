#include "core/prepare/records.hpp"

#include "core/base/error.hpp"
#include "core/base/file.hpp"
#include "core/data/tokens.hpp"

#include <algorithm>
#include <charconv>
#include <iterator>
#include <span>
#include <string_view>

namespace sf {

namespace {

std::string digest_of(std::span<const int64_t> ids) {
  Sha256 sha;
  sha.add(std::as_bytes(ids));
  return sha.hex();
}

// A range of tokens of the row, within the tokens that are kept.
struct Range {
  std::size_t begin = 0, end = 0;
};

Range range_of(const Json& list, std::size_t first, std::size_t last, std::size_t count) {
  const auto at = [&](std::size_t i) { return std::min(static_cast<std::size_t>(std::max<int64_t>(list.at(i).as_int(), 0)), count); };
  return {at(first), at(last)};
}

void append_numbers(std::string& out, const auto& numbers) {
  out += '[';
  char digits[24];
  for (const auto number : numbers) {
    const auto end = std::to_chars(std::begin(digits), std::end(digits), static_cast<int64_t>(number)).ptr;
    out.append(digits, end);
    out += ',';
  }
  if (out.back() == ',') out.pop_back();
  out += ']';
}

std::string examples_of(const RowCounts& counts, const std::string& reason) {
  std::string out;
  if (const auto seen = counts.examples.find(reason); seen != counts.examples.end()) {
    for (const std::string& text : seen->second) out += format("\n    {}", text);
  }
  return out;
}

}  // namespace

Json MaskOptions::to_json() const {
  return Json::object({{"only_last_turn", only_last_turn}, {"reasoning", reasoning}, {"min_supervised_tokens", min_supervised_tokens}, {"prompts", prompts}});
}

std::string PreparedRecord::digest() const {
  return digest_of(input_ids);
}

std::string PreparedRecord::prompt_digest() const {
  return question == 0 ? digest() : digest_of(std::span(input_ids).first(question));
}

std::optional<PreparedRecord> make_record(const TextRow& text, const MaskOptions& options, SkippedRow& skipped) {
  const Json& row = text.said;
  if (const Json* reason = row.find("skip")) {
    skipped = {reason->as_string(), row.at("why").as_string()};
    return std::nullopt;
  }
  PreparedRecord record;
  record.input_ids.assign(text.ids.begin(), text.ids.end());
  const std::size_t count = record.input_ids.size();
  const int64_t tokens = row.at("tokens").as_int();
  record.is_cut = tokens > static_cast<int64_t>(count);
  record.loss_mask.assign(count, 0);
  if (options.prompts) {
    if (record.is_cut || count == 0) {  // a prompt without its end asks something else
      skipped = count == 0 ? SkippedRow{"empty", "there is no token"} : SkippedRow{"too-long", format("the prompt has {} tokens, at most {} fit", tokens, count)};
      return std::nullopt;
    }
    return record;
  }
  const Json::Array& answers = row.at("answers").items();
  const std::size_t first_answer = options.only_last_turn && !answers.empty() ? answers.size() - 1 : 0;
  if (first_answer < answers.size()) record.question = range_of(answers[first_answer], 0, 1, count).begin;
  for (std::size_t i = first_answer; i < answers.size(); ++i) {
    const Range answer = range_of(answers[i], options.reasoning ? 0 : 2, 1, count);
    for (std::size_t t = answer.begin; t < answer.end; ++t) record.loss_mask[t] = 1;
  }
  if (const Json* ignored = row.find("ignored")) {
    for (const Json& part : ignored->items()) {
      const Range range = range_of(part, 0, 1, count);
      for (std::size_t t = range.begin; t < range.end; ++t) record.loss_mask[t] = 0;
    }
  }
  record.supervised = std::count(record.loss_mask.begin(), record.loss_mask.end(), 1);
  if (record.supervised == 0 && record.is_cut) {
    skipped = {"cut-before-answer", format("no answer begins within the first {} of {} tokens", count, tokens)};
    return std::nullopt;
  }
  if (record.supervised < options.min_supervised_tokens || !has_supervised_pair(record.loss_mask)) {
    skipped = {"too-few-supervised", format("{} supervised tokens, at least {} and two neighbours expected", record.supervised, options.min_supervised_tokens)};
    return std::nullopt;
  }
  const auto last = std::find(record.loss_mask.rbegin(), record.loss_mask.rend(), 1);
  const auto kept = static_cast<std::size_t>(record.loss_mask.rend() - last);
  record.input_ids.resize(kept);
  record.loss_mask.resize(kept);
  return record;
}

std::string record_line(const PreparedRecord& record, const Json& row, const std::string& otherwise) {
  const Json* id = row.find("id");
  std::string line = "{\"id\":" + (id != nullptr ? *id : Json(otherwise)).dump();
  if (const Json* category = row.find("category")) line += ",\"category\":" + category->dump();
  line += ",\"input_ids\":";
  append_numbers(line, record.input_ids);
  line += ",\"loss_mask\":";
  append_numbers(line, record.loss_mask);
  Json roles = Json::array();
  if (const Json* found = row.find("roles")) {
    for (const Json& role : found->items()) {
      const Range range = range_of(role, 1, 2, record.input_ids.size());
      if (range.begin < range.end) roles.push_back(Json::array().push_back(role.at(size_t{0})).push_back(range.begin).push_back(range.end));
    }
  }
  if (roles.size() > 0) line += ",\"roles\":" + roles.dump();
  return line + "}";
}

double split_place(const std::string& prompt_digest, int64_t seed) {
  const std::string hex = sha256(format("{} {}", seed, prompt_digest)).substr(0, 13);  // 52 bits: exact in a double
  return static_cast<double>(std::stoull(hex, nullptr, 16)) / 4503599627370496.0;
}

void RowCounts::skip(const SkippedRow& row, const std::string& place) {
  ++skipped[row.reason];
  std::vector<std::string>& seen = examples[row.reason];
  if (seen.size() < kExamples) seen.push_back(format("{}: {}", place, row.why));
}

void RowCounts::note(const std::string& note, const std::string& place) {
  const std::size_t colon = note.find(": ");
  const std::string name = note.substr(0, colon);
  ++notes[name];
  if (colon == std::string::npos) return;
  std::vector<std::string>& seen = examples[name];
  if (seen.size() < kExamples) seen.push_back(format("{}{}", place, note.substr(colon)));
}

void RowCounts::add(const RowCounts& other) {
  rows += other.rows;
  records += other.records;
  cut += other.cut;
  for (const auto& [reason, count] : other.skipped) skipped[reason] += count;
  for (const auto& [note, count] : other.notes) notes[note] += count;
  for (const auto& [reason, texts] : other.examples) {
    std::vector<std::string>& seen = examples[reason];
    for (const std::string& text : texts) {
      if (seen.size() < kExamples) seen.push_back(text);
    }
  }
}

int64_t RowCounts::skipped_rows() const {
  int64_t sum = 0;
  for (const auto& [reason, count] : skipped) sum += count;
  return sum;
}

Json RowCounts::to_json() const {
  Json reasons = Json::object();
  for (const auto& [reason, count] : skipped) reasons.set(reason, count);
  Json shown = Json::object();
  for (const auto& [reason, texts] : examples) shown.set(reason, Json::array_of(texts));
  Json mended = Json::object();
  for (const auto& [note, count] : notes) mended.set(note, count);
  return Json::object({{"rows", rows}, {"records", records}, {"cut_to_max_length", cut}, {"skipped", reasons}, {"examples", shown}, {"notes", mended}});
}

RowCounts RowCounts::from_json(const Json& json) {
  RowCounts counts;
  counts.rows = json.at("rows").as_int();
  counts.records = json.at("records").as_int();
  counts.cut = json.at("cut_to_max_length").as_int();
  for (const auto& [reason, count] : json.at("skipped").entries()) counts.skipped[reason] = count.as_int();
  for (const auto& [note, count] : json.at("notes").entries()) counts.notes[note] = count.as_int();
  for (const auto& [reason, texts] : json.at("examples").entries()) {
    for (const Json& text : texts.items()) counts.examples[reason].push_back(text.as_string());
  }
  return counts;
}

std::string RowCounts::table() const {
  std::string out;
  for (const auto& [reason, count] : skipped) out += format("\n  {} {}{}", count, reason, examples_of(*this, reason));
  return out;
}

std::string RowCounts::notes_table() const {
  std::string out;
  for (const auto& [note, count] : notes) {
    out += format("\n  {} kept with the note {}{}", count, note, examples_of(*this, note));
    if (note == "special-token-text") {
      out += "\n    it has become that token, as transformers makes it, and the model takes it for one; data.special_token_text = \"skip\" leaves such rows out";
    }
  }
  return out;
}

}  // namespace sf
