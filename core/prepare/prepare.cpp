#include "core/prepare/prepare.hpp"

#include "core/base/error.hpp"
#include "core/base/log.hpp"
#include "core/prepare/pieces.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <fstream>
#include <mutex>
#include <numeric>
#include <optional>
#include <system_error>
#include <thread>
#include <unordered_set>
#include <utility>

namespace sf {

namespace fs = std::filesystem;

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kBatchRows = 64;              // enough to hide the pipe, few enough to stop soon
constexpr std::size_t kBatchBytes = std::size_t{512} << 10;
constexpr auto kProgressInterval = std::chrono::seconds(5);

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// What all workers of a call share.
struct Shared {
  const PrepareRequest& request;
  const std::vector<InputFile>& inputs;
  const std::vector<Piece>& pieces;
  const PieceFolder& folder;
  std::vector<std::optional<RowCounts>> counts;
  std::atomic<std::size_t> next = 0;
  std::atomic<int64_t> bytes_done = 0, rows_done = 0, skipped = 0;
  std::atomic<bool>& stop;
  std::mutex mutex;
  std::condition_variable changed;
  std::size_t running = 0;
  std::exception_ptr failure;
};

std::vector<TextRow> rows_of(TextWorker& worker, const std::vector<std::string_view>& lines, const std::string& file, const std::vector<int64_t>& numbers) {
  try {
    return worker.rows(lines);
  } catch (const SlowLine& slow) {
    throw Error(ExitCode::kData, format("{}:{}: the chat template is still at work on this conversation ({} bytes) after {} s of a processor; a thousandth of that is usual", file,
                                        numbers[slow.index], lines[slow.index].size(), slow.seconds),
                "it loops without an end, or nearly so, over what this line says: mend the template, name another one with data.chat_template_path, or take the line out; "
                "SF_TEXT_SECONDS=N allows N s");
  }
}

// One piece. False when it was stopped in between.
bool do_piece(Shared& shared, TextWorker& worker, std::size_t number) {
  const Piece& piece = shared.pieces[number];
  const std::string name = shared.inputs[piece.file].path.filename().string();
  RowCounts counts;
  std::string records;
  std::string_view rest = piece.text;
  int64_t line_number = piece.first_line;
  while (!rest.empty()) {
    if (shared.stop) return false;
    std::vector<std::string_view> lines;
    std::vector<int64_t> numbers;
    std::size_t bytes = 0;
    const std::size_t before = rest.size();
    while (!rest.empty() && lines.size() < kBatchRows && bytes < kBatchBytes) {
      const std::string_view line = rest.substr(0, rest.find('\n'));
      rest.remove_prefix(std::min(line.size() + 1, rest.size()));
      if (!trim(line).empty()) {
        lines.push_back(line);
        numbers.push_back(line_number);
        bytes += line.size();
      }
      ++line_number;
    }
    const int64_t skipped_before = counts.skipped_rows();
    const std::vector<TextRow> rows = rows_of(worker, lines, name, numbers);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      ++counts.rows;
      const std::string place = format("{}:{}", name, numbers[i]);
      SkippedRow skipped;
      const std::optional<PreparedRecord> record = make_record(rows[i], shared.request.mask, skipped);
      if (!record) {
        counts.skip(skipped, place);
        continue;
      }
      ++counts.records;
      counts.cut += record->is_cut ? 1 : 0;
      if (const Json* notes = rows[i].said.find("notes")) {
        for (const Json& note : notes->items()) counts.note(note.as_string(), place);
      }
      append_stored(records, *record, record_line(*record, rows[i].said, place));
    }
    shared.bytes_done += static_cast<int64_t>(before - rest.size());
    shared.rows_done += static_cast<int64_t>(rows.size());
    shared.skipped += counts.skipped_rows() - skipped_before;
  }
  shared.folder.keep(number, piece, records, counts);
  shared.counts[number] = std::move(counts);
  return true;
}

void work(Shared& shared, std::unique_ptr<TextWorker> worker) {
  try {
    for (;;) {
      const std::size_t number = shared.next++;
      if (number >= shared.pieces.size() || shared.stop) break;
      if (shared.counts[number]) continue;  // of an earlier call
      if (worker == nullptr) worker = std::make_unique<TextWorker>(shared.request.text);
      if (!do_piece(shared, *worker, number)) break;
    }
  } catch (const Stopped&) {  // the user, or another worker's failure
  } catch (...) {
    const std::lock_guard lock(shared.mutex);
    if (!shared.failure) shared.failure = std::current_exception();
    shared.stop = true;
  }
  const std::lock_guard lock(shared.mutex);
  --shared.running;
  shared.changed.notify_all();
}

