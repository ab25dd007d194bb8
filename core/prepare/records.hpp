// core/prepare/records.hpp: what becomes of one row: which of its tokens are supervised, whether it is kept, and how all of them are accounted for.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "sf/json.hpp"

namespace sf {

struct MaskOptions {
  bool only_last_turn = false;       // supervise the last answer alone
  bool reasoning = true;             // supervise what the model thinks before it answers
  int64_t min_supervised_tokens = 2;
  bool prompts = false;              // nothing is supervised: prompts that the target is to answer

  [[nodiscard]] Json to_json() const;
};

/// A row as the text worker gives it.
struct TextRow {
  Json said;  // {"tokens", "answers", "roles", ...} or {"skip", "why"}
  std::vector<int32_t> ids;
};

/// A token record as capture reads it, with its content's names for duplicates and for the split.
struct PreparedRecord {
  std::vector<int64_t> input_ids;
  std::vector<uint8_t> loss_mask;
  int64_t supervised = 0;
  std::size_t question = 0;  // tokens before the first answer that counts, whose thoughts belong to it; 0: nothing is asked
  bool is_cut = false;       // its text was longer than max_length

  /// SHA-256 of the ids; equal for duplicates.
  [[nodiscard]] std::string digest() const;
  /// SHA-256 of the question's ids: the same for two answers to one question, whatever is supervised of them. Of all ids where nothing is asked: a text that is
  /// supervised as a whole has no question that it could share.
  [[nodiscard]] std::string prompt_digest() const;
};

/// Why a row is not kept.
struct SkippedRow {
  std::string reason;  // "unknown-role", "too-few-supervised" ...
  std::string why;
};

/// Decides on a row of the text worker. Tokens behind the last supervised one are cut off: nothing is learnt from them. Returns a record, or nothing
/// and fills `skipped`.
[[nodiscard]] std::optional<PreparedRecord> make_record(const TextRow& row, const MaskOptions& options, SkippedRow& skipped);

/// One line of a token file. `row` gives id, category and roles; `otherwise` is the id of a row that has none.
[[nodiscard]] std::string record_line(const PreparedRecord& record, const Json& row, const std::string& otherwise);

/// Part of [0, 1) that belongs to this prompt and seed; below held_out_share it is held out. So a question is never on both sides.
[[nodiscard]] double split_place(const std::string& prompt_digest, int64_t seed);

/// What became of the rows. rows == records + sum of skipped.
struct RowCounts {
  static constexpr std::size_t kExamples = 3;  // of each reason

  int64_t rows = 0, records = 0, cut = 0;
  std::map<std::string, int64_t> skipped;                    // by reason
  std::map<std::string, std::vector<std::string>> examples;  // "chat.jsonl:17: message 0 has the role 'x'", the first few of each reason, and of some notes
  std::map<std::string, int64_t> notes;                      // rows that were mended or lost a part

  void skip(const SkippedRow& row, const std::string& place);
  /// As the text worker says it: "NAME", or "NAME: WHY", of which the first few are kept as examples.
  void note(const std::string& note, const std::string& place);
  void add(const RowCounts& other);
  [[nodiscard]] int64_t skipped_rows() const;
  [[nodiscard]] Json to_json() const;
  /// Throws JsonError.
  [[nodiscard]] static RowCounts from_json(const Json& json);
  /// Reasons with counts and examples, a line each.
  [[nodiscard]] std::string table() const;
  /// Notes likewise, with what can be done where something can.
  [[nodiscard]] std::string notes_table() const;
};

}  // namespace sf
