// A small run to save: tensors whose values follow from the step, so that any checkpoint can be checked
// without knowing who wrote it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "core/checkpoint/reader.hpp"
#include "core/checkpoint/save.hpp"

namespace sf::test {

/// A folder in the system's temporary folder, deleted at the end of the scope.
class TempFolder {
 public:
  TempFolder();
  ~TempFolder();
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

/// weights/fc [rows, 3] F32, moments/fc [rows, 3] BF16, counter [] I64: element i holds step + i.
struct SmallRun {
  explicit SmallRun(int64_t step, int64_t rows = 5);
  int64_t step;
  std::vector<float> weights;
  std::vector<uint16_t> moments;
  int64_t counter;

  [[nodiscard]] std::vector<TensorSlice> tensors() const;
  [[nodiscard]] RunState state() const;
  [[nodiscard]] CheckpointSaver::Request request() const;
};

/// async_ckpt.so as the host has it: opened, created with these options and started; stopped and destroyed at the end.
class AsyncPlugin {
 public:
  explicit AsyncPlugin(int64_t threads = 2, int64_t bandwidth = 0);
  ~AsyncPlugin();
  AsyncPlugin(const AsyncPlugin&) = delete;
  AsyncPlugin& operator=(const AsyncPlugin&) = delete;
  [[nodiscard]] CheckpointWriter writer() const;

 private:
  std::map<std::string, int64_t> values_;
  sf_options options_{};
  sf_host host_{};
  const sf_plugin* plugin_ = nullptr;
  sf_instance* instance_ = nullptr;
};

/// Whether a checkpoint holds exactly what SmallRun(its step, rows) saved.
[[nodiscard]] bool holds_its_step(const CheckpointReader& reader, int64_t rows = 5);

/// Names in a folder, sorted.
[[nodiscard]] std::vector<std::string> names_in(const std::filesystem::path& folder);

/// What and hint of the Error(kCheckpoint) that `action` throws; "" when it throws none.
template <class Action>
std::string checkpoint_error(const Action& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.code() == ExitCode::kCheckpoint ? std::string(error.what()) + "\n" + error.hint()
                                                 : std::string("another code: ") + error.what();
  }
  return "";
}

}  // namespace sf::test
