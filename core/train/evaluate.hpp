// core/train/evaluate.hpp: the draft on held-out features, and a bigram baseline measured the same way.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>

#include "core/train/session.hpp"

namespace sf {

struct Evaluation {
  double loss = 0;                          // sum of numerators / sum of denominators
  double acceptance_length = 0;             // engine.md section 5: 1 + leading hits, over every position that may start a block
  std::map<std::string, double> metrics;    // all metrics of the algorithm, by name
  int64_t samples = 0, unusable = 0;
  double seconds = 0;

  Json to_json() const;
};

/// Numerators over denominators, and counts as they are, by name.
std::map<std::string, double> ratios(const std::map<std::string, MetricSum>& metrics);

/// All samples in their order (the first `max_samples` when > 0), in batches of training.batch_size. Other state of the session is untouched.
/// Nothing when a stop was requested before the last batch. Throws LossNotFinite (core/train/soundness.hpp), and Error(kData) when none of them can be used.
std::optional<Evaluation> evaluate(Session& session, const SampleSource& source, const StepInfo& step, int64_t max_samples);

/// Each next token is the one that most often followed in the training text (the lowest of equals).
class BigramBaseline {
 public:
  explicit BigramBaseline(const FeatureStore& training);
  /// Acceptance length of greedy drafting with blocks of `block_size` (one known token, the rest drafted) over the held-out text.
  double acceptance_length(const FeatureStore& held_out, int64_t block_size, int64_t max_tokens, int64_t max_samples) const;

 private:
  std::unordered_map<int64_t, int64_t> next_;
};

}  // namespace sf
