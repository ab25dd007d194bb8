// core/kernels/ops.hpp: the operations of sf/ops.hpp as ATen compositions. They run wherever their tensors are and are the oracle of
// faster kernels.
#pragma once

#include "sf/ops.hpp"

namespace sf {

/// Lives as long as the process.
Ops& cpu_ops();

}  // namespace sf
