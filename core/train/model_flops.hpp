// core/train/model_flops.hpp: what the model asks of the machine, in FLOP: products of trained weights and their gradients, the target's head, attention.
// Counted where a unit calls them, so an algorithm that is new is counted, too. What recomputation or a kernel's way of doing it adds is not the model's.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "sf/unit.hpp"

namespace sf {

struct ModelFlops {
  double products = 0;    // of linear(): 2 x rows x in x out, and as much for the weight's gradient when it is trained and for the input's when it wants one
  double head = 0;        // over the vocabulary: 4 (frozen) or 6 (trained) x rows x columns x vocabulary while a gradient is formed, 2 without
  double attention = 0;   // 4 for each pair of a row and a key that it sees and element of a head, 8 more for gradients
  [[nodiscard]] double all() const { return products + head + attention; }
};

class FlopCount {
 public:
  FlopCount();
  ~FlopCount();
  FlopCount(const FlopCount&) = delete;
  FlopCount& operator=(const FlopCount&) = delete;

  /// The unit, counted; lives as long as this does.
  [[nodiscard]] Unit& counted(Unit& unit);
  /// Forward passes count from here to stop(). Costs some small operations on the device for each attention.
  void start();
  void stop() { is_counting_ = false; }
  /// Reads the device.
  [[nodiscard]] ModelFlops read() const;

 private:
  class CountedUnit;
  class CountedContext;
  class CountedOps;

  bool is_counting_ = false;
  ModelFlops sum_;
  std::vector<std::pair<at::Tensor, double>> pairs_;   // seen by attention, on the device; FLOP of each
  std::vector<std::unique_ptr<CountedUnit>> units_;
};

}  // namespace sf
