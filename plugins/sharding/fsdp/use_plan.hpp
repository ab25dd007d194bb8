// plugins/sharding/fsdp/use_plan.hpp: where a micro-step is in the known order of uses, and what follows from it: when a group is used for the
// last time, which one comes next, which never overlap.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "sf/unit.hpp"

namespace sf::fsdp {

/// Uses at positions [first, last] of a sequence, during which a group stays whole.
struct Span {
  int64_t first = 0, last = 0;
};

class UsePlan {
 public:
  UsePlan() = default;
  explicit UsePlan(std::vector<int64_t> group_of_unit);

  /// The order of units of a forward pass (backward is its reverse), or of an evaluated batch.
  void learn(Phase phase, const std::vector<int64_t>& order);
  [[nodiscard]] bool is_known(Phase phase) const { return !sequence(phase).groups.empty(); }

  /// The unit is about to be used: its position in the sequence of its phase, -1 while that is unknown. Forward and backward are one sequence.
  /// Throws Error(kInternal) when the plan has another unit here.
  int64_t advance(int64_t unit, Phase phase);
  /// A micro-step was given up.
  void restart();

  /// The use at `position` ends a span of its group, which may be given back. What a micro-step or batch ends with does not end there when the next one begins with it:
  /// when between the two there are uses alone of groups that are whole in all of it.
  [[nodiscard]] bool is_last(Phase phase, int64_t position) const;
  /// The first group used after `position` for which `is_wanted`; -1 when there is none.
  [[nodiscard]] int64_t next(Phase phase, int64_t position, const std::function<bool(int64_t group)>& is_wanted) const;
  /// The group whose span is the first to begin after `position`; -1 when none does. It may be whole now and given back before.
  [[nodiscard]] int64_t next_span(Phase phase, int64_t position) const;
  /// Spans of each group in a micro-step: one for each pass; one for both when the second follows at once on the first.
  [[nodiscard]] const std::vector<std::vector<Span>>& spans() const { return training_.spans; }

 private:
  struct Sequence {
    std::vector<int64_t> units, groups;       // by position
    std::vector<std::vector<Span>> spans;     // by group
    std::vector<bool> stays;                  // by group: from its last use to its first in the next micro-step or batch
    int64_t at = 0;
  };
  [[nodiscard]] const Sequence& sequence(Phase phase) const { return phase == Phase::evaluate ? evaluated_ : training_; }

  std::vector<int64_t> group_of_unit_;
  Sequence training_, evaluated_;
};

/// Spans that begin where the gather for them may, one group ahead: at the use that begins the span before, over all groups.
[[nodiscard]] std::vector<std::vector<Span>> with_gathers(const std::vector<std::vector<Span>>& spans);

/// Slots for groups so that two share one only when their spans never overlap: the slot of each group, numbered from 0. Groups that are never
/// used get one of their own.
[[nodiscard]] std::vector<int64_t> share_slots(const std::vector<std::vector<Span>>& spans);

}  // namespace sf::fsdp
