#include "plugins/sharding/fsdp/use_plan.hpp"

#include <algorithm>

#include "sf/error.hpp"

namespace sf::fsdp {

UsePlan::UsePlan(std::vector<int64_t> group_of_unit) : group_of_unit_(std::move(group_of_unit)) {}

void UsePlan::learn(Phase phase, const std::vector<int64_t>& order) {
  Sequence found;
  found.units = order;
  const auto length = static_cast<int64_t>(order.size());
  if (phase != Phase::evaluate) {
    found.units.insert(found.units.end(), order.rbegin(), order.rend());
  }
  int64_t groups = 0;
  for (const int64_t group : group_of_unit_) {
    groups = std::max(groups, group + 1);
  }
  found.spans.resize(static_cast<size_t>(groups));
  for (int64_t position = 0; position < static_cast<int64_t>(found.units.size()); ++position) {
    const int64_t group = group_of_unit_[static_cast<size_t>(found.units[static_cast<size_t>(position)])];
    found.groups.push_back(group);
    auto& spans = found.spans[static_cast<size_t>(group)];
    // Within a pass a group stays whole from its first use to its last. What ends the forward pass begins the backward pass: one span.
    const bool is_same_pass = !spans.empty() && (spans.back().last < length) == (position < length);
    if (is_same_pass || (!spans.empty() && position == length && spans.back().last == length - 1)) {
      spans.back().last = position;
    } else {
      spans.push_back({position, position});
    }
  }
  // From the end on, then from the beginning: which groups come before one that is not whole throughout ends the search.
  const auto end = static_cast<int64_t>(found.groups.size());
  const auto is_throughout = [&](int64_t group) {
    const auto& spans = found.spans[static_cast<size_t>(group)];
    return spans.size() == 1 && spans[0].first == 0 && spans[0].last == end - 1;
  };
  const auto first_other = [&](auto begin, auto stop) {
    const auto other = std::find_if(begin, stop, [&](int64_t group) { return !is_throughout(group); });
    return other == stop ? int64_t{-1} : *other;
  };
  const int64_t begins = first_other(found.groups.begin(), found.groups.end()), ends = first_other(found.groups.rbegin(), found.groups.rend());
  for (int64_t group = 0; group < groups; ++group) {
    found.stays.push_back(is_throughout(group) || (group == begins && group == ends));
  }
  (phase == Phase::evaluate ? evaluated_ : training_) = std::move(found);
}

int64_t UsePlan::advance(int64_t unit, Phase phase) {
  Sequence& known = phase == Phase::evaluate ? evaluated_ : training_;
  if (known.units.empty()) {
    return -1;
  }
  const int64_t position = known.at;
  if (known.units[static_cast<size_t>(position)] != unit) {
    throw Error(ExitCode::kInternal, "unit " + std::to_string(unit) + " is used where the plan has unit " +
                                         std::to_string(known.units[static_cast<size_t>(position)]) + " (position " +
                                         std::to_string(position) + ")");
  }
  known.at = (position + 1) % static_cast<int64_t>(known.units.size());
  return position;
}

void UsePlan::restart() { training_.at = evaluated_.at = 0; }

bool UsePlan::is_last(Phase phase, int64_t position) const {
  const Sequence& known = sequence(phase);
  if (position < 0) {
    return false;
  }
  const auto group = static_cast<size_t>(known.groups[static_cast<size_t>(position)]);
  const auto& spans = known.spans[group];
  return std::any_of(spans.begin(), spans.end(), [&](const Span& span) { return span.last == position && !(known.stays[group] && &span == &spans.back()); });
}

int64_t UsePlan::next(Phase phase, int64_t position, const std::function<bool(int64_t)>& is_wanted) const {
  const Sequence& known = sequence(phase);
  if (position >= 0) {
    for (size_t after = static_cast<size_t>(position) + 1; after < known.groups.size(); ++after) {
      if (is_wanted(known.groups[after])) {
        return known.groups[after];
      }
    }
  }
  return -1;
}

int64_t UsePlan::next_span(Phase phase, int64_t position) const {
  const Sequence& known = sequence(phase);
  int64_t found = -1, begins = 0;
  for (size_t group = 0; position >= 0 && group < known.spans.size(); ++group) {
    for (const Span& span : known.spans[group]) {
      if (span.first > position && (found < 0 || span.first < begins)) {
        found = static_cast<int64_t>(group);
        begins = span.first;
      }
    }
  }
  return found;
}

std::vector<std::vector<Span>> with_gathers(const std::vector<std::vector<Span>>& spans) {
  std::vector<int64_t> begins;
  for (const auto& of_group : spans) {
    for (const Span& span : of_group) {
      begins.push_back(span.first);
    }
  }
  std::sort(begins.begin(), begins.end());
  std::vector<std::vector<Span>> longer = spans;
  for (auto& of_group : longer) {
    for (Span& span : of_group) {
      const auto own = std::lower_bound(begins.begin(), begins.end(), span.first);
      span.first = own == begins.begin() ? span.first : *(own - 1);
    }
  }
  return longer;
}

std::vector<int64_t> share_slots(const std::vector<std::vector<Span>>& spans) {
  const auto overlap = [&](size_t a, size_t b) {
    for (const Span& one : spans[a]) {
      for (const Span& other : spans[b]) {
        if (one.first <= other.last && other.first <= one.last) {
          return true;
        }
      }
    }
    return spans[a].empty() || spans[b].empty();
  };
  std::vector<int64_t> slots;
  for (size_t group = 0; group < spans.size(); ++group) {
    int64_t slot = 0;
    for (bool is_free = false; !is_free; slot += is_free ? 0 : 1) {
      is_free = true;
      for (size_t other = 0; other < group; ++other) {
        is_free = is_free && !(slots[other] == slot && overlap(group, other));
      }
    }
    slots.push_back(slot);
  }
  return slots;
}

}  // namespace sf::fsdp
