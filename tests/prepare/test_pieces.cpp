// The input in pieces, and pieces on disk.
#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "core/base/error.hpp"
#include "core/prepare/pieces.hpp"

#include <unistd.h>

using namespace sf;
namespace fs = std::filesystem;

namespace {

struct Folder {
  Folder() : path(fs::temp_directory_path() / ("sf-pieces-" + std::to_string(::getpid()))) { fs::create_directories(path); }
  ~Folder() { fs::remove_all(path); }
  void write(const std::string& name, const std::string& text) const { std::ofstream(path / name, std::ios::binary) << text; }
  fs::path path;
};

std::string lines(int count, std::size_t width) {
  std::string text;
  for (int i = 0; i < count; ++i) text += std::to_string(i) + std::string(width, 'x') + "\n";
  return text;
}

PreparedRecord record(int64_t first) {
  return {.input_ids = {first, 2, 3}, .loss_mask = {0, 1, 1}, .supervised = 2};
}

}  // namespace

TEST_CASE("pieces: whole lines, all of them, in order, numbered in their own file") {
  const Folder folder;
  folder.write("a.jsonl", lines(3000, 100));
  folder.write("b.jsonl", "one\ntwo without an end");
  folder.write("notes.txt", "not read");
  const auto inputs = open_inputs(folder.path);
  REQUIRE(inputs.size() == 2);
  const auto pieces = cut_into_pieces(inputs);
  CHECK(pieces.size() > 3);
  std::string joined;
  for (const Piece& piece : pieces) {
    CHECK((piece.text.back() == '\n' || &piece == &pieces.back()));
    if (piece.file == 0) {
      CHECK(piece.text.substr(0, piece.text.find('x')) == std::to_string(piece.first_line - 1));
    }
    joined += piece.text;
  }
  CHECK(joined == lines(3000, 100) + "one\ntwo without an end");
  CHECK(pieces.back().first_line == 1);
}

TEST_CASE("pieces: an input that is missing or empty is refused by name") {
  const Folder folder;
  const auto what = [](const fs::path& path) -> std::string {
    try {
      (void)open_inputs(path);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  CHECK(what(folder.path / "none.jsonl").find("none.jsonl does not exist") != std::string::npos);
  CHECK(what(folder.path).find("no *.jsonl") != std::string::npos);
  folder.write("blank.jsonl", "\n \n");
  CHECK(what(folder.path / "blank.jsonl").find("is empty") != std::string::npos);
}

TEST_CASE("pieces: stored records come back as they were, a torn one is refused") {
  std::string stored;
  append_stored(stored, record(1), "{\"id\":\"a b\"}");
  append_stored(stored, record(9), "{}");
  std::string_view rest = stored;
  const StoredRecord first = take_stored(rest);
  CHECK(first.json == "{\"id\":\"a b\"}");
  CHECK(first.digest == record(1).digest());
  CHECK(first.prompt_digest == record(1).prompt_digest());
  CHECK(first.supervised == 2);
  CHECK(first.tokens == 3);
  CHECK(take_stored(rest).digest == record(9).digest());
  CHECK(rest.empty());
  std::string_view torn = std::string_view(stored).substr(0, 140);
  CHECK_THROWS_AS((void)take_stored(torn), Error);
}

TEST_CASE("pieces: one that was kept is found again only for the same bytes, rules and records") {
  const Folder folder;
  const std::string text = "a\nb\n";
  const Piece piece{.file = 0, .first_line = 1, .text = text};
  const PieceFolder kept(folder.path, "rules");
  CHECK_FALSE(kept.find(0, piece));
  RowCounts counts;
  counts.rows = counts.records = 2;
  kept.keep(0, piece, "records\n", counts);
  REQUIRE(kept.find(0, piece));
  CHECK(kept.find(0, piece)->rows == 2);
  CHECK_FALSE(kept.find(1, piece));
  CHECK_FALSE(PieceFolder(folder.path, "other rules").find(0, piece));
  const std::string changed = "a\nc\n";
  CHECK_FALSE(kept.find(0, {.file = 0, .first_line = 1, .text = changed}));
  CHECK_FALSE(kept.find(0, {.file = 0, .first_line = 3, .text = text}));
  folder.write("piece-000000.records", "recor");
  CHECK_FALSE(kept.find(0, piece));
}
