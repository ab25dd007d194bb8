// plugins/sharding/fsdp2/slots.hpp: whole parameters at fixed addresses. A gather brings the parts of all ranks into one buffer; from there each
// parameter's rows are copied to its slot. That buffer is what a prefetch needs beside the slot in use.
//
// SHARD_GRAD_OP: a slot for each group. FULL_SHARD: the same until the plan of uses is known, then groups share slots when their spans of use never
// overlap. A group has one slot for forward and backward: saved tensors of the local graphs point into it.
#pragma once

#include <cstdint>
#include <vector>

#include "plugins/sharding/fsdp/grouped_sharding.hpp"

namespace sf::fsdp {

class Slots final : public WholeParameters {
 public:
  Slots(std::vector<GroupParts> groups, const Placement& placement);

  at::Tensor tensor(int64_t group, int64_t member) override { return groups_[static_cast<size_t>(group)].whole[static_cast<size_t>(member)]; }
  void start(int64_t group) override;
  int64_t finish(int64_t group) override;
  void discard(int64_t group) override;
  void give_back(int64_t) override {}
  void plan(const std::vector<std::vector<Span>>& spans) override;
  int64_t bytes() const override;

  /// Elements of a slot: the parameters one after the other.
  static int64_t slot_elements(const std::vector<Extent>& members);
  static Settings::WholeMemory memory(const std::vector<std::vector<Extent>>& groups, const std::vector<Layout>& layouts,
                                      const std::vector<std::vector<Span>>& spans, Mode mode, int64_t element_bytes);

 private:
  struct Slot {
    GroupParts parts;
    at::Tensor memory;                   // of the group until slots are shared, then the shared one
    int64_t slot = 0;                    // number of the slot
    std::vector<at::Tensor> whole;       // by member
    std::vector<at::Tensor> from, to;    // copies from the gather buffer, by piece
  };
  std::vector<Slot> groups_;
  std::vector<int64_t> holder_;          // by slot: the group whose values are in it, -1 for none
  Comm* comm_;
  at::Tensor gathered_;                  // [largest group's buffer]
  std::unique_ptr<CommWork> work_;
};

}  // namespace sf::fsdp
