#include "core/dist/comm_base.hpp"

#include <ATen/ATen.h>

namespace sf {

std::string RankComm::count(const char* kind, std::string_view label) {
  std::string name = std::string(kind) + " " + std::string(label);
  ++counts_[name];
  return name;
}

void check_parts(const at::Tensor& whole, const at::Tensor& part, int64_t ranks, const std::string& label, bool may_be_wide) {
  SF_CHECK(whole.is_contiguous() && part.is_contiguous(), "{}: tensors of a collective are contiguous", label);
  const bool is_wider = may_be_wide && whole.scalar_type() == at::kBFloat16 && part.scalar_type() == at::kFloat;
  SF_CHECK(is_wider || whole.scalar_type() == part.scalar_type(), "{}: whole is {}, part is {}", label, c10::toString(whole.scalar_type()),
           c10::toString(part.scalar_type()));
  SF_CHECK(whole.numel() == part.numel() * ranks, "{}: whole has {} elements, part {}, in {} ranks", label, whole.numel(), part.numel(), ranks);
}

}  // namespace sf
