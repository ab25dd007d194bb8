// core/train/loader.hpp: reads, prepares and stacks ahead of the training thread. A window's content depends on its number alone
// (engine: order of samples), so there is nothing to save but that number.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/data/order.hpp"
#include "core/train/batch.hpp"
#include "sf/algorithm.hpp"

namespace sf {

/// Where samples come from: features as they lie on disk, cut to the maximal length. `read` may throw Error(kData).
struct SampleSource {
  int64_t size = 0;
  std::function<Sample(int64_t index)> read;
};

/// The micro-batches of one optimizer step on this rank, host tensors.
struct Window {
  int64_t number = 0;
  std::vector<Batch> batches;
  std::vector<double> denominators;      // weigh() of each batch
  int64_t samples = 0, tokens = 0;       // live ones
  int64_t positions = 0;                 // tokens with padding and dead rows
};

/// Samples that a run met and could not use: counted, each named once.
struct Unusable {
  int64_t count = 0;
  std::map<int64_t, std::string> reasons;  // by sample
};

/// Reads and prepares one sample. Returns nothing and notes the reason when the algorithm can't use it.
std::optional<Sample> read_prepared(const SampleSource& source, Algorithm& algorithm, int64_t index, const SampleContext& context,
                                    Unusable& unusable);

/// The first sample that can be used, prepared; throws Error(kData) with the reasons when there is none.
Sample find_prototype(const SampleSource& source, Algorithm& algorithm, uint64_t seed, bool evaluating);

/// Draws for (epoch, sample); evaluation has streams of its own and epoch 0.
SampleContext sample_context(uint64_t seed, int64_t epoch, int64_t sample, bool evaluating);

class WindowLoader {
 public:
  struct Options {
    uint64_t seed = 0;
    WindowShape window;                  // ranks, accumulation, batch size
    int64_t rank = 0;
    int64_t epochs = 1;                  // the stream ends after them; places past its end are dead rows
    BatchShape batch;
    int64_t first_window = 0, last_window = 0;   // half open
    int64_t first_position = 0;          // of the first window in the stream; another number of ranks may have come this far
    int64_t windows_ahead = 2;           // one in use, one ready: reading is cheaper than a step
  };

  /// Starts the data thread. Everything must outlive the loader; algorithm's prepare, finish and weigh run in that thread alone.
  WindowLoader(SampleSource source, Algorithm& algorithm, const BatchFields& fields, Options options);
  ~WindowLoader();
  WindowLoader(const WindowLoader&) = delete;
  WindowLoader& operator=(const WindowLoader&) = delete;

  /// The next window; waits for it. Rethrows what went wrong in the data thread.
  Window next();
  /// Window `number` without samples: what a rank whose data failed runs beside the others. Only after next() has thrown.
  Window dead(int64_t number);
  /// The next window when it is ready, without waiting.
  std::optional<Window> try_next();
  double seconds_waited() const { return seconds_waited_; }
  Unusable unusable() const;

 private:
  void read_ahead();
  Window make(int64_t number);

  SampleSource source_;
  Algorithm& algorithm_;
  const BatchFields& fields_;
  Options options_;
  SampleOrder order_;
  double seconds_waited_ = 0;
  Unusable met_;             // the data thread's own; unusable_ is its copy

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Window> ready_;
  std::exception_ptr failure_;
  Unusable unusable_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace sf
