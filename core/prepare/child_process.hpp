// core/prepare: from chat records to token records with loss masks. In: JSONL as people have it, a target's folder. Out: the token files that capture
// reads, and a report that accounts for every row. Rendering and tokenizing are done by a small Python process (text_worker.py) with the field's own
// libraries; what is supervised, kept, counted and written is decided here. No LibTorch.
//
// child_process.hpp: a program whose input and output are ours.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <sys/types.h>

namespace sf {

/// Runs as long as this object lives and is killed with it, and by the kernel when the thread that started it ends, however that happens.
class ChildProcess {
 public:
  /// `arguments[0]` is looked for in PATH. `variables` ("NAME=value") are added to the environment. A program that can't be started is found out
  /// when the first line is read.
  ChildProcess(const std::vector<std::string>& arguments, const std::vector<std::string>& variables);
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  /// False when the program reads no more.
  [[nodiscard]] bool write(std::string_view bytes);
  /// The next line without its end. False when the program has ended or closed its output.
  [[nodiscard]] bool read_line(std::string& line);
  /// The next bytes, as many as fit. False when the program has ended before.
  [[nodiscard]] bool read_bytes(std::span<std::byte> bytes);
  /// Called about ten times a second while one of the three above waits. What it throws comes out of them; the program is then of no more use.
  void set_watch(std::function<void()> watch) { watch_ = std::move(watch); }
  /// Of processor time that it has used so far, by all its threads; 0 when it has ended.
  [[nodiscard]] double processor_seconds() const;
  /// Waits for its end and says how it came: "exit code 127", "signal 9 (Killed)".
  [[nodiscard]] std::string how_it_ended();
  [[nodiscard]] pid_t id() const { return id_; }

 private:
  bool read_more();
  void wait_for(int descriptor, short events) const;

  pid_t id_ = -1;
  int input_ = -1, output_ = -1;
  std::string buffer_;
  std::size_t begin_ = 0;  // of what was not handed out yet
  std::function<void()> watch_;
};

}  // namespace sf
