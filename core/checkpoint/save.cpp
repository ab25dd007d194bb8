#include "core/checkpoint/save.hpp"

#include "core/base/error.hpp"
#include "core/base/file.hpp"
#include "core/base/log.hpp"
#include "core/checkpoint/presence.hpp"
#include "core/checkpoint/retention.hpp"
#include "core/recipe/rules.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <span>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <unistd.h>

namespace sf {
namespace fs = std::filesystem;

struct RankSave::Lease {
  size_t tensor = 0;
  uint64_t offset = 0;  // in the tensor's own bytes
  std::span<const std::byte> bytes;
  std::function<void()> given_back;
  std::string sha256;
  std::atomic<bool> released = false;

  static void release(void* lease) {  // on the writer's thread
    auto* self = static_cast<Lease*>(lease);
    self->sha256 = sf::sha256(self->bytes);
    const std::function<void()> tell = std::move(self->given_back);
    self->released.store(true, std::memory_order_release);
    if (tell) {
      tell();
    }
  }
};

namespace {

constexpr std::string_view kPartialPrefix = ".partial-";
constexpr uint64_t kMarginBytes = uint64_t{1} << 20;  // index, state, texts and the file system's own blocks
// A larger tensor is written in pieces, so that several threads write and checksum it; a whole number of elements of any type.
constexpr uint64_t kPieceBytes = uint64_t{64} << 20;

sf_status empty_status() {
  sf_status status{};
  status.struct_size = sizeof status;
  return status;
}

void check(int32_t code, const sf_status& status, int64_t step) {
  if (code != SF_OK) {
    throw Error(ExitCode::kCheckpoint,
                format("saving step {}: {}", step,
                       status.what[0] != '\0' ? std::string(status.what) : "the checkpoint writer failed"),
                status.hint);
  }
}

// filesystem calls throw their own type; a user reads ours.
template <class Function>
void on_disk(const std::string& doing, const Function& function) {
  try {
    function();
  } catch (const fs::filesystem_error& error) {
    throw Error(ExitCode::kCheckpoint, format("{}: {}: {}", doing, error.path1(), error.code().message()),
                "check the permissions and the free space of training's output_dir");
  }
}

// The step has its name: what can't be tidied up behind it is no reason to end the run that saved it.
template <class Function>
void behind_commit(int64_t step, const Function& function) {
  try {
    function();
  } catch (const std::exception& error) {
    const auto* known = dynamic_cast<const Error*>(&error);
    const std::string hint = known != nullptr ? known->hint() : "";
    log_warn("step {} is saved, but not all that follows could be done: {}{}", step, error.what(), hint.empty() ? "" : format(" ({})", hint));
  }
}

}  // namespace

RankSave::RankSave(Arguments arguments)
    : arguments_(std::move(arguments)), layout_(lay_out_rank_file(arguments_.tensors, arguments_.source != nullptr)) {
  const auto [functions, instance] = arguments_.writer;
  sf_status status = empty_status();
  check(functions->begin(instance, arguments_.folder.c_str(), arguments_.step, &status), status,
        arguments_.step);
  try {
    put(0, 0, layout_.header.data(), layout_.header.size(), {});
    if (arguments_.source == nullptr || arguments_.source->is_ready()) {
      hand_over();
    }
  } catch (...) {
    sf_status ignored = empty_status();
    functions->wait(instance, -1, &ignored);  // the writer still holds leases
    throw;
  }
}

RankSave::~RankSave() {
  if (!done_) {
    sf_status ignored = empty_status();
    arguments_.writer.functions->wait(arguments_.writer.instance, -1, &ignored);
  }
}

// The first lease is the header's, whatever tensor it names.
void RankSave::put(size_t tensor, uint64_t offset, const void* data, uint64_t bytes, std::function<void()> given_back) {
  const bool is_header = leases_.empty();
  Lease& lease = leases_.emplace_back();
  lease.tensor = tensor;
  lease.offset = offset;
  lease.bytes = {static_cast<const std::byte*>(data), bytes};
  lease.given_back = std::move(given_back);
  const std::string file = rank_file_name(arguments_.rank);
  const sf_write piece = {.struct_size = sizeof(sf_write),
                          .reserved = 0,
                          .file = file.c_str(),
                          .offset = is_header ? 0 : layout_.offsets[tensor] + offset,
                          .data = data,
                          .bytes = bytes,
                          .lease = &lease};
  sf_status status = empty_status();
  check(arguments_.writer.functions->put(arguments_.writer.instance, &piece, Lease::release, &status), status, arguments_.step);
}

void RankSave::hand_over() {
  is_handed_over_ = true;
  if (arguments_.source != nullptr) {
    arguments_.source->hand_over(
        [this](TensorPiece piece) { put(piece.tensor, piece.offset, piece.data, piece.bytes, std::move(piece.given_back)); });
  } else {
    for (const size_t i : layout_.order) {
      const TensorSlice& tensor = arguments_.tensors[i];
      const bool is_cut = tensor.bytes > kPieceBytes && is_run_of_elements(tensor);
      uint64_t offset = 0;
      do {
        const uint64_t bytes = is_cut ? std::min(kPieceBytes, tensor.bytes - offset) : tensor.bytes;
        put(i, offset, static_cast<const std::byte*>(tensor.data) + offset, bytes, {});
        offset += bytes;
      } while (offset < tensor.bytes);
    }
  }
  sf_status status = empty_status();
  check(arguments_.writer.functions->finish(arguments_.writer.instance, &status), status, arguments_.step);
}

bool RankSave::is_done() {
  if (!done_ && !is_handed_over_ && arguments_.source->is_ready()) {
    hand_over();
  }
  if (!done_) {  // also before everything is handed over: a writer that has failed says so early
    sf_status status = empty_status();
    int64_t step = -1;
    check(arguments_.writer.functions->poll(arguments_.writer.instance, &step, &status), status,
          arguments_.step);
    done_ = is_handed_over_ && step >= arguments_.step;
  }
  return done_;
}

void RankSave::wait() {
  if (!is_handed_over_) {
    hand_over();
  }
  sf_status status = empty_status();
  check(arguments_.writer.functions->wait(arguments_.writer.instance, -1, &status), status, arguments_.step);
  if (!is_done()) {
    throw Error(
        ExitCode::kCheckpoint,
        format("saving step {}: the checkpoint writer is idle, and the step is not on disk", arguments_.step),
        "this is a mistake of the writer plugin");
  }
}

CheckpointIndex RankSave::index() const {
  SF_CHECK(done_, "index of step {} before it is done", arguments_.step);
  const std::string file = rank_file_name(arguments_.rank);
  CheckpointIndex out;
  out.step = arguments_.step;
  out.world_size = arguments_.world_size;
  out.files[file] = {
      .bytes = layout_.bytes, .header_bytes = layout_.header.size(), .sha256 = leases_.front().sha256};
  for (const TensorSlice& tensor : arguments_.tensors) {
    out.tensors[tensor.name] = {.dtype = tensor.dtype, .shape = tensor.global_shape, .slices = {}};
  }
  for (size_t k = 0; k < leases_.size(); ++k) {
    const Lease& lease = leases_[k];
    SF_CHECK(lease.released.load(std::memory_order_acquire),
             "the checkpoint writer says done and keeps a buffer of step {}", arguments_.step);
    if (k == 0) {
      continue;
    }
    const TensorSlice& tensor = arguments_.tensors[lease.tensor];
    SavedSlice slice{.file = file,
                     .offset = layout_.offsets[lease.tensor] + lease.offset,
                     .bytes = lease.bytes.size(),
                     .start = tensor.start.empty() ? std::vector<int64_t>(tensor.global_shape.size(), 0) : tensor.start,
                     .shape = tensor.shape.empty() ? tensor.global_shape : tensor.shape,
                     .sha256 = lease.sha256};
    if (slice.bytes != tensor.bytes) {  // a piece: so many elements of the row-major whole
      const auto range = range_of(slice, tensor.global_shape);
      SF_CHECK(range.has_value(), "{} was cut into pieces and is no run of elements", tensor.name);
      const uint64_t element = dtype_bytes(tensor.dtype);
      slice.start = {range->begin + static_cast<int64_t>(lease.offset / element)};
      slice.shape = {static_cast<int64_t>(slice.bytes / element)};
    }
    out.tensors[tensor.name].slices.push_back(std::move(slice));
  }
  for (auto& [name, tensor] : out.tensors) {  // in the order of the file, whatever order the pieces came in
    std::sort(tensor.slices.begin(), tensor.slices.end(), [](const SavedSlice& a, const SavedSlice& b) { return a.offset < b.offset; });
  }
  return out;
}

fs::path make_partial_folder(const fs::path& run_folder, int64_t step) {
  fs::path partial = run_folder / (std::string(kPartialPrefix) + step_folder_name(step));
  on_disk(format("saving step {}", step), [&] {
    fs::remove_all(partial);
    fs::create_directories(partial);
  });
  return partial;
}

fs::path commit_checkpoint(const fs::path& run_folder, int64_t step, CheckpointIndex index,
                           const RunState& state, const std::vector<TextFile>& texts) {
  const fs::path partial = run_folder / (std::string(kPartialPrefix) + step_folder_name(step));
  fs::path folder = run_folder / step_folder_name(step);
  const auto add = [&](const std::string& name, const std::string& text) {
    atomic_write(partial / name, text, ExitCode::kCheckpoint);
    index.files[name] = {.bytes = text.size(), .header_bytes = 0, .sha256 = sha256(text)};
  };
  index.check_cover();
  for (const auto& [name, file] : index.files) {  // of ranks; one that wrote elsewhere has told its index all the same
    std::error_code missing;
    const auto bytes = fs::file_size(partial / name, missing);
    if (missing || bytes != file.bytes) {
      throw Error(ExitCode::kCheckpoint, format("committing step {}: {} {}, and {} bytes were written", step, partial / name, missing ? "is not there" : format("has {} bytes", bytes), file.bytes),
                  "all ranks have to write to one disk: set output_dir to a folder that their machines share");
    }
  }
  add(kStateFile, state.to_json().dump(1) + "\n");
  for (const TextFile& file : texts) {
    SF_CHECK(!index.files.contains(file.name) && file.name != kIndexFile && file.name != kMarkerFile,
             "two files \"{}\"", file.name);
    add(file.name, file.text);
  }
  const std::string index_text = index.to_json().dump(1) + "\n";
  atomic_write(partial / kIndexFile, index_text, ExitCode::kCheckpoint);
  atomic_write(partial / kMarkerFile, format("step {}\nindex {}\n", step, sha256(index_text)),
               ExitCode::kCheckpoint);

  if (!is_there(folder)) {
    on_disk(format("committing step {}", step), [&] { fs::rename(partial, folder); });
  } else if (renameat2(AT_FDCWD, partial.c_str(), AT_FDCWD, folder.c_str(), RENAME_EXCHANGE) == 0) {
    behind_commit(step, [&] { remove_folder(partial); });  // what had the name before
  } else if (errno == EINVAL || errno == ENOSYS) {  // a file system that can't exchange names: a moment
                                                    // without either, both stay on disk
    const fs::path before = run_folder / (".removed-" + step_folder_name(step));
    on_disk(format("committing step {}", step), [&] {
      fs::remove_all(before);
      fs::rename(folder, before);
      fs::rename(partial, folder);
    });
    std::error_code left;  // for the next start
    fs::remove_all(before, left);
  } else {
    throw Error(ExitCode::kCheckpoint, format("committing step {}: renaming to {}: {}", step, folder,
                                              std::generic_category().message(errno)));
  }
  sync_path(run_folder, ExitCode::kCheckpoint);
  point_latest(run_folder, folder);
  return folder;
}

CheckpointSaver::CheckpointSaver(fs::path run_folder, CheckpointWriter writer, SavePeers peers, bool commits_beside)
    : run_folder_(std::move(run_folder)), writer_(writer), peers_(std::move(peers)), commits_beside_(commits_beside) {
  if (peers_.rank == 0) {
    remove_leftovers(run_folder_);
  }
}

// Before anything is written: is there room, and an empty folder.
void CheckpointSaver::prepare(int64_t step, uint64_t bytes) {
  const uint64_t free = free_bytes(run_folder_);
  if (free < bytes + kMarginBytes) {
    throw Error(ExitCode::kCheckpoint,
                format("saving step {} takes {}, and {} has {} free", step, human_bytes(bytes + kMarginBytes), run_folder_,
                       human_bytes(free)),
                "free some space on this disk, lower training.max_checkpoints, or set output_dir; the last "
                "complete checkpoint is untouched");
  }
  (void)make_partial_folder(run_folder_, step);
}

namespace {

constexpr const char* kGood = "good";

// An outcome as a text that other ranks read: "good", or what and hint.
std::string outcome_text(const std::optional<Error>& error, const std::string& good = kGood) {
  if (!error) {
    return good;
  }
  return Json::object({{"error", std::string(error->what())}, {"hint", error->hint()}}).dump();
}

// Throws the first failure among the ranks' outcomes.
void throw_failure(const std::vector<std::string>& outcomes, int64_t step) {
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    if (outcomes[rank].starts_with("{\"error\"")) {
      const Json json = Json::parse(outcomes[rank], "a rank's outcome");
      const RunRule rule = run_rule("A3", {{"step", to_text(step)}, {"rank", to_text(static_cast<int64_t>(rank))}, {"reason", json.at("error").as_string()}});
      const std::string hint = json.at("hint").as_string();
      throw Error(ExitCode::kCheckpoint, rule.message, hint.empty() ? rule.fix : hint);
    }
  }
}

template <class Body>
std::optional<Error> failure_of(const Body& body) {
  try {
    body();
    return std::nullopt;
  } catch (const Error& error) {
    return error;
  } catch (const std::exception& error) {
    return Error(ExitCode::kCheckpoint, error.what());
  }
}

}  // namespace

