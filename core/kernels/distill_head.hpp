// core/kernels/distill_head.hpp: loss of a trainable head against a teacher's distribution, in row chunks; contract in sf/ops.hpp.
#pragma once

#include "sf/ops.hpp"

namespace sf {

DistillResult distill_head(const DistillHead& distill);

}  // namespace sf