void run_workers(Shared& shared, std::unique_ptr<TextWorker> first, int64_t bytes_left) {
  std::size_t todo = 0;
  for (const std::optional<RowCounts>& counts : shared.counts) todo += counts ? 0 : 1;
  const auto processors = static_cast<std::size_t>(std::max(1U, std::thread::hardware_concurrency()));
  const std::size_t wanted = shared.request.workers > 0 ? static_cast<std::size_t>(shared.request.workers) : processors;
  std::vector<std::thread> threads;
  shared.running = std::max<std::size_t>(1, std::min(wanted, todo));
  const std::size_t count = shared.running;
  // The first worker's process was started by this thread, and lives as long as it.
  for (std::size_t i = 0; i < count; ++i) {
    threads.emplace_back([&shared, worker = i == 0 ? std::move(first) : nullptr]() mutable { work(shared, std::move(worker)); });
  }
  const Clock::time_point started = Clock::now();
  Clock::time_point told = started;
  {
    std::unique_lock lock(shared.mutex);
    while (shared.running > 0) {
      shared.changed.wait_for(lock, std::chrono::milliseconds(100));
      if (shared.request.stop_requested && shared.request.stop_requested()) shared.stop = true;
      if (Clock::now() - told < kProgressInterval || shared.stop) continue;
      told = Clock::now();
      const auto done = static_cast<double>(shared.bytes_done.load());
      const double rate = done / seconds_since(started);
      const double share = done / static_cast<double>(std::max<int64_t>(bytes_left, 1));
      log_info("prepare ({})  {} %  rows {}  skipped {}  {} MB/s{}", shared.request.name, static_cast<int64_t>(100.0 * share), shared.rows_done.load(), shared.skipped.load(),
               format_fixed(rate / 1e6, 2),  // the first hundredth tells nothing of the rest
               share < 0.01 ? "" : format("  eta {}", human_duration((static_cast<double>(bytes_left) - done) / rate)));
    }
  }
  for (std::thread& thread : threads) thread.join();
  if (shared.failure) std::rethrow_exception(shared.failure);
}

// An output under its temporary name, until it is whole.
class Output {
 public:
  explicit Output(fs::path path) : path_(std::move(path)), part_(path_.string() + ".partial"), file_(part_, std::ios::binary | std::ios::trunc) { check(); }
  ~Output() {
    std::error_code ignored;
    if (!part_.empty()) fs::remove(part_, ignored);
  }
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  void add(const StoredRecord& record) {
    file_ << record.json << '\n';
    sha_.add(record.json);
    sha_.add("\n");
    ++records;
    tokens += record.tokens;
    supervised += record.supervised;
    lengths.push_back(record.tokens);
  }
  // Everything is on the disk after this; the name comes with take_name().
  Json finish() {
    file_.close();
    check();
    sync_path(part_);
    std::sort(lengths.begin(), lengths.end());
    const auto at = [&](double share) { return lengths[static_cast<std::size_t>(share * static_cast<double>(lengths.size() - 1))]; };
    Json json = Json::object({{"path", path_.string()}, {"sha256", sha_.hex()}, {"records", records}, {"tokens", tokens}, {"supervised", supervised}});
    if (!lengths.empty()) json.set("lengths", Json::object({{"shortest", lengths.front()}, {"median", at(0.5)}, {"p90", at(0.9)}, {"longest", lengths.back()}}));
    return json;
  }
  void take_name() {
    std::error_code failed;
    fs::rename(part_, path_, failed);
    if (failed) throw Error(ExitCode::kData, format("{} can't get its name: {}", path_, failed.message()), "is something in the way, or the folder not yours to write to?");
    part_.clear();
    sync_path(path_.parent_path());
  }

  int64_t records = 0, tokens = 0, supervised = 0;
  std::vector<int64_t> lengths;

 private:
  void check() {
    if (!file_) throw Error(ExitCode::kData, format("{}: can't be written", part_), "is the disk full, or the folder not yours to write to?");
  }

  fs::path path_, part_;
  std::ofstream file_;
  Sha256 sha_;
};

// The report of an earlier call, with the files of it that are there and as they were written; is_whole: this call's outputs are among them.
struct Earlier {
  Json report;
  std::vector<fs::path> files;
  bool is_whole = true;
  bool was_moved = false;  // the report and what stands beside it, since it was written
};

