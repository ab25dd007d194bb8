#include "plugins/algorithm/eagle3/unroll_rows.hpp"

#include <ATen/ATen.h>

#include <vector>

namespace sf {
namespace {

at::Tensor integers(const std::vector<int64_t>& values) { return at::tensor(at::ArrayRef<int64_t>(values), at::TensorOptions().dtype(at::kLong)); }
at::Tensor floats(const std::vector<float>& values) { return at::tensor(at::ArrayRef<float>(values), at::TensorOptions().dtype(at::kFloat)); }

}  // namespace

UnrollRows collect_unroll_rows(const at::Tensor& input_ids_bs, const at::Tensor& loss_mask_bs, const at::Tensor& counted_bs, int64_t uses,
                               int64_t multiple) {
  const int64_t b = input_ids_bs.size(0), s = input_ids_bs.size(1);
  const at::Tensor ids = input_ids_bs.contiguous(), mask = loss_mask_bs.to(at::kFloat).contiguous(), counted = counted_bs.to(at::kFloat).contiguous();
  const auto* id = ids.const_data_ptr<int64_t>();
  const auto* supervised = mask.const_data_ptr<float>();
  const auto* counts = counted.const_data_ptr<float>();

  std::vector<int64_t> base, position, teacher, label, chain_row, chain_place;
  std::vector<float> weight, chain_mask;
  for (int64_t row = 0; row < b; ++row) {
    const int64_t start = row * s;
    const auto is_supervised = [&](int64_t t) { return t < s && supervised[start + t] > 0.5F; };
    std::vector<int64_t> place(static_cast<size_t>(s), -1);  // of position j in the lists
    for (int64_t j = 0; j + 1 < s; ++j) {
      const bool is_counted = counts[start + j] > 0.5F;
      if (!is_counted && !(is_supervised(j + 1) && is_supervised(j + 2))) {
        continue;
      }
      place[static_cast<size_t>(j)] = static_cast<int64_t>(base.size());
      base.push_back(start + j);
      position.push_back(j);
      teacher.push_back(start + j + 1);
      weight.push_back(is_counted ? 1.0F : 0.0F);
      label.push_back(j + 2 < s ? id[start + j + 2] : -1);
    }
    for (int64_t a = 1; a + 1 < s; ++a) {
      if (!is_supervised(a) || !is_supervised(a + 1)) {
        continue;
      }
      bool goes_on = true;
      chain_place.push_back(start + a);
      for (int64_t k = 0; k < uses; ++k) {
        const int64_t j = a - 1 + k;
        goes_on = goes_on && is_supervised(a + 1 + k) && place[static_cast<size_t>(j)] >= 0;
        chain_row.push_back(goes_on ? place[static_cast<size_t>(j)] : 0);
        chain_mask.push_back(goes_on ? 1.0F : 0.0F);
      }
    }
  }
  while (base.empty() || static_cast<int64_t>(base.size()) % multiple != 0) {
    base.push_back(0);
    position.push_back(0);
    teacher.push_back(0);
    weight.push_back(0.0F);
    label.push_back(-1);
  }
  if (chain_row.empty()) {  // a usual shape for a batch without chains
    chain_row.assign(static_cast<size_t>(uses), 0);
    chain_mask.assign(static_cast<size_t>(uses), 0.0F);
    chain_place.assign(1, 0);
  }
  return {integers(base),   integers(position),
          integers(teacher), floats(weight),
          integers(label),  integers(chain_row).view({-1, uses}),
          floats(chain_mask).view({-1, uses}),
          integers(chain_place)};
}

}  // namespace sf
