#include "core/train/schedule.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "sf/error.hpp"

namespace sf {

LearningRate::LearningRate(std::string kind, double base, double warmup_ratio, int64_t total)
    : kind_(std::move(kind)), base_(base), total_(total), warm_(static_cast<int64_t>(warmup_ratio * static_cast<double>(total))) {
  if (total < 1) {
    throw Error(ExitCode::kUsage, "the run has " + std::to_string(total) + " optimizer updates",
                "give more samples or epochs, or set training.max_steps");
  }
  if (warm_ >= total && kind_ != "constant") {
    throw Error(ExitCode::kUsage, "training.warmup_ratio = " + std::to_string(warmup_ratio) + " leaves no update after warm-up out of " +
                                      std::to_string(total),
                "lower training.warmup_ratio, or train longer");
  }
  if (kind_ == "cosine_reference" && total - warm_ < 3) {
    throw Error(ExitCode::kUsage, "lr_scheduler \"cosine_reference\" needs 3 updates after warm-up, found " + std::to_string(total - warm_) +
                                      " (it divides by zero or doubles the rate)",
                "use lr_scheduler = \"cosine\", or train longer");
  }
}

double LearningRate::at(int64_t update) const {
  const int64_t u = std::min(update, total_ - 1);
  if (u < warm_) {
    return base_ * static_cast<double>(u + 1) / static_cast<double>(warm_);
  }
  if (kind_ == "constant") {
    return base_;
  }
  const double t = static_cast<double>(total_ - warm_);
  const auto c = [&](double n) { return (1.0 + std::cos(std::numbers::pi * n / t)) / 2.0; };
  const double n = static_cast<double>(u - warm_);
  return kind_ == "cosine_reference" ? base_ * c(n) / c(1.0) : base_ * c(n);
}

}  // namespace sf
