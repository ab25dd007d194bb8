// core/prepare/pieces.hpp: the input cut at line ends into pieces, and the results of pieces on disk: PIECE.records, and PIECE.json when it is whole.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/file.hpp"
#include "core/prepare/records.hpp"
#include "core/prepare/stop.hpp"

namespace sf {

struct InputFile {
  std::filesystem::path path;
  MappedFile bytes;
  std::string sha256;
};

/// The file, or a folder's *.jsonl by name. Throws Error(data) when there is none or nothing in it.
[[nodiscard]] std::vector<InputFile> open_inputs(const std::filesystem::path& path, const StopRequest& stop = {});

/// SHA-256 of a file that may take a while.
[[nodiscard]] std::string sha256_of(const MappedFile& file, const StopRequest& stop);

/// Whole lines of one input file.
struct Piece {
  std::size_t file = 0;
  int64_t first_line = 1;  // in its file, from one
  std::string_view text;
};

/// The same pieces for the same bytes, whatever the number of workers.
[[nodiscard]] std::vector<Piece> cut_into_pieces(const std::vector<InputFile>& inputs);

/// A record on its way to the output: "DIGEST PROMPT SUPERVISED TOKENS {json}\n" as a line.
struct StoredRecord {
  std::string_view digest, prompt_digest, json;
  int64_t supervised = 0, tokens = 0;
};
void append_stored(std::string& out, const PreparedRecord& record, std::string_view json);
/// The next record of `rest`, which loses it. Throws Error(data) when it is damaged.
[[nodiscard]] StoredRecord take_stored(std::string_view& rest);

/// The folder in which pieces wait for the rest. Only pieces with this fingerprint and the same bytes are taken over.
class PieceFolder {
 public:
  PieceFolder(std::filesystem::path folder, std::string fingerprint);

  /// What a finished piece counted, or nothing.
  [[nodiscard]] std::optional<RowCounts> find(std::size_t number, const Piece& piece) const;
  void keep(std::size_t number, const Piece& piece, const std::string& records, const RowCounts& counts) const;
  [[nodiscard]] std::filesystem::path records_path(std::size_t number) const;
  void remove() const;

 private:
  [[nodiscard]] std::filesystem::path note_path(std::size_t number) const;

  std::filesystem::path folder_;
  std::string fingerprint_;
};

}  // namespace sf
