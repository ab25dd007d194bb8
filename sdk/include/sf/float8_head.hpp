// sf/float8_head.hpp: the service "sf.float8-head/1": products with the target's frozen head in float8, a scale for each row of either factor. For transforms.
#pragma once

#include <cstdint>

namespace sf {

class Float8Heads {
 public:
  /// From now on, in training: logits and the gradient of the rows that they are made of. Evaluations stay as they are, and report how far the float8 logits of
  /// some of their rows are from the others: the metrics "fp8/head/argmax_agreement" and "fp8/head/nll_difference". [main]
  virtual void use(bool emulate) = 0;
  /// Products made so far.
  [[nodiscard]] virtual int64_t products() const = 0;

 protected:
  ~Float8Heads() = default;
};

inline constexpr const char* kFloat8HeadsService = "sf.float8-head/1";

}  // namespace sf
