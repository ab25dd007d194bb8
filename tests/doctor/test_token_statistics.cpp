// Figures of token files, the vocabulary sweep, and how records are shown.
#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "core/base/error.hpp"
#include "core/doctor/token_page.hpp"
#include "core/doctor/token_statistics.hpp"
#include "core/doctor/vocabulary_sweep.hpp"

#include <unistd.h>

using namespace sf;
namespace fs = std::filesystem;

namespace {

TokenFile file_of(const std::string& lines) {
  const fs::path path = fs::temp_directory_path() / ("sf-tokens-" + std::to_string(::getpid()) + ".jsonl");
  std::ofstream(path) << lines;
  TokenFile file = read_token_file(path, {});
  fs::remove(path);
  return file;
}

constexpr const char* kTwo =
    R"({"input_ids":[9,1,2,3,9,4,5],"loss_mask":[0,0,1,1,0,1,1],"roles":[["user",1,2],["assistant",2,3],["user",4,5],["assistant",5,7]]}
{"input_ids":[9,1,2,3,9,4,5],"loss_mask":[0,0,1,1,0,1,1]}

{"input_ids":[9,1,7],"loss_mask":[0,0,1]}
)";

}  // namespace

TEST_CASE("statistics: shares by turn and role, duplicates, and records that capture would leave out") {
  const TokenStatistics statistics = token_statistics(file_of(kTwo));
  CHECK(statistics.records == 3);
  CHECK(statistics.tokens == 17);
  CHECK(statistics.supervised == 9);
  CHECK(statistics.without_pair == 1);
  CHECK(statistics.duplicates == 1);
  CHECK(statistics.repeated_questions == 2);
  CHECK(statistics.longest == 7);
  REQUIRE(statistics.turns.size() == 2);
  CHECK(statistics.turns[0].tokens == 11);
  CHECK(statistics.turns[0].supervised == 5);
  CHECK(statistics.turns[1].supervised == 4);
  CHECK(statistics.roles.at("user").tokens == 2);
  CHECK(statistics.roles.at("user").supervised == 0);
  CHECK(statistics.roles.at("assistant").supervised == 3);
  CHECK(statistics.roles.at("template").supervised == 6);
  CHECK(statistics.histogram[6] == 2);
  CHECK(statistics.text().find("3 records, 17 tokens, 9 supervised (52.9 %)") != std::string::npos);
  CHECK(statistics.to_json().at("duplicates").as_int() == 1);
}

TEST_CASE("statistics: records that are supervised from their first token on ask no question that could come again") {
  const TokenStatistics statistics = token_statistics(file_of("{\"input_ids\":[1,2],\"loss_mask\":[1,1]}\n{\"input_ids\":[3,4],\"loss_mask\":[1,1]}"));
  CHECK(statistics.repeated_questions == 0);
  CHECK(statistics.duplicates == 0);
}

TEST_CASE("statistics: roles that are no ranges are refused with the record") {
  try {
    (void)file_of(R"({"input_ids":[1,2],"loss_mask":[1,1],"roles":[["user","x",2]]})");
    FAIL("accepted");
  } catch (const Error& error) {
    CHECK(std::string(error.what()).find("record 1: roles") != std::string::npos);
  }
}

TEST_CASE("sweep: coverage and acceptance are those of the counted tokens") {
  // supervised: 1 twice, 2 twice, 3 once, 4 once
  const TokenFile train = file_of(R"({"input_ids":[0,1,2,1,2,3,4],"loss_mask":[0,1,1,1,1,1,1]})");
  CHECK(draft_vocabulary(train, 3) == std::vector<int64_t>{1, 2, 3});
  const VocabularySweep sweep = sweep_vocabulary(train, nullptr, {2, 6, 2}, 2);
  REQUIRE(sweep.rows.size() == 2);
  CHECK(sweep.rows[0].size == 2);
  CHECK(sweep.rows[0].coverage == doctest::Approx(4.0 / 6));
  // five places: 1->2 1 (2), 2->1 2 (2), 1->2 | 3 (1), 2->|3 (0), 3->|4 (0)
  CHECK(sweep.rows[0].ceiling == doctest::Approx(1 + 5.0 / 5));
  CHECK(sweep.rows[0].expected[0] == doctest::Approx(1 + (0.75 + 0.75 + 0.5) / 5));
  // the table says 1->2 and 2->1: two right, two right, one right
  CHECK(sweep.rows[0].bigram == doctest::Approx(1 + 5.0 / 5));
  CHECK(sweep.rows[1].coverage == 1.0);
  CHECK(sweep.rows[1].ceiling == doctest::Approx(1 + 9.0 / 5));
  const TokenFile held_out = file_of(R"({"input_ids":[1,2,8],"loss_mask":[1,1,1]})");
  const VocabularySweep other = sweep_vocabulary(train, &held_out, {2}, 4);
  CHECK(other.is_held_out);
  CHECK(other.rows[0].train_coverage == doctest::Approx(4.0 / 6));
}

TEST_CASE("sweep: equals are chosen by their record and filled up with the lowest ids, as a draft does") {
  const TokenFile train = file_of("{\"input_ids\":[5,9,3],\"loss_mask\":[0,1,1]}\n{\"input_ids\":[4,1,7,7],\"loss_mask\":[0,1,1,1]}");
  CHECK(draft_vocabulary(train, 1) == std::vector<int64_t>{7});
  CHECK(draft_vocabulary(train, 2) == std::vector<int64_t>{7, 3});
  CHECK(draft_vocabulary(train, 4) == std::vector<int64_t>{7, 3, 9, 1});
  CHECK(draft_vocabulary(train, 7) == std::vector<int64_t>{7, 3, 9, 1, 0, 2, 4});
}

TEST_CASE("page: tokens are escaped, blanks visible, supervision marked with and without colours") {
  ShownRecord record{"a<b>", {5, 6, 7, 8}, {0, 1, 1, 0}, {"<|x|>", "Hi\n", "\t\x01", "\""}};
  CHECK(terminal_text(record, {}, false) == "a<b>\n<|x|>[Hi⏎\n⇥\\x01]\"\n");
  CHECK(terminal_text(record, {7}, false).find("[~Hi") != std::string::npos);
  CHECK(terminal_text(record, {}, true).find("\x1b[30;102mHi⏎\x1b[0m\n") != std::string::npos);
  const std::string page = html_page({{.title = "t & u", .statistics = token_statistics(file_of(kTwo)), .records = {record}, .vocabulary = {7}, .outside = {"one <line>"}}}, nullptr);
  CHECK(page.find("<h2>t &amp; u</h2>") != std::string::npos);
  CHECK(page.find("<span class=\"t\" title=\"0: token 5\">&lt;|x|&gt;</span>") != std::string::npos);
  CHECK(page.find("<span class=\"s odd o\" title=\"1: token 6\">Hi⏎\n</span>") != std::string::npos);
  CHECK(page.find("one &lt;line&gt;") != std::string::npos);
  CHECK(page.find("://") == std::string::npos);
}

TEST_CASE("page: shown records are spread over the file") {
  std::string lines;
  for (int i = 0; i < 100; ++i) lines += "{\"id\":\"r" + std::to_string(i) + "\",\"input_ids\":[1,2],\"loss_mask\":[1,1]}\n";
  const auto records = choose_records(file_of(lines), 4);
  REQUIRE(records.size() == 4);
  CHECK(records[0].id == "r0");
  CHECK(records[3].id == "r75");
  CHECK(choose_records(file_of(lines), 1000).size() == 100);
}
