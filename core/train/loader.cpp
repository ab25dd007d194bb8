#include "core/train/loader.hpp"

#include <chrono>
#include <memory>

#include "core/base/error.hpp"
#include "core/base/log.hpp"
#include "core/data/philox.hpp"

namespace sf {

SampleContext sample_context(uint64_t seed, int64_t epoch, int64_t sample, bool evaluating) {
  SampleContext context;
  context.evaluating = evaluating;
  context.draw = [=](const char* stream, int64_t count) {
    const PhiloxStream draws(seed, evaluating ? std::string("evaluation/") + stream : std::string(stream));
    std::vector<uint64_t> bits(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) {
      bits[static_cast<size_t>(i)] =
          draws.bits(static_cast<uint64_t>(evaluating ? 0 : epoch), static_cast<uint64_t>(sample), static_cast<uint64_t>(i));
    }
    return bits;
  };
  return context;
}

std::optional<Sample> read_prepared(const SampleSource& source, Algorithm& algorithm, int64_t index, const SampleContext& context,
                                    Unusable& unusable) {
  Sample sample = source.read(index);
  const std::string reason = algorithm.prepare(sample, context);
  if (reason.empty()) {
    return sample;
  }
  ++unusable.count;
  if (unusable.reasons.emplace(index, reason).second) {
    log_warn("sample {} can't be used: {}", index, reason);
  }
  return std::nullopt;
}

Sample find_prototype(const SampleSource& source, Algorithm& algorithm, uint64_t seed, bool evaluating) {
  std::string first_reason;
  for (int64_t index = 0; index < source.size; ++index) {
    Sample sample = source.read(index);
    const std::string reason = algorithm.prepare(sample, sample_context(seed, 0, index, evaluating));
    if (reason.empty()) {
      return sample;
    }
    if (first_reason.empty()) {
      first_reason = reason;
    }
  }
  throw Error(ExitCode::kData, "none of the " + std::to_string(source.size) + " samples can be used; the first: " + first_reason,
              "check the loss masks: a sample needs two consecutive supervised tokens within data.max_length");
}

WindowLoader::WindowLoader(SampleSource source, Algorithm& algorithm, const BatchFields& fields, Options options)
    : source_(std::move(source)), algorithm_(algorithm), fields_(fields), options_(std::move(options)),
      order_(options_.seed, source_.size, options_.epochs) {
  thread_ = std::thread([this] { read_ahead(); });
}

WindowLoader::~WindowLoader() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

Unusable WindowLoader::unusable() const {
  const std::lock_guard lock(mutex_);
  return unusable_;
}

Window WindowLoader::make(int64_t number) {
  Window window;
  window.number = number;
  const int64_t position = options_.first_position + (number - options_.first_window) * options_.window.entries();
  for (int64_t micro_step = 0; micro_step < options_.window.accumulation_steps; ++micro_step) {
    std::vector<std::optional<Sample>> rows;
    for (const auto& entry : order_.rows(position, options_.window, micro_step, options_.rank)) {
      std::optional<Sample> sample;
      if (entry) {
        sample = read_prepared(source_, algorithm_, entry->sample,
                               sample_context(options_.seed, entry->epoch, entry->sample, false), met_);
      }
      if (sample) {
        ++window.samples;
        window.tokens += sample->tokens;
      }
      rows.push_back(std::move(sample));
    }
    Batch batch = fields_.stack(rows, options_.batch);
    window.positions += batch.rows * batch.tokens;
    algorithm_.finish(batch);
    window.denominators.push_back(algorithm_.weigh(batch));
    window.batches.push_back(std::move(batch));
  }
  const std::lock_guard lock(mutex_);
  if (unusable_.count != met_.count) {
    unusable_ = met_;
  }
  return window;
}

Window WindowLoader::dead(int64_t number) {
  Window window;
  window.number = number;
  for (int64_t micro_step = 0; micro_step < options_.window.accumulation_steps; ++micro_step) {
    Batch batch = fields_.stack(std::vector<std::optional<Sample>>(static_cast<size_t>(options_.window.batch_size)), options_.batch);
    algorithm_.finish(batch);
    window.denominators.push_back(algorithm_.weigh(batch));
    window.batches.push_back(std::move(batch));
  }
  return window;
}

void WindowLoader::read_ahead() {
  try {
    for (int64_t number = options_.first_window; number < options_.last_window; ++number) {
      Window window = make(number);
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stop_ || static_cast<int64_t>(ready_.size()) < options_.windows_ahead; });
      if (stop_) {
        return;
      }
      ready_.push_back(std::move(window));
      changed_.notify_all();
    }
  } catch (...) {
    const std::lock_guard lock(mutex_);
    failure_ = std::current_exception();
    changed_.notify_all();
  }
}

Window WindowLoader::next() {
  const auto start = std::chrono::steady_clock::now();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !ready_.empty() || failure_; });
  seconds_waited_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (ready_.empty()) {
    std::rethrow_exception(failure_);
  }
  Window window = std::move(ready_.front());
  ready_.pop_front();
  changed_.notify_all();
  return window;
}

std::optional<Window> WindowLoader::try_next() {
  const std::lock_guard lock(mutex_);
  if (ready_.empty()) {
    return std::nullopt;
  }
  Window window = std::move(ready_.front());
  ready_.pop_front();
  changed_.notify_all();
  return window;
}

}  // namespace sf
