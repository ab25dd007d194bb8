// plugins/checkpoint/async_ckpt: the bytes of a checkpoint go to the disk on threads of their own. Knows files and pieces, and nothing of what is in them.
//
// writer_pool.hpp: one step at a time. Pieces are queued; each thread takes one, writes it at its place, gives it back (which takes its checksum) and
// goes on. The thread that writes the last piece of a finished step syncs the files: then the step is done.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace sf {

struct WriterSettings {
  int64_t threads = 2;
  int64_t bandwidth = 0;  // bytes in a second, 0: no limit
};

/// What went wrong, for a person.
struct WriteFailure {
  std::string what, hint;
};

/// All calls from one thread but where it says otherwise.
class WriterPool {
 public:
  explicit WriterPool(WriterSettings settings) : settings_(settings) {}
  ~WriterPool() { stop(); }
  WriterPool(const WriterPool&) = delete;
  WriterPool& operator=(const WriterPool&) = delete;

  void start();
  /// Writes what is queued, then joins the threads. May be called again, or without start.
  void stop();

  /// A step's files go to `directory`. Waits for a step that is still being written, whose failure is forgotten.
  void begin(const std::string& directory, int64_t step);
  /// Borrows `data` until `release(lease)` is called, exactly once: here when the file can't be opened (then false), else by a thread.
  bool put(const char* file, uint64_t offset, const void* data, uint64_t bytes, void (*release)(void*), void* lease, WriteFailure& failure);
  /// No more pieces for this step.
  void finish();
  /// The newest step whose files are on the disk, -1 before the first; false with the failure of a step, told once.
  bool poll(int64_t& done_step, WriteFailure& failure);
  /// Like poll, after waiting until nothing is in flight or `milliseconds` are over (negative: for ever).
  bool wait(int64_t milliseconds, WriteFailure& failure);

 private:
  struct Piece {
    int descriptor = -1;
    const std::string* file = nullptr;  // a key of files_
    uint64_t offset = 0;
    const std::byte* data = nullptr;
    uint64_t bytes = 0;
    void (*release)(void*) = nullptr;
    void* lease = nullptr;
  };

  void work();
  void write(const Piece& piece);
  void sync_files();
  void wait_for_turn(uint64_t bytes);
  void fail(const std::string& doing, const std::string& file, int number);
  [[nodiscard]] bool is_idle() const { return pieces_in_flight_ == 0 && !needs_sync_ && !is_syncing_; }
  void close_files();

  const WriterSettings settings_;
  std::vector<std::thread> threads_;

  std::mutex mutex_;                    // guards what follows
  std::condition_variable has_work_, is_idle_;
  std::deque<Piece> queue_;
  std::map<std::string, int> files_;    // descriptors of this step's files; changed only while no thread works on them
  std::string directory_;
  int64_t step_ = -1, done_step_ = -1;
  int64_t pieces_in_flight_ = 0;        // queued or being written
  bool is_finished_ = false, needs_sync_ = false, is_syncing_ = false, has_failed_ = false, is_told_ = false, stops_ = false;
  WriteFailure failure_;

  std::mutex turn_mutex_;
  std::chrono::steady_clock::time_point next_turn_;  // when the disk may get the next bytes
};

}  // namespace sf
