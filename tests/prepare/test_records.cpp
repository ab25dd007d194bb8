// What becomes of a row of the text worker: mask, options, counts, the split.
#include <doctest/doctest.h>

#include <map>
#include <string>
#include <vector>

#include "core/base/text.hpp"
#include "core/prepare/records.hpp"

using namespace sf;

namespace {

// Ten tokens: question 0..3, answer 3..6 of which 3..4 is thought, question 6..7, answer 7..9, a newline.
TextRow two_turns(int64_t cut_to = 10) {
  std::vector<int32_t> ids;
  for (int32_t t = 0; t < cut_to; ++t) ids.push_back(100 + t);
  return {Json::parse(R"({"tokens":10,"answers":[[3,6,4],[7,9,7]],"roles":[["user",1,3],["assistant",4,6],["user",6,7],["assistant",7,9]],"id":"a/b"})"), ids};
}

std::string mask_of(const PreparedRecord& record) {
  std::string out;
  for (const uint8_t one : record.loss_mask) out += one != 0 ? '1' : '0';
  return out;
}

std::string mask_with(const MaskOptions& options, const TextRow& row = two_turns()) {
  SkippedRow skipped;
  const auto record = make_record(row, options, skipped);
  return record ? mask_of(*record) : skipped.reason;
}

}  // namespace

TEST_CASE("records: ids of every size come over whole") {
  for (const std::vector<int32_t>& ids : {std::vector<int32_t>{0, 1}, {255, 256, 65535}, {65536, 151935, 16777215, 16777216}, {2147483647, 3, 4, 5, 6}}) {
    TextRow row{Json::parse(R"({"answers":[[0,99,0]]})"), ids};
    row.said.set("tokens", static_cast<int64_t>(ids.size()));
    SkippedRow skipped;
    const auto record = make_record(row, {}, skipped);
    REQUIRE(record);
    CHECK(record->input_ids == std::vector<int64_t>(ids.begin(), ids.end()));
  }
}

TEST_CASE("records: answers are supervised, and what stands behind the last of them is cut off") {
  CHECK(mask_with({}) == "000111011");
}

TEST_CASE("records: notes are counted, and those that say why keep their first places, in order, over pieces and on disk") {
  RowCounts first, second;
  first.note("cut-where-roles-break", "a:1");
  first.note("special-token-text: message 0 (user) holds the text of <s>: so", "a:2");
  for (int line = 3; line < 9; ++line) second.note("special-token-text: message 1", format("b:{}", line));
  first.add(second);
  const RowCounts counts = RowCounts::from_json(Json::parse(first.to_json().dump()));
  CHECK(counts.notes == std::map<std::string, int64_t>{{"cut-where-roles-break", 1}, {"special-token-text", 7}});
  CHECK(counts.examples.at("special-token-text") == std::vector<std::string>{"a:2: message 0 (user) holds the text of <s>: so", "b:3: message 1", "b:4: message 1"});
  CHECK(counts.examples.count("cut-where-roles-break") == 0);
  CHECK(counts.skipped_rows() == 0);
  const std::string table = counts.notes_table();
  CHECK(table.find("7 kept with the note special-token-text\n    a:2: message 0") != std::string::npos);
  CHECK(table.find("data.special_token_text = \"skip\"") != std::string::npos);
  CHECK(counts.table().empty());
}

TEST_CASE("records: the last answer alone, and answers without what was thought before") {
  CHECK(mask_with({.only_last_turn = true}) == "000000011");
  CHECK(mask_with({.reasoning = false}) == "000011011");
}

TEST_CASE("records: ignored texts are not supervised, even when they reach into an answer") {
  TextRow row = two_turns();
  row.said.set("ignored", Json::parse("[[2,5]]"));
  CHECK(mask_with({}, row) == "000001011");
}

TEST_CASE("records: a row that max_length cuts in the middle of an answer keeps the answer's head") {
  CHECK(mask_with({}, two_turns(5)) == "00011");
  CHECK(mask_with({}, two_turns(8)) == "00011101");
  SkippedRow skipped;
  CHECK(make_record(two_turns(5), {}, skipped)->is_cut);
  CHECK_FALSE(make_record(two_turns(10), {}, skipped)->is_cut);
}

