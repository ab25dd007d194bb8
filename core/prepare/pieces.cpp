#include "core/prepare/pieces.hpp"

#include "sf/json.hpp"

#include "core/base/error.hpp"

#include <algorithm>
#include <charconv>
#include <system_error>
#include <tuple>

namespace sf {

namespace fs = std::filesystem;

namespace {

constexpr std::size_t kPieceBytesMax = std::size_t{4} << 20;  // seconds of work: what a kill costs
constexpr std::size_t kPieceBytesMin = std::size_t{64} << 10;
constexpr std::size_t kPiecesWanted = 64;  // enough for any number of workers to end together

std::string numbered(std::size_t number, const char* suffix) {
  std::string digits = std::to_string(number);
  return "piece-" + std::string(digits.size() < 6 ? 6 - digits.size() : 0, '0') + digits + suffix;
}

// Files that look like text to nobody, and what makes text of them.
void refuse_packed(const fs::path& path, std::string_view text) {
  constexpr std::tuple<std::string_view, const char*, const char*> kKinds[] = {{"\x1f\x8b", "packed with gzip", "gunzip it"},
                                                                               {"\x28\xb5\x2f\xfd", "packed with zstd", "unzstd it"},
                                                                               {"PAR1", "a Parquet file", "write its rows as JSONL: pandas.read_parquet(...).to_json(..., orient=\"records\", lines=True)"},
                                                                               {"PK\x03\x04", "a ZIP archive", "unzip it"},
                                                                               {"\xff\xfe", "in UTF-16", "iconv -f UTF-16 -t UTF-8 makes UTF-8 of it"},
                                                                               {"\xfe\xff", "in UTF-16", "iconv -f UTF-16 -t UTF-8 makes UTF-8 of it"}};
  for (const auto& [start, what, help] : kKinds) {
    if (text.starts_with(start)) throw Error(ExitCode::kData, format("{} is {}, lines of JSON in UTF-8 are expected", path, what), help);
  }
}

}  // namespace

std::string sha256_of(const MappedFile& file, const StopRequest& stop) {
  constexpr std::size_t kAtOnce = std::size_t{32} << 20;
  Sha256 sha;
  for (std::string_view rest = file.text(); !rest.empty(); rest.remove_prefix(std::min(rest.size(), kAtOnce))) {
    throw_if_stopped(stop);
    sha.add(rest.substr(0, kAtOnce));
  }
  return sha.hex();
}

std::vector<InputFile> open_inputs(const fs::path& path, const StopRequest& stop) {
  std::vector<fs::path> paths;
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) {
    for (const fs::directory_entry& entry : fs::directory_iterator(path)) {
      if (entry.is_regular_file() && entry.path().extension() == ".jsonl") paths.push_back(entry.path());
    }
    std::sort(paths.begin(), paths.end());
    if (paths.empty()) throw Error(ExitCode::kData, format("{}: there is no *.jsonl in this folder", path), "name a JSONL file, or a folder of them");
  } else if (!fs::exists(path, ignored)) {
    throw Error(ExitCode::kData, format("{} does not exist", path), "name a JSONL file with one conversation a line, or a folder of them");
  } else {
    paths.push_back(path);
  }
  std::vector<InputFile> inputs;
  std::size_t bytes = 0;
  for (fs::path& one : paths) {
    MappedFile file(one);
    refuse_packed(one, file.text());
    bytes += trim(file.text()).size();
    std::string sum = sha256_of(file, stop);
    inputs.push_back({std::move(one), std::move(file), std::move(sum)});
  }
  if (bytes == 0) throw Error(ExitCode::kData, format("{} is empty", path), "one JSON object a line is expected: {\"messages\": [...]}");
  return inputs;
}

std::vector<Piece> cut_into_pieces(const std::vector<InputFile>& inputs) {
  std::size_t total = 0;
  for (const InputFile& input : inputs) total += input.bytes.size();
  const std::size_t wanted = std::clamp(total / kPiecesWanted, kPieceBytesMin, kPieceBytesMax);
  std::vector<Piece> pieces;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    std::string_view rest = inputs[i].bytes.text();
    int64_t line = 1;
    while (!rest.empty()) {
      std::size_t end = rest.size() <= wanted ? std::string_view::npos : rest.find('\n', wanted);
      end = end == std::string_view::npos ? rest.size() : end + 1;
      const std::string_view text = rest.substr(0, end);
      pieces.push_back({i, line, text});
      line += std::count(text.begin(), text.end(), '\n');
      rest.remove_prefix(end);
    }
  }
  return pieces;
}

void append_stored(std::string& out, const PreparedRecord& record, std::string_view json) {
  out += record.digest();
  out += ' ';
  out += record.prompt_digest();
  out += format(" {} {} ", record.supervised, record.input_ids.size());
  out += json;
  out += '\n';
}

StoredRecord take_stored(std::string_view& rest) {
  const std::string_view line = rest.substr(0, rest.find('\n'));
  rest.remove_prefix(std::min(line.size() + 1, rest.size()));
  StoredRecord record;
  std::string_view left = line;
  const auto word = [&left] {
    const std::string_view found = left.substr(0, left.find(' '));
    left.remove_prefix(std::min(found.size() + 1, left.size()));
    return found;
  };
  const auto number = [&word](int64_t& value) {
    const std::string_view text = word();
    return std::from_chars(text.data(), text.data() + text.size(), value).ptr == text.data() + text.size();
  };
  record.digest = word();
  record.prompt_digest = word();
  const bool is_whole = number(record.supervised) && number(record.tokens);
  record.json = left;
  if (!is_whole || record.digest.size() != 64 || !record.json.starts_with('{') || !record.json.ends_with('}')) {
    throw Error(ExitCode::kData, "a finished piece of the records is damaged", "remove the folder that ends in .preparing, and run prepare again");
  }
  return record;
}

PieceFolder::PieceFolder(fs::path folder, std::string fingerprint) : folder_(std::move(folder)), fingerprint_(std::move(fingerprint)) {}

std::optional<RowCounts> PieceFolder::find(std::size_t number, const Piece& piece) const {
  std::error_code ignored;
  if (!fs::is_regular_file(note_path(number), ignored) || !fs::is_regular_file(records_path(number), ignored)) return std::nullopt;
  try {
    const Json note = Json::parse(read_file(note_path(number)));
    if (note.at("fingerprint").as_string() != fingerprint_ || note.at("input_sha256").as_string() != sha256(piece.text) ||
        note.at("first_line").as_int() != piece.first_line || note.at("records_sha256").as_string() != sha256_file(records_path(number))) {
      return std::nullopt;
    }
    return RowCounts::from_json(note.at("counts"));
  } catch (const JsonError&) {
    return std::nullopt;  // not whole: done again
  }
}

void PieceFolder::keep(std::size_t number, const Piece& piece, const std::string& records, const RowCounts& counts) const {
  atomic_write(records_path(number), records);
  const Json note = Json::object({{"fingerprint", fingerprint_},
                                  {"first_line", piece.first_line},
                                  {"input_sha256", sha256(piece.text)},
                                  {"records_sha256", sha256(records)},
                                  {"counts", counts.to_json()}});
  atomic_write(note_path(number), note.dump() + "\n");
}

fs::path PieceFolder::records_path(std::size_t number) const {
  return folder_ / numbered(number, ".records");
}

fs::path PieceFolder::note_path(std::size_t number) const {
  return folder_ / numbered(number, ".json");
}

void PieceFolder::remove() const {
  std::error_code ignored;
  fs::remove_all(folder_, ignored);
}

}  // namespace sf
