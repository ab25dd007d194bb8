// plugins/sharding/fsdp/storage.hpp: tensors over memory that moves or goes away. Saved tensors of a local graph may point to a whole parameter
// while its memory is shared or given back; writing it must not touch their version counters, or autograd refuses them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace sf::fsdp {

/// A tensor over part of the same storage with a version counter of its own. `storage` is allocated now, `offset` in elements.
[[nodiscard]] at::Tensor alias(const at::Tensor& storage, int64_t offset, at::IntArrayRef sizes);
/// All tensors over this storage now lie in `memory` (kept as long), from its byte `offset` on, with room for `bytes`.
void point_at(const at::Storage& storage, const at::Tensor& memory, int64_t offset, int64_t bytes);
/// The storage has no memory any more.
void release(const at::Storage& storage);

}  // namespace sf::fsdp
