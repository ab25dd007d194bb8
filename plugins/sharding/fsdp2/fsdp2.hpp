// plugins/sharding/fsdp2: one shard for each parameter along its first dimension, uneven sizes padded; whole parameters in slots at fixed addresses;
// reductions through a ring of buffers; the target's frozen tables cut as well when asked for.
#pragma once

#include <cstdint>
#include <string>

#include "plugins/sharding/fsdp/grouped_sharding.hpp"

namespace sf::fsdp {

struct Fsdp2Options {
  std::string fsdp_sharding = "SHARD_GRAD_OP";
  std::string reduce_dtype = "bfloat16";
  bool shard_frozen_tables = false;
  int64_t reduce_scatter_max_input_buffers = 1;
  bool separate_reduce_scatter_group = false;
};

[[nodiscard]] Settings fsdp2_settings(const Fsdp2Options& options);

}  // namespace sf::fsdp