TEST_CASE("records: a row that is cut before its answer, or has too little to learn from, is skipped and says why") {
  CHECK(mask_with({}, two_turns(3)) == "cut-before-answer");
  CHECK(mask_with({.only_last_turn = true}, two_turns(7)) == "cut-before-answer");
  CHECK(mask_with({.min_supervised_tokens = 6}) == "too-few-supervised");
  CHECK(mask_with({.min_supervised_tokens = 5}) == "000111011");
  // one supervised token has no neighbour, whatever the option says: capture could not use it
  CHECK(mask_with({.only_last_turn = true, .min_supervised_tokens = 1}, two_turns(8)) == "too-few-supervised");
  CHECK(mask_with({}, {Json::parse(R"({"skip":"unknown-role","why":"message 0 has the role 'x'"})"), {}}) == "unknown-role");
}

TEST_CASE("records: a prompt supervises nothing and must be whole") {
  CHECK(mask_with({.prompts = true}) == "0000000000");
  CHECK(mask_with({.prompts = true}, two_turns(9)) == "too-long");
}

TEST_CASE("records: a line has id, ids, mask, and the roles' places within what was kept") {
  SkippedRow skipped;
  const TextRow row = two_turns(5);
  const auto record = make_record(row, {}, skipped);
  const Json line = Json::parse(record_line(*record, row.said, "chat.jsonl:1"));
  CHECK(line == Json::parse(R"({"id":"a/b","input_ids":[100,101,102,103,104],"loss_mask":[0,0,0,1,1],"roles":[["user",1,3],["assistant",4,5]]})"));
  TextRow nameless = two_turns();
  nameless.said.remove("id");
  nameless.said.set("category", "facts");
  const Json other = Json::parse(record_line(*make_record(nameless, {}, skipped), nameless.said, "chat.jsonl:7"));
  CHECK(other.at("id").as_string() == "chat.jsonl:7");
  CHECK(other.at("category").as_string() == "facts");
}

TEST_CASE("records: duplicates have one digest, two answers to one question one prompt digest") {
  SkippedRow skipped;
  const auto record = make_record(two_turns(), {}, skipped);
  auto other = *record;
  CHECK(other.digest() == record->digest());
  other.input_ids[4] = 7;
  CHECK(other.digest() != record->digest());
  CHECK(other.prompt_digest() == record->prompt_digest());
  other.input_ids[0] = 7;
  CHECK(other.prompt_digest() != record->prompt_digest());
  // What an answer thinks first belongs to the answer, supervised or not: no question is told from itself by it.
  const auto unthought = make_record(two_turns(), {.reasoning = false}, skipped);
  other = *unthought;
  other.input_ids[3] = 7;
  CHECK(unthought->prompt_digest() == record->prompt_digest());
  CHECK(other.prompt_digest() == unthought->prompt_digest());
  CHECK(make_record(two_turns(), {.only_last_turn = true}, skipped)->prompt_digest() != record->prompt_digest());
}

TEST_CASE("records: texts that are supervised from their first token on ask nothing, so no two of them share a question") {
  SkippedRow skipped;
  const auto text_of = [&](int32_t last) { return make_record({Json::parse(R"({"tokens":3,"answers":[[0,3,0]]})"), {7, 8, last}}, {}, skipped)->prompt_digest(); };
  CHECK(text_of(1) != text_of(2));
  CHECK(text_of(1) == text_of(1));
}

TEST_CASE("records: the split is even, the same for the same seed and another for another") {
  int held_out = 0;
  int differ = 0;
  for (int i = 0; i < 2000; ++i) {
    const std::string prompt = "prompt " + std::to_string(i);
    const double place = split_place(prompt, 42);
    CHECK(place == split_place(prompt, 42));
    held_out += place < 0.1 ? 1 : 0;
    differ += (place < 0.1) != (split_place(prompt, 43) < 0.1) ? 1 : 0;
  }
  CHECK(held_out > 150);
  CHECK(held_out < 250);
  CHECK(differ > 200);
}

TEST_CASE("records: counts add up, keep the first examples, and survive as JSON") {
  RowCounts counts;
  counts.rows = 7;
  counts.records = 2;
  counts.cut = 1;
  counts.notes["cut-where-roles-break"] = 1;
  for (int i = 0; i < 5; ++i) counts.skip({"json", "broken " + std::to_string(i)}, "chat.jsonl:" + std::to_string(i));
  CHECK(counts.skipped_rows() == 5);
  CHECK(counts.examples["json"].size() == 3);
  RowCounts sum = RowCounts::from_json(counts.to_json());
  sum.add(counts);
  CHECK(sum.rows == 14);
  CHECK(sum.skipped["json"] == 10);
  CHECK(sum.examples["json"].size() == 3);
  CHECK(sum.notes["cut-where-roles-break"] == 2);
  CHECK(sum.table().find("10 json") != std::string::npos);
  CHECK(sum.table().find("chat.jsonl:0: broken 0") != std::string::npos);
}