std::optional<Earlier> earlier_call(const PrepareRequest& request) {
  std::error_code ignored;
  const fs::path place = report_path(request.output);
  if (!fs::is_regular_file(place, ignored)) return std::nullopt;
  std::vector<fs::path> wanted = {request.output};
  if (!request.held_out_output.empty()) wanted.push_back(request.held_out_output);
  try {
    Earlier earlier{.report = Json::parse(read_file(place))};
    const auto find = [&](const fs::path& path, const Json& file) {
      if (std::find(earlier.files.begin(), earlier.files.end(), path) != earlier.files.end()) return true;
      const bool is_there = fs::is_regular_file(path, ignored) && sha256_of(MappedFile(path), request.stop_requested) == file.at("sha256").as_string();
      if (is_there) earlier.files.push_back(path);
      return is_there;
    };
    // In the order of their names in the recipe. A folder that was moved or copied has them where the recipe says now.
    Json* listed = earlier.report.find("outputs");
    if (listed == nullptr || listed->size() == 0) return std::nullopt;
    Json::Array& outputs = listed->items();
    earlier.was_moved = fs::path(outputs.at(0).at("path").as_string()) != request.output;
    earlier.is_whole = outputs.size() == wanted.size();
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      const fs::path written = outputs[i].at("path").as_string();
      const bool is_wanted = i < wanted.size() && find(wanted[i], outputs[i]);
      earlier.is_whole = earlier.is_whole && is_wanted;
      if (!earlier.was_moved) (void)find(written, outputs[i]);
    }
    if (const Json* replaced = earlier.report.find("replaces")) {
      for (const Json& file : replaced->items()) (void)find(file.at("path").as_string(), file);
    }
    if (earlier.is_whole) {
      for (std::size_t i = 0; i < outputs.size(); ++i) outputs[i].set("path", wanted[i].string());
    }
    return earlier;
  } catch (const JsonError&) {
    return std::nullopt;
  }
}

void check_not_in_the_way(const PrepareRequest& request, const std::optional<Earlier>& earlier) {
  for (const fs::path& path : {request.output, request.held_out_output}) {
    std::error_code ignored;
    if (path.empty() || !fs::exists(path, ignored)) continue;
    if (!earlier || std::find(earlier->files.begin(), earlier->files.end(), path) == earlier->files.end()) {
      throw Error(ExitCode::kData, format("{} is there already, and is not what prepare wrote", path), "remove it, or name another file for the token records");
    }
  }
}

// Held-out records of an earlier call that split otherwise: what stands there may be in the training records now.
void warn_of_left_files(const PrepareRequest& request, const Earlier& earlier) {
  for (const fs::path& path : earlier.files) {
    if (!earlier.was_moved && path != request.output && path != request.held_out_output) {
      log_warn("prepare ({}): {} is of an earlier call, and this one has not written it: its records may be among those of {} now, so an evaluation on it is none on held-out ones; remove it",
               request.name, path, request.output);
    }
  }
}

// Both sides of a split have to be something.
void check_split(const PrepareRequest& request, int64_t kept, std::optional<int64_t> held_out) {
  if (!held_out || (kept > 0 && *held_out > 0)) return;
  throw Error(ExitCode::kData, format("{}: of {} records {} {} held out (data.held_out_share = {}, data.split_seed = {})", request.input, kept + *held_out, kept > 0 ? "none" : "all",
                                      kept > 0 ? "is" : "are", request.held_out_share, request.split_seed),
              "records with the same question stay together; set another share or seed, or bring more questions");
}

