#include "core/checkpoint/writer_sync.hpp"

#include "core/base/text.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <system_error>

#include <fcntl.h>
#include <unistd.h>

namespace sf {

struct SyncWriter::State {
  std::string directory;
  int64_t step = -1;
  int64_t done_step = -1;
  std::map<std::string, int> files;  // open descriptors by name

  void close_all() {
    for (const auto& [name, descriptor] : files) {
      close(descriptor);
    }
    files.clear();
  }
};

namespace {

SyncWriter::State& state_of(sf_instance* instance) {
  return *reinterpret_cast<SyncWriter::State*>(instance);
}

// One piece or file went wrong: the step is given up.
int32_t fail(SyncWriter::State& state, sf_status* status, const char* doing, const std::string& file,
             int number) {
  const bool full = number == ENOSPC || number == EDQUOT || number == EFBIG;
  std::snprintf(status->what, sizeof status->what, "%s %s/%s: %s", doing, state.directory.c_str(),
                file.c_str(), std::generic_category().message(number).c_str());
  std::snprintf(status->hint, sizeof status->hint, "%s",
                full ? "free some space on this disk, or lower training.max_checkpoints; the last complete "
                       "checkpoint is untouched"
                     : "");
  status->code = SF_IO;
  state.close_all();
  state.step = -1;
  return SF_IO;
}

int32_t begin(sf_instance* instance, const char* directory, int64_t step, sf_status*) {
  SyncWriter::State& state = state_of(instance);
  state.close_all();  // of a step that was given up
  state.directory = directory;
  state.step = step;
  return SF_OK;
}

int32_t put(sf_instance* instance, const sf_write* piece, void (*release)(void* lease), sf_status* status) {
  SyncWriter::State& state = state_of(instance);
  int32_t code = SF_OK;
  auto file = state.files.find(piece->file);
  if (file == state.files.end()) {
    const std::string path = state.directory + "/" + piece->file;
    const int descriptor = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (descriptor < 0) {
      code = fail(state, status, "creating", piece->file, errno);
    } else {
      file = state.files.emplace(piece->file, descriptor).first;
    }
  }
  const char* data = static_cast<const char*>(piece->data);
  uint64_t written = 0;
  while (code == SF_OK && written < piece->bytes) {
    constexpr uint64_t kLargestWrite = uint64_t{1} << 30;  // pwrite takes a little less than 2 GiB at most
    const ssize_t got = pwrite(file->second, data + written, std::min(piece->bytes - written, kLargestWrite),
                               static_cast<off_t>(piece->offset + written));
    if (got > 0) {
      written += static_cast<uint64_t>(got);
    } else if (got == 0 || errno != EINTR) {
      code = fail(state, status, "writing", piece->file, got == 0 ? ENOSPC : errno);
    }
  }
  release(piece->lease);
  return code;
}

int32_t finish(sf_instance* instance, sf_status* status) {
  SyncWriter::State& state = state_of(instance);
  while (!state.files.empty()) {
    const auto [name, descriptor] = *state.files.begin();
    const bool synced = fsync(descriptor) == 0;
    const int number = errno;
    state.files.erase(state.files.begin());
    if (close(descriptor) != 0 || !synced) {
      return fail(state, status, "syncing", name, synced ? errno : number);
    }
  }
  state.done_step = state.step;
  return SF_OK;
}

int32_t poll(sf_instance* instance, int64_t* done_step, sf_status*) {
  *done_step = state_of(instance).done_step;
  return SF_OK;
}

int32_t wait(sf_instance*, int64_t, sf_status*) {
  return SF_OK;
}  // nothing is ever in flight

constexpr sf_checkpoint_writer kFunctions = {.struct_size = sizeof(sf_checkpoint_writer),
                                             .reserved = 0,
                                             .begin = begin,
                                             .put = put,
                                             .finish = finish,
                                             .poll = poll,
                                             .wait = wait};

}  // namespace

SyncWriter::SyncWriter() : state_(std::make_unique<State>()) {}
SyncWriter::~SyncWriter() {
  state_->close_all();
}

CheckpointWriter SyncWriter::writer() const {
  return {&kFunctions, reinterpret_cast<sf_instance*>(state_.get())};
}

}  // namespace sf
