#include "core/checkpoint/save.hpp"

#include "core/base/error.hpp"
#include "core/base/file.hpp"
#include "core/checkpoint/retention.hpp"

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
  std::span<const std::byte> bytes;
  std::string sha256;
  std::atomic<bool> released = false;

  static void release(void* lease) {  // on the writer's thread
    auto* self = static_cast<Lease*>(lease);
    self->sha256 = sf::sha256(self->bytes);
    self->released.store(true, std::memory_order_release);
  }
};

namespace {

constexpr std::string_view kPartialPrefix = ".partial-";
constexpr uint64_t kMarginBytes = uint64_t{1} << 20;  // index, state, texts and the file system's own blocks

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

}  // namespace

RankSave::RankSave(Arguments arguments)
    : arguments_(std::move(arguments)), layout_(lay_out_rank_file(arguments_.tensors)) {
  const std::string file = rank_file_name(arguments_.rank);
  const auto [functions, instance] = arguments_.writer;
  sf_status status = empty_status();
  check(functions->begin(instance, arguments_.folder.c_str(), arguments_.step, &status), status,
        arguments_.step);
  const auto put = [&](uint64_t offset, const void* data, uint64_t bytes) {
    Lease& lease = leases_.emplace_back();
    lease.bytes = {static_cast<const std::byte*>(data), bytes};
    const sf_write piece = {.struct_size = sizeof(sf_write),
                            .reserved = 0,
                            .file = file.c_str(),
                            .offset = offset,
                            .data = data,
                            .bytes = bytes,
                            .lease = &lease};
    check(functions->put(instance, &piece, Lease::release, &status), status, arguments_.step);
  };
  try {
    put(0, layout_.header.data(), layout_.header.size());
    for (const size_t i : layout_.order) {
      put(layout_.offsets[i], arguments_.tensors[i].data, arguments_.tensors[i].bytes);
    }
    check(functions->finish(instance, &status), status, arguments_.step);
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

bool RankSave::is_done() {
  if (!done_) {
    sf_status status = empty_status();
    int64_t step = -1;
    check(arguments_.writer.functions->poll(arguments_.writer.instance, &step, &status), status,
          arguments_.step);
    done_ = step >= arguments_.step;
  }
  return done_;
}

void RankSave::wait() {
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
  for (const Lease& lease : leases_) {
    SF_CHECK(lease.released.load(std::memory_order_acquire),
             "the checkpoint writer says done and keeps a buffer of step {}", arguments_.step);
  }
  const std::string file = rank_file_name(arguments_.rank);
  CheckpointIndex out;
  out.step = arguments_.step;
  out.world_size = arguments_.world_size;
  out.files[file] = {
      .bytes = layout_.bytes, .header_bytes = layout_.header.size(), .sha256 = leases_.front().sha256};
  for (size_t k = 0; k < layout_.order.size(); ++k) {
    const size_t i = layout_.order[k];
    const TensorSlice& tensor = arguments_.tensors[i];
    const std::vector<int64_t> origin(tensor.global_shape.size(), 0);
    out.tensors[tensor.name] = {
        .dtype = tensor.dtype,
        .shape = tensor.global_shape,
        .slices = {{.file = file,
                    .offset = layout_.offsets[i],
                    .bytes = tensor.bytes,
                    .start = tensor.start.empty() ? origin : tensor.start,
                    .shape = tensor.shape.empty() ? tensor.global_shape : tensor.shape,
                    .sha256 = leases_[k + 1].sha256}}};
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
  const fs::path folder = run_folder / step_folder_name(step);
  const auto add = [&](const std::string& name, const std::string& text) {
    atomic_write(partial / name, text, ExitCode::kCheckpoint);
    index.files[name] = {.bytes = text.size(), .header_bytes = 0, .sha256 = sha256(text)};
  };
  index.check_cover();
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

  if (!fs::exists(folder)) {
    on_disk(format("committing step {}", step), [&] { fs::rename(partial, folder); });
  } else if (renameat2(AT_FDCWD, partial.c_str(), AT_FDCWD, folder.c_str(), RENAME_EXCHANGE) == 0) {
    remove_folder(partial);                         // what had the name before
  } else if (errno == EINVAL || errno == ENOSYS) {  // a file system that can't exchange names: a moment
                                                    // without either, both stay on disk
    on_disk(format("committing step {}", step), [&] {
      const fs::path before = run_folder / (".removed-" + step_folder_name(step));
      fs::remove_all(before);
      fs::rename(folder, before);
      fs::rename(partial, folder);
      fs::remove_all(before);
    });
  } else {
    throw Error(ExitCode::kCheckpoint, format("committing step {}: renaming to {}: {}", step, folder,
                                              std::generic_category().message(errno)));
  }
  sync_path(run_folder, ExitCode::kCheckpoint);
  point_latest(run_folder, folder);
  return folder;
}

CheckpointSaver::CheckpointSaver(fs::path run_folder, CheckpointWriter writer, SavePeers peers)
    : run_folder_(std::move(run_folder)), writer_(writer), peers_(std::move(peers)) {
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
      throw Error(ExitCode::kCheckpoint, format("saving step {}: rank {}: {}", step, rank, json.at("error").as_string()),
                  json.at("hint").as_string());
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
  uint64_t all = 0;
  for (const std::string& text : peers_.gather(std::to_string(bytes), format("the size of step {}", step))) {
    all += std::stoull(text);
  }
  const auto failure = peers_.rank == 0 ? failure_of([&] { prepare(step, all); }) : std::nullopt;
  throw_failure(peers_.gather(outcome_text(failure), format("the folder of step {}", step)), step);
}

void CheckpointSaver::start(Request request) {
  wait();
  const int64_t step = request.state.step;
  const bool alone = peers_.world_size == 1;
  uint64_t bytes = 0;
  for (const TensorSlice& tensor : request.tensors) {
    bytes += tensor.bytes;
  }
  alone ? prepare(step, bytes) : prepare_together(step, bytes);
  partial_ = run_folder_ / (std::string(kPartialPrefix) + step_folder_name(step));
  state_ = std::move(request.state);
  texts_ = std::move(request.texts);
  failed_ = failure_of([&] {
    save_ = std::make_unique<RankSave>(RankSave::Arguments{.writer = writer_,
                                                           .folder = partial_,
                                                           .step = step,
                                                           .rank = peers_.rank,
                                                           .world_size = peers_.world_size,
                                                           .tensors = std::move(request.tensors),
                                                           .keep_alive = std::move(request.keep_alive)});
    if (alone && save_->is_done()) {
      commit(save_->index());
    }
  });
  if (alone && failed_) {
    const Error error = *failed_;
    abandon();
    throw error;
  }
}

std::optional<fs::path> CheckpointSaver::poll() {
  if (!save_ || peers_.world_size > 1) {
    return std::nullopt;
  }
  try {
    if (!save_->is_done()) {
      return std::nullopt;
    }
    commit(save_->index());
  } catch (...) {
    abandon();
    throw;
  }
  return last_committed_;
}

void CheckpointSaver::wait() {
  if (peers_.world_size > 1) {
    if (save_ || failed_) {
      wait_together();
    }
    return;
  }
  if (!save_) {
    return;
  }
  try {
    save_->wait();
    commit(save_->index());
  } catch (...) {
    abandon();
    throw;
  }
}

// Every rank tells how its file went, then rank 0 how the commit went.
void CheckpointSaver::wait_together() {
  const int64_t step = state_.step;
  std::string index;
  if (!failed_) {
    failed_ = failure_of([&] {
      save_->wait();
      index = save_->index().to_json().dump();
    });
  }
  const std::vector<std::string> outcomes = peers_.gather(outcome_text(failed_, index), format("the files of step {}", step));
  try {
    throw_failure(outcomes, step);
    const auto failure = peers_.rank != 0 ? std::nullopt : failure_of([&] {
      CheckpointIndex all = save_->index();
      for (size_t rank = 1; rank < outcomes.size(); ++rank) {
        all.merge(CheckpointIndex::part_from_json(Json::parse(outcomes[rank], "a rank's index"), format("rank {}", rank)));
      }
      commit(std::move(all));
    });
    throw_failure(peers_.gather(outcome_text(failure), format("the commit of step {}", step)), step);
  } catch (...) {
    abandon();
    throw;
  }
  save_.reset();
  last_committed_ = run_folder_ / step_folder_name(step);
}

void CheckpointSaver::commit(CheckpointIndex index) {
  const int64_t step = state_.step;
  try {
    last_committed_ = commit_checkpoint(run_folder_, step, std::move(index), state_, texts_);
  } catch (const Error& error) {
    throw error.code() == ExitCode::kCheckpoint && peers_.world_size == 1 ? error.within(format("saving step {}", step)) : error;
  }
  save_.reset();
}

// The space of a step that failed is given back at once: it may be what the disk lacks.
void CheckpointSaver::abandon() {
  save_.reset();
  failed_.reset();
  if (peers_.rank == 0) {
    std::error_code ignored;
    fs::remove_all(partial_, ignored);
  }
}

}  // namespace sf