void CheckpointSaver::prepare_together(int64_t step, uint64_t bytes) {
  bytes_ = 0;
  for (const std::string& text : peers_.gather(std::to_string(bytes), format("the size of step {}", step))) {
    bytes_ += std::stoull(text);
  }
  const auto failure = peers_.rank == 0 ? failure_of([&] { prepare(step, bytes_); }) : std::nullopt;
  throw_failure(peers_.gather(outcome_text(failure), format("the folder of step {}", step)), step);
}

void CheckpointSaver::start(Request request) {
  (void)wait();
  started_ = std::chrono::steady_clock::now();
  const int64_t step = request.state.step;
  bytes_ = 0;
  for (const TensorSlice& tensor : request.tensors) {
    bytes_ += tensor.bytes;
  }
  is_alone() ? prepare(step, bytes_) : prepare_together(step, bytes_);
  partial_ = run_folder_ / (std::string(kPartialPrefix) + step_folder_name(step));
  state_ = std::move(request.state);
  texts_ = std::move(request.texts);
  after_commit_ = std::move(request.after_commit);
  stage_ = Stage::writing;
  failed_ = failure_of([&] {
    save_ = std::make_unique<RankSave>(RankSave::Arguments{.writer = writer_,
                                                           .folder = partial_,
                                                           .step = step,
                                                           .rank = peers_.rank,
                                                           .world_size = peers_.world_size,
                                                           .tensors = std::move(request.tensors),
                                                           .source = std::move(request.source),
                                                           .keep_alive = std::move(request.keep_alive)});
  });
  (void)poll();
}

