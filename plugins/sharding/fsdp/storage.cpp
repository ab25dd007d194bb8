#include "plugins/sharding/fsdp/storage.hpp"

#include <ATen/ATen.h>

namespace sf::fsdp {

at::Tensor alias(const at::Tensor& storage, int64_t offset, at::IntArrayRef sizes) {
  at::NoGradGuard no_grad;
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t d = sizes.size(); d-- > 1;) {
    strides[d - 1] = strides[d] * std::max<int64_t>(1, sizes[d]);
  }
  at::Tensor made = at::empty({0}, storage.options());
  made.set_(storage.storage(), storage.storage_offset() + offset, sizes, strides);
  return made;
}

void point_at(const at::Storage& storage, const at::Tensor& memory, int64_t offset, int64_t bytes) {
  c10::StorageImpl* target = storage.unsafeGetStorageImpl();
  auto* kept = new at::Tensor(memory);  // the storage's own reference, dropped with its data pointer
  char* place = static_cast<char*>(memory.data_ptr()) + offset;
  target->set_data_ptr_noswap(
      at::DataPtr(place, kept, [](void* tensor) { delete static_cast<at::Tensor*>(tensor); }, memory.device()));
  target->set_nbytes(static_cast<size_t>(bytes));
}

void release(const at::Storage& storage) {
  c10::StorageImpl* target = storage.unsafeGetStorageImpl();
  target->set_data_ptr_noswap(at::DataPtr(nullptr, target->device()));
  target->set_nbytes(size_t{0});
}

}  // namespace sf::fsdp
