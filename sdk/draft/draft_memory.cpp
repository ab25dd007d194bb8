#include "sdk/draft/draft_memory.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <vector>

namespace sf::draft {

void put_rows(DraftMemory& memory, const std::string& name, const at::Tensor& rows, const SeenTokens& seen) {
  const int64_t b = rows.size(0), t = rows.size(1);
  // Junk rows of a sequence that is nearly full stand behind its last place.
  const int64_t wanted = seen.starts_b.max().item<int64_t>() + t;
  at::Tensor& kept = memory.tensors[name];
  if (!kept.defined() || kept.size(1) < wanted) {
    std::vector<int64_t> shape = rows.sizes().vec();
    shape[1] = std::max(wanted, seen.room_tokens);
    at::Tensor larger = at::zeros(shape, rows.options());
    if (kept.defined()) {
      larger.narrow(1, 0, kept.size(1)).copy_(kept);
    }
    kept = larger;
  }
  const int64_t c = kept.size(1);
  const auto integers = seen.starts_b.options();
  const at::Tensor first_b = at::add(at::mul(at::arange(b, integers), c), seen.starts_b);
  const at::Tensor places = at::add(first_b.unsqueeze(1), at::arange(t, integers)).view({b * t}).to(rows.device());
  kept.flatten(0, 1).index_copy_(0, places, rows.flatten(0, 1));
}

at::Tensor last_rows(const at::Tensor& rows, const at::Tensor& counts_b) {
  const int64_t b = rows.size(0), t = rows.size(1);
  const at::Tensor places = at::sub(at::add(at::mul(at::arange(b, counts_b.options()), t), counts_b), 1).to(rows.device());
  return rows.flatten(0, 1).index_select(0, places);
}

}  // namespace sf::draft