bool CheckpointSaver::is_settled() {
  if (stage_ == Stage::idle || failed_) {
    return stage_ != Stage::idle;
  }
  if (stage_ == Stage::writing) {
    bool is_done = false;
    failed_ = failure_of([&] { is_done = save_->is_done(); });
    return failed_ || is_done;
  }
  return !commit_task_.valid() || commit_task_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

std::optional<CommittedStep> CheckpointSaver::advance() {
  SF_CHECK(stage_ != Stage::idle, "a save that does not exist was to go on");
  try {
    if (stage_ == Stage::writing) {
      begin_commit();
      if (commits_beside_) {
        return std::nullopt;
      }
    }
    return end_commit();
  } catch (...) {
    abandon();
    throw;
  }
}

std::optional<CommittedStep> CheckpointSaver::poll() {
  std::optional<CommittedStep> committed;
  while (is_alone() && !committed && is_settled()) {
    committed = advance();
  }
  return committed;
}

std::optional<CommittedStep> CheckpointSaver::wait() {
  std::optional<CommittedStep> committed;
  while (stage_ != Stage::idle) {
    if (stage_ == Stage::writing && !failed_) {
      failed_ = failure_of([&] { save_->wait(); });
    } else if (stage_ == Stage::committing && commit_task_.valid()) {
      commit_task_.wait();
    }
    committed = advance();
  }
  return committed;
}

// Every rank tells how its file went; when all are there rank 0 commits.
void CheckpointSaver::begin_commit() {
  const int64_t step = state_.step;
  CheckpointIndex all;
  if (is_alone()) {
    if (failed_) {
      throw Error(*failed_);
    }
    all = save_->index();
  } else {
    std::string index;
    if (!failed_) {
      failed_ = failure_of([&] { index = save_->index().to_json().dump(); });
    }
    const std::vector<std::string> outcomes = peers_.gather(outcome_text(failed_, index), format("the files of step {}", step));
    throw_failure(outcomes, step);
    if (peers_.rank == 0) {
      failed_ = failure_of([&] {  // told to all in end_commit
        all = save_->index();
        for (size_t rank = 1; rank < outcomes.size(); ++rank) {
          all.merge(CheckpointIndex::part_from_json(Json::parse(outcomes[rank], "a rank's index"), format("rank {}", rank)));
        }
      });
    }
  }
  save_.reset();
  stage_ = Stage::committing;
  if (peers_.rank == 0 && !failed_) {
    const auto launch = commits_beside_ ? std::launch::async : std::launch::deferred;
    commit_task_ = std::async(launch, [this, index = std::move(all)]() mutable { commit(std::move(index)); });
  }
}

std::optional<CommittedStep> CheckpointSaver::end_commit() {
  const int64_t step = state_.step;
  if (commit_task_.valid() && !failed_) {
    failed_ = failure_of([&] { commit_task_.get(); });
  }
  if (is_alone()) {
    if (failed_) {
      throw Error(*failed_);
    }
  } else {
    throw_failure(peers_.gather(outcome_text(failed_), format("the commit of step {}", step)), step);
  }
  if (peers_.rank != 0) {
    committed_ = std::chrono::steady_clock::now();
  }
  stage_ = Stage::idle;
  after_commit_ = {};
  last_ = CommittedStep{.folder = run_folder_ / step_folder_name(step), .step = step, .bytes = bytes_,
                        .seconds = std::chrono::duration<double>(committed_ - started_).count()};
  return last_;
}

void CheckpointSaver::commit(CheckpointIndex index) {
  const int64_t step = state_.step;
  try {
    (void)commit_checkpoint(run_folder_, step, std::move(index), state_, texts_);
    committed_ = std::chrono::steady_clock::now();
    if (after_commit_) {
      behind_commit(step, after_commit_);
    }
  } catch (const Error& error) {
    throw error.code() == ExitCode::kCheckpoint && is_alone() ? error.within(format("saving step {}", step)) : error;
  }
}

// The space of a step that failed is given back at once: it may be what the disk lacks.
void CheckpointSaver::abandon() {
  save_.reset();
  failed_.reset();
  after_commit_ = {};
  stage_ = Stage::idle;
  if (peers_.rank == 0) {
    std::error_code ignored;
    fs::remove_all(partial_, ignored);
  }
}

}  // namespace sf
