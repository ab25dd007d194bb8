#include "core/kernels/crew.hpp"

#include "core/base/error.hpp"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

namespace sf {
namespace {

constexpr int kLooks = 2000;  // some 0.1 ms
constexpr int kMostThreads = 256;

thread_local bool is_working = false;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// What of a thread's share nobody has taken yet, beside the number of the piece that it belongs to, in one word: who takes a task from a piece that is over fails.
struct Share {
  uint64_t piece, next, end;
  static constexpr int kBits = 20;
  static constexpr uint64_t kMask = (uint64_t{1} << kBits) - 1;
  static Share of(uint64_t word) { return {word >> (2 * kBits), word >> kBits & kMask, word & kMask}; }
  [[nodiscard]] uint64_t word() const { return piece << (2 * kBits) | next << kBits | end; }
};

class Crew {
 public:
  Crew() : owner_(::getpid()) {}
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;
  ~Crew() {
    is_over_ = true;
    piece_.fetch_add(1);
    piece_.notify_all();
    for (std::thread& thread : threads_) owner_ == ::getpid() ? thread.join() : thread.detach();
  }

  void run(int64_t tasks, int threads, void (*work)(const void*, int64_t), const void* context) {
    const std::unique_lock<std::mutex> only(one_piece_, std::try_to_lock);
    if (!only.owns_lock()) {
      for (int64_t task = 0; task < tasks; ++task) work(context, task);
      return;
    }
    threads = static_cast<int>(std::min<int64_t>({threads, tasks, kMostThreads}));
    while (static_cast<int>(threads_.size()) + 1 < threads) {
      const int self = static_cast<int>(threads_.size()) + 1;
      threads_.emplace_back([this, self] { serve(self); });
    }
    // All shares of the piece before are taken, so nobody reads these until a new share is there.
    work_.store(work, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    width_.store(threads, std::memory_order_relaxed);
    const uint64_t piece = ++number_ & 0xffffff;
    for (int k = 0; k < threads; ++k) {
      const Share share{piece, static_cast<uint64_t>(tasks * k / threads), static_cast<uint64_t>(tasks * (k + 1) / threads)};
      shares_[k].word.store(share.word(), std::memory_order_release);
    }
    piece_.fetch_add(1);
    piece_.notify_all();
    take_all(0);
    for (int looks = 0; done_.load(std::memory_order_acquire) != tasks; ++looks) {
      looks < kLooks ? pause() : static_cast<void>(::sched_yield());
    }
  }

 private:
  struct alignas(128) Place {
    std::atomic<uint64_t> word{0};
  };

  bool take(int share) {
    std::atomic<uint64_t>& word = shares_[share].word;
    uint64_t seen = word.load(std::memory_order_acquire);
    while (true) {
      const Share left = Share::of(seen);
      if (left.next == left.end) return false;
      auto* const work = work_.load(std::memory_order_relaxed);
      const void* const context = context_.load(std::memory_order_relaxed);
      if (!word.compare_exchange_weak(seen, Share{left.piece, left.next + 1, left.end}.word(), std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      work(context, static_cast<int64_t>(left.next));
      return true;
    }
  }

  void take_all(int self) {
    is_working = true;
    const int width = width_.load(std::memory_order_relaxed);
    int64_t taken = 0;
    for (int k = 0; k < width && self < width; ++k) {
      while (take((self + k) % width)) ++taken;
    }
    is_working = false;
    if (taken > 0) done_.fetch_add(taken, std::memory_order_release);
  }

  void serve(int self) {
    int seen = 0;
    while (!is_over_) {
      take_all(self);
      for (int looks = 0; looks < kLooks && piece_.load(std::memory_order_acquire) == seen; ++looks) pause();
      piece_.wait(seen);
      seen = piece_.load(std::memory_order_acquire);
    }
  }

  const pid_t owner_;
  std::mutex one_piece_;
  std::deque<std::thread> threads_;
  uint64_t number_ = 0;
  std::atomic<bool> is_over_{false};
  std::atomic<void (*)(const void*, int64_t)> work_{nullptr};
  std::atomic<const void*> context_{nullptr};
  std::atomic<int> width_{0};
  alignas(128) std::atomic<int64_t> done_{0};
  alignas(128) std::atomic<int> piece_{0};
  Place shares_[kMostThreads];
};

}  // namespace

void crew_run(int64_t tasks, int threads, void (*work)(const void* context, int64_t task), const void* context) {
  SF_CHECK(tasks < kCrewTasks, "{} tasks for a crew", tasks);
  if (threads < 2 || tasks < 2 || is_working) {
    for (int64_t task = 0; task < tasks; ++task) work(context, task);
    return;
  }
  static Crew crew;
  crew.run(tasks, threads, work, context);
}

}  // namespace sf
