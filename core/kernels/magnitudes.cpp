#include "core/kernels/magnitudes.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <mutex>
#include <vector>

namespace sf {
namespace {

constexpr int64_t kAtOnce = 64;  // zeros that one small kernel makes

struct Known {
  c10::weak_intrusive_ptr<c10::StorageImpl> memory;  // the address alone could have gone to another tensor
  int64_t count = 0;
  uint32_t version = 0;
  at::Tensor magnitude;
};

struct Book {
  std::mutex mutex;
  bool is_wanted = false;
  std::vector<Known> known;
  at::Tensor zeros;
  int64_t used = 0;
};

Book& book() {
  static auto* one = new Book();  // never destroyed: CUDA may be gone by then
  return *one;
}

}  // namespace

at::Tensor open_magnitude(const at::Tensor& like) {
  Book& all = book();
  const std::lock_guard lock(all.mutex);
  if (!all.is_wanted) {
    return {};
  }
  if (!all.zeros.defined() || all.used == kAtOnce || all.zeros.device() != like.device()) {
    all.zeros = at::zeros({kAtOnce}, like.options().dtype(at::kFloat));
    all.used = 0;
  }
  return all.zeros.select(0, all.used++);
}

void note_magnitude(const at::Tensor& tensor, const at::Tensor& magnitude) {
  if (!magnitude.defined()) {
    return;
  }
  Book& all = book();
  const std::lock_guard lock(all.mutex);
  all.known.push_back({tensor.storage().getWeakStorageImpl(), tensor.numel(), static_cast<uint32_t>(tensor._version()), magnitude});
}

at::Tensor known_magnitude(const at::Tensor& tensor) {
  Book& all = book();
  const std::lock_guard lock(all.mutex);
  all.is_wanted = true;
  const c10::StorageImpl* memory = tensor.storage().unsafeGetStorageImpl();
  const auto found = std::find_if(all.known.rbegin(), all.known.rend(), [&](const Known& known) {
    return known.memory._unsafe_get_target() == memory && !known.memory.expired() && known.count == tensor.numel() && known.version == static_cast<uint32_t>(tensor._version());
  });
  return found == all.known.rend() ? at::Tensor() : found->magnitude;
}

void forget_magnitudes() {
  Book& all = book();
  const std::lock_guard lock(all.mutex);
  all.known.clear();
  all.zeros = at::Tensor();
  all.used = 0;
}

}  // namespace sf