// What helps against the reason for which most rows were skipped.
std::string what_helps(const RowCounts& counts) {
  constexpr std::pair<const char*, const char*> kHelp[] = {
      {"encoding", "write the file in UTF-8: iconv -f UTF-16 -t UTF-8, or -f LATIN1"},
      {"json", "one JSON object a line is expected; jq -c . writes a spread-out file so, jq -c '.[]' one JSON array"},
      {"no-conversation", "each row needs messages, conversations or text (docs/data.md)"},
      {"template", "see what the template says; data.chat_template_options gives it values, data.chat_template_path names another"},
      {"mask", "the template writes answers where no generation prompt leads to; data.chat_template_options (a reasoning mode, for one) or data.chat_template_path may help"},
      {"too-few-supervised", "lower data.min_supervised_tokens, or see with data.max_skipped_share = 1 and sf-host doctor data what is supervised; does the template write answers at all?"},
      {"cut-before-answer", "raise data.max_length"},
      {"too-long", "raise data.max_length"},
      {"duplicate", "data.deduplicate = false keeps them"},
      {"special-token-text", "data.special_token_text = \"keep\" keeps them, or write such texts otherwise"},
      {"no-answer", "an answer (role assistant, gpt) is what a draft learns; prompts alone are for data.prompts_conversations_path"}};
  const auto most = std::max_element(counts.skipped.begin(), counts.skipped.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  for (const auto& [reason, help] : kHelp) {
    if (most != counts.skipped.end() && most->first == reason) return help;
  }
  return "mend these rows: docs/data.md says what a row may look like";
}

void check_counts(const PrepareRequest& request, const RowCounts& counts) {
  SF_CHECK(counts.rows == counts.records + counts.skipped_rows(), "{} rows, but {} records and {} skipped", counts.rows, counts.records, counts.skipped_rows());
  if (counts.rows == 0) throw Error(ExitCode::kData, format("{}: there is no row in it", request.input), "one JSON object a line is expected");
  if (counts.records == 0) {
    throw Error(ExitCode::kData, format("{}: of {} rows none gives a usable record{}", request.input, counts.rows, counts.table()),
                what_helps(counts));
  }
  const double share = static_cast<double>(counts.skipped_rows()) / static_cast<double>(counts.rows);
  if (share > request.max_skipped_share) {
    throw Error(ExitCode::kData,
                format("{}: {} of {} rows were skipped, more than data.max_skipped_share = {} allows{}", request.input, counts.skipped_rows(), counts.rows,
                       request.max_skipped_share, counts.table()),
                what_helps(counts) + "; data.max_skipped_share = 1 accepts any loss");
  }
}

// All of it; throws Stopped.
void prepare_into(PrepareResult& result, const PrepareRequest& asked) {
  const Clock::time_point started = Clock::now();
  PrepareRequest request = asked;
  std::atomic<bool> stop = false;
  request.text.stop_requested = [&stop, &asked] { return stop || (asked.stop_requested && asked.stop_requested()); };
  const std::vector<InputFile> inputs = open_inputs(request.input, request.stop_requested);
  request.text.input_bytes = std::accumulate(inputs.begin(), inputs.end(), int64_t{0}, [](int64_t sum, const InputFile& input) { return sum + static_cast<int64_t>(input.bytes.size()); });
  auto worker = std::make_unique<TextWorker>(request.text);
  const Json facts = worker->facts();
  log_info("prepare ({}): tokens by {}", request.name, facts.at("encoder").as_string());
  if (request.vocab_size > 0 && facts.at("largest_id").as_int() >= request.vocab_size) {
    throw Error(ExitCode::kData,
                format("{}: the tokenizer has ids up to {}, but the target only the tokens 0 to {}", request.text.target, facts.at("largest_id").as_int(),
                       request.vocab_size - 1),
                "the tokenizer is another model's; fetch the target's own tokenizer.json");
  }

  // The same for two calls that would write the same records for the same lines.
  const Json rules = Json::object({{"text", request.text.to_json()}, {"mask", request.mask.to_json()}, {"tokenizer", facts}, {"program", sha256_file(request.text.script)}});
  const std::string rules_fingerprint = sha256(rules.dump());
  Json sources = Json::array();
  for (const InputFile& input : inputs) sources.push_back(Json::object({{"path", input.path.string()}, {"bytes", input.bytes.size()}, {"sha256", input.sha256}}));
  Json wanted = Json::object({{"rules", rules_fingerprint},
                              {"deduplicate", request.deduplicate},
                              {"held_out_share", request.held_out_output.empty() ? 0.0 : request.held_out_share},
                              {"split_seed", request.split_seed},
                              {"max_skipped_share", request.max_skipped_share}});
  Json sums = Json::array();
  for (const InputFile& input : inputs) sums.push_back(input.path.filename().string() + " " + input.sha256);
  wanted.set("inputs", std::move(sums));
  const std::string fingerprint = sha256(wanted.dump());

  const std::optional<Earlier> earlier = earlier_call(request);
  const Json* known = earlier && earlier->is_whole ? earlier->report.find("fingerprint") : nullptr;
  if (known != nullptr && known->as_string() == fingerprint) {
    result.report = earlier->report;
    result.was_finished = true;
    log_info("prepare ({}): {} is there and whole, nothing to do", request.name, request.output);
    return;
  }
  check_not_in_the_way(request, earlier);

  const fs::path place = request.output.string() + ".preparing";
  std::error_code failed;
  for (const fs::path& folder : {request.output.parent_path(), request.held_out_output.parent_path(), place}) {
    if (!folder.empty()) fs::create_directories(folder, failed);
    if (failed) throw Error(ExitCode::kData, format("{}: can't be made: {}", folder, failed.message()), "choose a folder that you can write to");
  }
  const FolderLock lock(place, ExitCode::kData, "another prepare is at work here", "wait for it, or end it; then run this again");
  const std::vector<Piece> pieces = cut_into_pieces(inputs);
  const PieceFolder folder(place, rules_fingerprint);
  Shared shared{.request = request, .inputs = inputs, .pieces = pieces, .folder = folder, .counts = {}, .stop = stop, .mutex = {}, .changed = {}, .failure = {}};
  int64_t bytes_left = 0;
  std::size_t taken_over = 0;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    throw_if_stopped(request.stop_requested);
    shared.counts.push_back(folder.find(i, pieces[i]));
    taken_over += shared.counts.back() ? 1 : 0;
    bytes_left += shared.counts.back() ? 0 : static_cast<int64_t>(pieces[i].text.size());
  }
  if (taken_over > 0) log_info("prepare ({}): goes on, {} of {} pieces are done", request.name, taken_over, pieces.size());
  run_workers(shared, std::move(worker), bytes_left);
  result.bytes_read = shared.bytes_done;
  if (std::any_of(shared.counts.begin(), shared.counts.end(), [](const auto& counts) { return !counts; })) throw Stopped();

  RowCounts counts;
  for (const std::optional<RowCounts>& one : shared.counts) counts.add(*one);
  std::unordered_set<std::string> seen;
  Output output(request.output);
  std::optional<Output> held_out;
  if (!request.held_out_output.empty()) held_out.emplace(request.held_out_output);
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    throw_if_stopped(request.stop_requested);
    const MappedFile file(folder.records_path(i));
    for (std::string_view rest = file.text(); !rest.empty();) {
      const StoredRecord record = take_stored(rest);
      if (request.deduplicate && !seen.emplace(record.digest.substr(0, 32)).second) {
        --counts.records;
        const auto seen_examples = counts.examples.find("duplicate");
        const bool is_shown = seen_examples == counts.examples.end() || seen_examples->second.size() < RowCounts::kExamples;
        counts.skip({"duplicate", is_shown ? format("{}: the same tokens came before", Json::parse(std::string(record.json)).at("id").dump()) : std::string()},
                    inputs[pieces[i].file].path.filename().string());
        continue;
      }
      const bool is_held_out = held_out && split_place(std::string(record.prompt_digest), request.split_seed) < request.held_out_share;
      (is_held_out ? *held_out : output).add(record);
    }
  }
  try {
    check_counts(request, counts);
    check_split(request, output.records, held_out ? std::optional(held_out->records) : std::nullopt);
  } catch (const Error&) {
    folder.remove();  // nothing of it would be used
    throw;
  }
  Json outputs = Json::array();
  outputs.push_back(output.finish());
  if (held_out) outputs.push_back(held_out->finish());

  result.seconds = seconds_since(started);
  result.report = counts.to_json();
  result.report.set("fingerprint", fingerprint).set("inputs", std::move(sources)).set("outputs", std::move(outputs));
  result.report.set("rules", rules).set("target", request.text.target.string());
  result.report.set("seconds", result.seconds).set("bytes_per_second", static_cast<double>(result.bytes_read) / std::max(result.seconds, 1e-9));
  // The report comes first, with what it replaces: killed between two names, the next call knows all files there as prepare's.
  Json announced = result.report;
  if (earlier) {
    Json replaced = Json::array();
    for (const fs::path& file : earlier->files) replaced.push_back(Json::object({{"path", file.string()}, {"sha256", sha256_file(file)}}));
    announced.set("replaces", std::move(replaced));
  }
  atomic_write(report_path(request.output), announced.dump(2) + "\n");
  output.take_name();
  if (held_out) held_out->take_name();
  if (earlier) atomic_write(report_path(request.output), result.report.dump(2) + "\n");
  folder.remove();
  if (earlier) warn_of_left_files(request, *earlier);
}

}  // namespace

fs::path report_path(const fs::path& output) {
  return output.string() + ".report.json";
}

PrepareResult prepare(const PrepareRequest& asked) {
  const Clock::time_point started = Clock::now();
  PrepareResult result;
  try {
    prepare_into(result, asked);
  } catch (const Stopped&) {
    result.interrupted = true;
    log_info("prepare ({}): stopped; run it again to go on", asked.name);
  }
  result.seconds = seconds_since(started);
  return result;
}

}  // namespace sf
