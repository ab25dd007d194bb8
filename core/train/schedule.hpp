// core/train/schedule.hpp: the learning rate of each optimizer update. No LibTorch.
#pragma once

#include <cstdint>
#include <string>

namespace sf {

/// warm = int(warmup_ratio * total). Update u (0-based) < warm: base * (u + 1) / warm. Then, with T = total - warm and n = u - warm:
///   cosine             base * (1 + cos(pi * n / T)) / 2
///   cosine_reference   the reference's recursion lr *= (1 + cos(pi n / T)) / (1 + cos(pi (n - 1) / T)) from n = 0 on, which overshoots base
///                      once by 1 / c(1); needs T >= 3
///   constant           base
class LearningRate {
 public:
  /// Throws Error(kUsage) when the schedule does not fit the number of updates.
  LearningRate(std::string kind, double base, double warmup_ratio, int64_t total);
  /// The rate that update u uses. u >= total gives the last rate.
  double at(int64_t update) const;
  int64_t warm() const { return warm_; }

 private:
  std::string kind_;
  double base_ = 0;
  int64_t total_ = 0, warm_ = 0;
};

}  // namespace sf
