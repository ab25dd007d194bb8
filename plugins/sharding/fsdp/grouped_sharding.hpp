// plugins/sharding/fsdp/grouped_sharding.hpp: a sharding backend over shard groups: when a group is gathered, prefetched, given back and
// reduced. How it is cut and where its whole parameters live is the business of the two plugins (WholeParameters).
//
//   SHARD_GRAD_OP  a group is gathered at its first use in a window and stays whole until its gradients are reduced
//   FULL_SHARD     gathered for each pass of a micro-step and given back after its last use in it; what ends the forward pass stays for backward, and what ends
//                  a micro-step for the next one, if that begins with it
//   NO_SHARD       every rank holds everything; gradients are summed over the ranks
//
// With one rank everything is whole and nothing is communicated, whatever the mode.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "plugins/sharding/fsdp/frozen_tables.hpp"
#include "plugins/sharding/fsdp/layout.hpp"
#include "plugins/sharding/fsdp/reducer.hpp"
#include "plugins/sharding/fsdp/use_plan.hpp"
#include "sf/backend.hpp"
#include "sf/transform.hpp"

namespace sf::fsdp {

/// A shard group as its whole parameters' home sees it.
struct GroupParts {
  std::string name;
  std::vector<std::vector<int64_t>> shapes;   // of the members, in the order of the layout
  std::vector<std::pair<int64_t, int64_t>> ids;  // likewise: unit, and parameter of it
  Layout layout;
  at::Tensor part;                            // [layout.part], this rank's values; always there
};

/// Where whole parameters live while a group is in use. All calls are about groups cut over more than one rank.
class WholeParameters {
 public:
  virtual ~WholeParameters() = default;
  [[nodiscard]] virtual at::Tensor tensor(int64_t group, int64_t member) = 0;
  /// Issues the gather. At most one is under way.
  virtual void start(int64_t group) = 0;
  /// The current stream has the whole parameters. The group that they pushed out of its place, -1 when none.
  virtual int64_t finish(int64_t group) = 0;
  /// The one under way is not wanted any more: waited for, and forgotten.
  virtual void discard(int64_t group) = 0;
  virtual void give_back(int64_t group) = 0;
  /// What is gathered from here on is used in a window, or in an evaluation. Nothing is whole or under way.
  virtual void begin_window() {}
  virtual void begin_evaluation() {}
  /// When groups are used in every micro-step from now on. Nothing is whole or under way.
  virtual void plan(const std::vector<std::vector<Span>>& spans) = 0;
  [[nodiscard]] virtual int64_t bytes() const = 0;
};

enum class Mode { shard_grad_op, full_shard, no_shard };
[[nodiscard]] Mode mode_of(const std::string& fsdp_sharding);

struct Settings {
  Mode mode = Mode::shard_grad_op;
  std::optional<at::ScalarType> reduce_dtype;      // nothing: the model's
  int64_t max_reduce_inputs = 1;
  bool separate_reduction_channel = false;
  bool shard_tables = false;
  Layout (*cut)(const std::vector<Extent>& members, int64_t ranks) = nullptr;
  bool cut_frozen_gradients = false;               // a group's gradients are cut like its parameters, with room for frozen ones
  /// `codec`: how some parameters travel; null: as they are.
  std::function<std::unique_ptr<WholeParameters>(std::vector<GroupParts> groups, const Placement& placement, GatherCodec* codec)> make_whole;
  /// Bytes of whole parameters at most in the first micro-step, and from then on; of gather buffers.
  struct WholeMemory {
    int64_t first = 0, later = 0, buffers = 0;
    std::string detail;
  };
  std::function<WholeMemory(const std::vector<std::vector<Extent>>& groups, const std::vector<Layout>& layouts,
                            const std::vector<std::vector<Span>>& spans, Mode mode, int64_t element_bytes)> whole_memory;
  std::function<void(const class GroupedSharding& built)> on_built;     // may be empty
  std::function<void(int64_t tables)> on_tables;                         // how many were cut; may be empty
};

class GroupedSharding final : public Sharding {
 public:
  explicit GroupedSharding(Settings settings) : settings_(std::move(settings)) {}

  void build(const std::vector<UnitSpec>& units, const Placement& placement) override;
  void take_codec(GatherCodec& codec) override { codec_ = &codec; }
  std::vector<Shard>& shards() override { return shards_; }
  void take_tables(const std::vector<at::Tensor>& tables) override;
  ShardingMemory memory(const std::vector<UnitSpec>& units, int64_t ranks, at::ScalarType dtype) const override;
  at::Tensor whole(int64_t unit, int64_t parameter) override;
  void plan(Phase phase, const std::vector<int64_t>& order) override;
  void begin_window() override;
  void begin_evaluation() override;
  void end_evaluation() override;
  void before_use(int64_t unit, Phase phase, int64_t uses_left) override;
  void after_use(int64_t unit, Phase phase, int64_t uses_left) override;
  void reduce(int64_t unit, const std::vector<at::Tensor>& gradients) override;
  std::vector<at::Tensor> end_window() override;
  at::Tensor gradient_norm(const std::vector<at::Tensor>& gradients) override;
  void abandon() override;

  /// Once built.
  [[nodiscard]] int64_t ranks() const { return ranks_; }
  [[nodiscard]] bool is_cut() const { return whole_ != nullptr; }
  [[nodiscard]] int64_t groups() const { return static_cast<int64_t>(groups_.size()); }
  [[nodiscard]] bool has_reduction_channel() const { return ranks_ > 1 && settings_.separate_reduction_channel; }
  [[nodiscard]] int64_t reduce_buffers() const { return reducer_ != nullptr ? reducer_->buffers() : 0; }
  /// Of all tensors that it holds now.
  [[nodiscard]] ShardingMemory held() const;

 private:
  struct Group {
    std::string name;
    std::vector<int64_t> members;         // indices into shards_
    std::vector<int64_t> reduced;         // those that the reduction carries, in the order of its layout
    std::vector<Own> own;                 // of `reduced`: where this rank's gradients lie in the reduced part
    int64_t units = 0;
    bool is_trainable = false;
    // of the window
    bool is_whole = false;
    int64_t units_done = 0;
    std::vector<at::Tensor> gradients;    // of `reduced`
  };

  void find_groups(const std::vector<UnitSpec>& units);
  void build_cut(const Placement& placement);
  void give_back(int64_t group);
  void discard_prefetch();
  void forget_window();

  Settings settings_;
  Comm* comm_ = nullptr;
  GatherCodec* codec_ = nullptr;
  int64_t ranks_ = 1;
  std::vector<Shard> shards_;
  std::vector<std::vector<int64_t>> index_;              // of shards_, by unit and parameter
  std::vector<int64_t> group_of_unit_;
  std::vector<std::pair<int64_t, int64_t>> place_;       // of each shard: group and member
  std::vector<Group> groups_;
  std::vector<at::Tensor> parts_;                        // by group
  std::unique_ptr<WholeParameters> whole_;               // null when nothing is cut
  std::unique_ptr<Reducer> reducer_;                     // null with one rank
  std::unique_ptr<FrozenTables> tables_;                 // null when they are not cut
  UsePlan plan_;
  int64_t position_ = -1;                                // of the use that is going on
  int64_t under_way_ = -1;                               // group being gathered ahead
  std::vector<at::Tensor> gradients_;                    // of shards_, of the window
};

}  // namespace sf::fsdp
