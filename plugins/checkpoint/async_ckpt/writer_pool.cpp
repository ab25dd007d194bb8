#include "plugins/checkpoint/async_ckpt/writer_pool.hpp"

#include <algorithm>
#include <cerrno>
#include <system_error>

#include <fcntl.h>
#include <unistd.h>

namespace sf {
namespace {

// One write: small enough to notice a failure and to share a bandwidth evenly, large enough to cost nothing.
constexpr uint64_t kWriteBytes = uint64_t{4} << 20;

}  // namespace

void WriterPool::start() {
  next_turn_ = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < settings_.threads; ++i) {
    threads_.emplace_back([this] { work(); });
  }
}

void WriterPool::stop() {
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
  }
  has_work_.notify_all();
  for (std::thread& thread : threads_) {
    thread.join();
  }
  threads_.clear();
  close_files();
}

void WriterPool::begin(const std::string& directory, int64_t step) {
  std::unique_lock lock(mutex_);
  is_idle_.wait(lock, [&] { return is_idle(); });
  close_files();
  directory_ = directory;
  step_ = step;
  done_step_ = -1;
  is_finished_ = has_failed_ = is_told_ = false;
  failure_ = {};
}

bool WriterPool::put(const char* file, uint64_t offset, const void* data, uint64_t bytes, void (*release)(void*), void* lease,
                     WriteFailure& failure) {
  std::unique_lock lock(mutex_);
  auto found = files_.find(file);
  if (found == files_.end() && !has_failed_) {
    const std::string path = directory_ + "/" + file;
    const int descriptor = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (descriptor < 0) {
      fail("creating", file, errno);
    } else {
      found = files_.emplace(file, descriptor).first;
    }
  }
  if (has_failed_) {
    failure = failure_;
    is_told_ = true;
    lock.unlock();
    release(lease);
    return false;
  }
  queue_.push_back({.descriptor = found->second, .file = &found->first, .offset = offset, .data = static_cast<const std::byte*>(data),
                    .bytes = bytes, .release = release, .lease = lease});
  ++pieces_in_flight_;
  has_work_.notify_one();
  return true;
}

void WriterPool::finish() {
  const std::lock_guard lock(mutex_);
  is_finished_ = true;
  if (pieces_in_flight_ == 0 && !has_failed_) {
    needs_sync_ = true;
    has_work_.notify_one();
  }
}

bool WriterPool::poll(int64_t& done_step, WriteFailure& failure) {
  const std::lock_guard lock(mutex_);
  done_step = done_step_;
  if (has_failed_ && !is_told_) {
    is_told_ = true;
    failure = failure_;
    return false;
  }
  return true;
}

bool WriterPool::wait(int64_t milliseconds, WriteFailure& failure) {
  {
    std::unique_lock lock(mutex_);
    const auto is_quiet = [&] { return is_idle(); };
    if (milliseconds < 0) {
      is_idle_.wait(lock, is_quiet);
    } else {
      is_idle_.wait_for(lock, std::chrono::milliseconds(milliseconds), is_quiet);
    }
  }
  int64_t ignored = -1;
  return poll(ignored, failure);
}

void WriterPool::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    has_work_.wait(lock, [&] { return !queue_.empty() || needs_sync_ || (stops_ && is_idle()); });
    if (!queue_.empty()) {
      const Piece piece = queue_.front();
      queue_.pop_front();
      const bool is_wanted = !has_failed_;
      lock.unlock();
      if (is_wanted) {
        write(piece);
      }
      piece.release(piece.lease);
      lock.lock();
      --pieces_in_flight_;
      needs_sync_ = pieces_in_flight_ == 0 && is_finished_ && !has_failed_;
    }
    if (needs_sync_) {
      needs_sync_ = false;
      is_syncing_ = true;
      lock.unlock();
      sync_files();
      lock.lock();
      is_syncing_ = false;
      done_step_ = has_failed_ ? done_step_ : step_;
    }
    if (is_idle()) {
      is_idle_.notify_all();
      if (stops_) {
        has_work_.notify_all();
        return;
      }
    }
  }
}

void WriterPool::write(const Piece& piece) {
  for (uint64_t written = 0; written < piece.bytes;) {
    const uint64_t wanted = std::min(piece.bytes - written, kWriteBytes);
    wait_for_turn(wanted);
    const ssize_t got = pwrite(piece.descriptor, piece.data + written, wanted, static_cast<off_t>(piece.offset + written));
    if (got > 0) {
      written += static_cast<uint64_t>(got);
    } else if (got == 0 || errno != EINTR) {
      const int number = got == 0 ? ENOSPC : errno;
      const std::lock_guard lock(mutex_);
      fail("writing", *piece.file, number);
      return;
    }
  }
  // The disk begins now, so that the sync at the end finds little to do. Only a hint: what it can't do fsync does.
  (void)sync_file_range(piece.descriptor, static_cast<off64_t>(piece.offset), static_cast<off64_t>(piece.bytes), SYNC_FILE_RANGE_WRITE);
}

// Nobody else touches the files now.
void WriterPool::sync_files() {
  for (auto& [file, descriptor] : files_) {
    const bool is_synced = fsync(descriptor) == 0;
    const int sync_error = errno;
    const bool is_closed = close(descriptor) == 0;
    const int number = is_synced ? errno : sync_error;
    descriptor = -1;
    if (!is_synced || !is_closed) {
      const std::lock_guard lock(mutex_);
      fail("syncing", file, number);
    }
  }
}

void WriterPool::wait_for_turn(uint64_t bytes) {
  if (settings_.bandwidth <= 0) {
    return;
  }
  std::chrono::steady_clock::time_point turn;
  {
    const std::lock_guard lock(turn_mutex_);
    turn = std::max(next_turn_, std::chrono::steady_clock::now());
    const double seconds = static_cast<double>(bytes) / static_cast<double>(settings_.bandwidth);
    next_turn_ = turn + std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(seconds));
  }
  std::this_thread::sleep_until(turn);
}

// Under the lock. The first failure counts: later ones follow from it.
void WriterPool::fail(const std::string& doing, const std::string& file, int number) {
  if (has_failed_) {
    return;
  }
  has_failed_ = true;
  const bool is_full = number == ENOSPC || number == EDQUOT || number == EFBIG;
  failure_.what = doing + " " + directory_ + "/" + file + ": " + std::generic_category().message(number);
  failure_.hint = is_full ? "free some space on this disk, or lower training.max_checkpoints; the last complete checkpoint is untouched" : "";
}

void WriterPool::close_files() {
  for (const auto& [file, descriptor] : files_) {
    if (descriptor >= 0) {
      close(descriptor);
    }
  }
  files_.clear();
}

}  // namespace sf
