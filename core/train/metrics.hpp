// core/train/metrics.hpp: what a run tells while it trains: a fixed-width line for people and metrics.jsonl for programs.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>

#include "sf/json.hpp"

namespace sf {

struct StepLine {
  int64_t step = 0, steps_total = 0;
  double loss = 0, gradient_norm = 0, learning_rate = 0;
  double acceptance_length = 0;      // of the training batches; 0: not measured
  double tokens_per_second = 0, seconds_left = 0;
  int64_t memory_bytes = 0;
};

/// `step 1200/2000  loss 1.842  accept 3.11  grad 0.74  lr 2.9e-04  41.2k tok/s  71.3 GiB  eta 12m`: same fields, order and width.
std::string step_line(const StepLine& line);

/// metrics.jsonl of a run: one object per line, flushed as it is written.
class MetricsFile {
 public:
  /// Keeps the lines up to `last_step` (a resumed run repeats what came after) and appends. Throws Error(kCheckpoint).
  MetricsFile(const std::filesystem::path& path, int64_t last_step);
  void write(const Json& line);

 private:
  std::filesystem::path path_;
  std::ofstream file_;
};

}  // namespace sf
