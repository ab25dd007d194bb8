// plugins/sharding/fsdp1/flat_buffers.hpp: whole parameters as views of one flat buffer for each group. A gather writes into it and nothing is copied; its
// memory is taken when the gather starts and given back with the group, so addresses change from window to window.
#pragma once

#include <cstdint>
#include <vector>

#include "plugins/sharding/fsdp/grouped_sharding.hpp"

namespace sf::fsdp {

class FlatBuffers final : public WholeParameters {
 public:
  FlatBuffers(std::vector<GroupParts> groups, const Placement& placement);

  at::Tensor tensor(int64_t group, int64_t member) override { return groups_[static_cast<size_t>(group)].whole[static_cast<size_t>(member)]; }
  void start(int64_t group) override;
  int64_t finish(int64_t group) override;
  void discard(int64_t group) override;
  void give_back(int64_t group) override;
  void plan(const std::vector<std::vector<Span>>&) override {}
  int64_t bytes() const override;

  static Settings::WholeMemory memory(const std::vector<std::vector<Extent>>& groups, const std::vector<Layout>& layouts,
                                      const std::vector<std::vector<Span>>& spans, Mode mode, int64_t element_bytes);

 private:
  struct Buffer {
    GroupParts parts;
    at::Tensor flat;                     // [ranks * part]; without memory while the group is given back
    std::vector<at::Tensor> whole;       // by member, views of it
  };
  std::vector<Buffer> groups_;
  Comm* comm_;
  std::unique_ptr<CommWork> work_;
};

}  // namespace sf::fsdp
