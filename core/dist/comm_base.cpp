#include "core/dist/comm_base.hpp"

#include <ATen/ATen.h>

#include <algorithm>

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

void check_runs(const std::vector<PartRun>& runs, int64_t whole, int64_t part, int64_t rank, at::ScalarType type, const std::string& label) {
  for (const PartRun& run : runs) {
    SF_CHECK(run.memory.is_contiguous() && run.memory.scalar_type() == type, "{}: a run is contiguous and of {}", label, c10::toString(type));
    const int64_t end = run.place + run.memory.numel(), of = run.place / std::max<int64_t>(1, part);
    SF_CHECK(run.place >= 0 && end <= whole && end <= (of + 1) * part && (rank < 0 || of == rank),
             "{}: a run of {} elements at {} is not of {} part of {} elements", label, run.memory.numel(), run.place, rank < 0 ? std::string("one") : format("rank {}'s", rank), part);
  }
}

namespace {

std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>> both_sides(const std::vector<PartRun>& runs, const at::Tensor& whole) {
  std::vector<at::Tensor> memory, places;
  for (const PartRun& run : runs) {
    memory.push_back(run.memory.view({-1}));
    places.push_back(whole.narrow(0, run.place, run.memory.numel()));
  }
  return {std::move(memory), std::move(places)};
}

}  // namespace

// Through aliases: whoever gave the memory counts its versions.
void copy_to_runs(const std::vector<PartRun>& runs, const at::Tensor& whole) {
  at::AutoDispatchBelowADInplaceOrView raw;
  if (const auto [memory, places] = both_sides(runs, whole); !memory.empty()) {
    at::_foreach_copy_(memory, places);
  }
}

void copy_from_runs(const at::Tensor& whole, const std::vector<PartRun>& runs) {
  at::AutoDispatchBelowADInplaceOrView raw;
  if (const auto [memory, places] = both_sides(runs, whole); !memory.empty()) {
    at::_foreach_copy_(places, memory);
  }
}

}  // namespace sf
