// plugins/sharding/fsdp2/slots.hpp: whole parameters at fixed addresses. A gather of a group brings the parts of all ranks to its slot, through one buffer where
// ranks don't copy from each other.
//
// SHARD_GRAD_OP: a slot for each group, which nothing uses until its gather is through.
// FULL_SHARD: a slot for each group until the plan of uses is known, then groups share slots. Where there is no buffer, they share one when their spans of use, with the
// gathers ahead of them, never overlap: two blocks in a row have two slots. Else when their uses alone never overlap: then all blocks have one, and what is gathered
// ahead waits in the buffer. Either way there is room for one group more than is in use. A slot that is in use when a gather begins, in an evaluation of another order, is
// gone around by the buffer. A group has one slot for forward and backward: saved tensors of the local graphs point into it.
//
// What a transform's codec carries has no place in a slot: in a window its rows are gathered encoded, once, in one collective with the rest of its group, and the
// codec decodes them to where its products read. The whole parameter has memory in evaluations alone, which gather it as it is.
#pragma once

#include <cstdint>
#include <vector>

#include "plugins/sharding/fsdp/grouped_sharding.hpp"

namespace sf::fsdp {

class Slots final : public WholeParameters {
 public:
  /// `codec` may be null; else it has been built and outlives this.
  Slots(std::vector<GroupParts> groups, const Placement& placement, GatherCodec* codec = nullptr);

  at::Tensor tensor(int64_t group, int64_t member) override { return groups_[static_cast<size_t>(group)].whole[static_cast<size_t>(member)]; }
  void start(int64_t group) override;
  int64_t finish(int64_t group) override;
  void discard(int64_t group) override;
  void give_back(int64_t group) override;
  void begin_window() override;
  void begin_evaluation() override { is_evaluating_ = true; }
  void plan(const std::vector<std::vector<Span>>& spans) override;
  int64_t bytes() const override;

  /// Elements of a slot: the parameters one after the other.
  static int64_t slot_elements(const std::vector<Extent>& members);
  static Settings::WholeMemory memory(const std::vector<std::vector<Extent>>& groups, const std::vector<Layout>& layouts,
                                      const std::vector<std::vector<Span>>& spans, Mode mode, int64_t element_bytes);

 private:
  // A parameter that the codec carries.
  struct Carried {
    std::pair<int64_t, int64_t> id;      // unit, and parameter of it
    at::Tensor part;                     // this rank's rows [r, columns]
    at::Tensor own;                      // their place in this rank's payload: uint8 [r, row bytes]
    std::vector<at::Tensor> rows;        // of each rank, in the gather buffer
    std::vector<int64_t> row_begin;      // of these
  };
  struct Slot {
    GroupParts parts;
    at::Tensor memory;                   // of the group until slots are shared, then the shared one
    int64_t slot = 0;                    // number of the slot
    std::vector<at::Tensor> whole;       // by member
    std::vector<PartRun> runs;           // where the gathered pieces go
    std::vector<at::Tensor> from, to;    // the same as copies from the gather buffer, once there is one
    // With a codec. A payload is what is gathered as it is, then what is carried.
    std::vector<Carried> carried;
    at::Tensor whole_carried;            // [all of their elements]; has memory while an evaluation uses the group
    at::Tensor payload;                  // uint8, of this rank
    int64_t plain_bytes = 0;             // of it
    std::vector<at::Tensor> plain_part, plain_payload;                       // copies into the payload
    std::vector<at::Tensor> from_payload, from_plain, to_plain;              // copies to the slot, out of whole payloads and of their first parts
    bool is_encoded = false, is_decoded = false;                             // in this window
  };
  void make_buffer();
  void plan_payload(Slot& slot, int64_t rank);
  void encode(Slot& slot);
  [[nodiscard]] bool is_coded(const Slot& slot) const { return !slot.carried.empty() && !is_evaluating_; }

  std::vector<Slot> groups_;
  std::vector<int64_t> holder_;          // by slot: the group whose values are in it, -1 for none
  Comm* comm_;
  GatherCodec* codec_;
  at::TensorOptions of_model_;
  bool is_evaluating_ = false;
  int64_t largest_ = 0;                  // elements of a group's gather
  at::Tensor gathered_;                  // [largest_]; undefined until something has to come through it
  std::unique_ptr<CommWork> work_;
  bool comes_straight_ = false;          // what is under way
};

}  // namespace sf::fsdp
