#include "plugins/sharding/fsdp/grouped_sharding.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>

#include "sf/error.hpp"

namespace sf::fsdp {
namespace {

Extent extent_of(const std::vector<int64_t>& shape) {
  const int64_t rows = shape.empty() ? 1 : shape[0];
  int64_t row = 1;
  for (size_t d = 1; d < shape.size(); ++d) {
    row *= shape[d];
  }
  return {.rows = rows, .row_elements = row};
}

// Groups in the order in which units name them.
struct Grouping {
  std::vector<std::string> names;
  std::vector<int64_t> of_unit;
};

Grouping grouping_of(const std::vector<UnitSpec>& units) {
  Grouping found;
  std::map<std::string, int64_t> known;
  for (const UnitSpec& unit : units) {
    const auto [entry, is_new] = known.emplace(unit.shard_group, static_cast<int64_t>(found.names.size()));
    if (is_new) {
      found.names.push_back(unit.shard_group);
    }
    found.of_unit.push_back(entry->second);
  }
  return found;
}

}  // namespace

Mode mode_of(const std::string& fsdp_sharding) {
  return fsdp_sharding == "FULL_SHARD" ? Mode::full_shard : fsdp_sharding == "NO_SHARD" ? Mode::no_shard : Mode::shard_grad_op;
}

void GroupedSharding::find_groups(const std::vector<UnitSpec>& units) {
  const Grouping grouping = grouping_of(units);
  group_of_unit_ = grouping.of_unit;
  groups_.assign(grouping.names.size(), Group());
  shards_.clear();
  index_.assign(units.size(), {});
  place_.clear();
  for (size_t u = 0; u < units.size(); ++u) {
    Group& group = groups_[static_cast<size_t>(group_of_unit_[u])];
    group.name = grouping.names[static_cast<size_t>(group_of_unit_[u])];
    ++group.units;
    for (const ParameterSpec& parameter : units[u].parameters) {
      const auto shard = static_cast<int64_t>(shards_.size());
      index_[u].push_back(shard);
      place_.emplace_back(group_of_unit_[u], static_cast<int64_t>(group.members.size()));
      group.members.push_back(shard);
      group.is_trainable = group.is_trainable || parameter.trainable;
      shards_.push_back({.name = units[u].prefix + parameter.name, .global_shape = parameter.shape, .trainable = parameter.trainable});
    }
  }
  plan_ = UsePlan(group_of_unit_);
}

void GroupedSharding::build(const std::vector<UnitSpec>& units, const Placement& placement) {
  comm_ = placement.comm;
  ranks_ = comm_ != nullptr ? comm_->size() : 1;
  find_groups(units);
  const auto of_model = at::TensorOptions().device(placement.device).dtype(placement.dtype);
  const bool is_cut = ranks_ > 1 && settings_.mode != Mode::no_shard;
  if (ranks_ > 1 && settings_.separate_reduction_channel) {
    comm_->open_reduction_channel();
  }
  if (is_cut) {
    build_cut(placement);
  } else {
    for (Shard& shard : shards_) {
      shard.end = c10::multiply_integers(shard.global_shape);
      shard.is_saved = comm_ == nullptr || comm_->rank() == 0;
      shard.local = at::zeros(shard.global_shape, of_model);
    }
  }

  std::vector<Reducer::Group> reductions;
  for (Group& group : groups_) {
    std::vector<Extent> extents;
    for (const int64_t member : group.members) {
      const Shard& shard = shards_[static_cast<size_t>(member)];
      if (shard.trainable || (is_cut && settings_.cut_frozen_gradients && group.is_trainable)) {
        group.reduced.push_back(member);
        extents.push_back(extent_of(shard.global_shape));
      }
    }
    Layout layout = is_cut ? settings_.cut(extents, ranks_) : row_layout(extents, 1);
    group.own = is_cut ? own_of(layout, static_cast<int64_t>(extents.size()), comm_->rank()) : std::vector<Own>();
    reductions.push_back({.name = group.name, .layout = std::move(layout)});
  }
  if (ranks_ > 1) {
    reducer_ = std::make_unique<Reducer>(
        std::move(reductions),
        Reducer::Options{.comm = comm_,
                         .device = placement.device,
                         .dtype = settings_.reduce_dtype.value_or(placement.dtype),
                         .max_inputs = settings_.max_reduce_inputs,
                         .channel = settings_.separate_reduction_channel ? Channel::reduction : Channel::main,
                         .replicate = !is_cut});
  }
  gradients_.assign(shards_.size(), at::Tensor());
  if (settings_.on_built) {
    settings_.on_built(*this);
  }
}

void GroupedSharding::take_tables(const std::vector<at::Tensor>& tables) {
  if (!settings_.shard_tables || whole_ == nullptr) {
    return;
  }
  tables_ = std::make_unique<FrozenTables>(tables, *comm_);
  if (settings_.on_tables) {
    settings_.on_tables(tables_->count());
  }
}

void GroupedSharding::build_cut(const Placement& placement) {
  const auto of_model = at::TensorOptions().device(placement.device).dtype(placement.dtype);
  std::vector<GroupParts> parts;
  std::vector<std::pair<int64_t, int64_t>> ids;  // of each shard
  for (size_t u = 0; u < index_.size(); ++u) {
    for (size_t p = 0; p < index_[u].size(); ++p) {
      ids.emplace_back(static_cast<int64_t>(u), static_cast<int64_t>(p));
    }
  }
  for (const Group& group : groups_) {
    GroupParts made{.name = group.name, .shapes = {}, .ids = {}, .layout = {}, .part = {}};
    std::vector<Extent> extents;
    for (const int64_t member : group.members) {
      made.shapes.push_back(shards_[static_cast<size_t>(member)].global_shape);
      made.ids.push_back(ids[static_cast<size_t>(member)]);
      extents.push_back(extent_of(made.shapes.back()));
    }
    made.layout = settings_.cut(extents, ranks_);
    made.part = at::zeros({made.layout.part}, of_model);
    const std::vector<Own> own = own_of(made.layout, static_cast<int64_t>(extents.size()), comm_->rank());
    for (size_t m = 0; m < own.size(); ++m) {
      Shard& shard = shards_[static_cast<size_t>(group.members[m])];
      shard.begin = own[m].begin;
      shard.end = own[m].end;
      shard.local = made.part.narrow(0, own[m].place, shard.end - shard.begin).view(local_shape(shard.global_shape, shard.begin, shard.end));
    }
    if (made.layout.part > 0) {
      comm_->register_buffer(made.part);
    }
    parts_.push_back(made.part);
    parts.push_back(std::move(made));
  }
  whole_ = settings_.make_whole(std::move(parts), placement, codec_);
}

at::Tensor GroupedSharding::whole(int64_t unit, int64_t parameter) {
  const auto shard = static_cast<size_t>(index_[static_cast<size_t>(unit)][static_cast<size_t>(parameter)]);
  return whole_ != nullptr ? whole_->tensor(place_[shard].first, place_[shard].second) : shards_[shard].local;
}

void GroupedSharding::plan(Phase phase, const std::vector<int64_t>& order) {
  if (whole_ == nullptr) {
    return;
  }
  plan_.learn(phase, order);
  if (phase != Phase::evaluate && settings_.mode == Mode::full_shard) {
    discard_prefetch();
    for (int64_t group = 0; group < groups(); ++group) {
      give_back(group);
    }
    whole_->plan(plan_.spans());
  }
}

void GroupedSharding::give_back(int64_t group) {
  if (groups_[static_cast<size_t>(group)].is_whole) {
    groups_[static_cast<size_t>(group)].is_whole = false;
    whole_->give_back(group);
  }
}

void GroupedSharding::discard_prefetch() {
  if (under_way_ >= 0) {
    whole_->discard(under_way_);
    under_way_ = -1;
  }
}

// Parameters may have changed, or will: nothing is whole any more.
void GroupedSharding::forget_window() {
  if (whole_ != nullptr) {
    discard_prefetch();
    for (int64_t group = 0; group < groups(); ++group) {
      give_back(group);
    }
  }
  for (Group& group : groups_) {
    group.units_done = 0;
    group.gradients.assign(group.reduced.size(), at::Tensor());
  }
  plan_.restart();
  position_ = -1;
}

void GroupedSharding::begin_window() {
  forget_window();
  if (reducer_ != nullptr) {
    reducer_->drain();
  }
  gradients_.assign(shards_.size(), at::Tensor());
  if (whole_ != nullptr) {
    whole_->begin_window();
  }
  if (tables_ != nullptr) {
    tables_->gather();  // algorithms look tokens up before their first unit
  }
}

void GroupedSharding::begin_evaluation() {
  forget_window();
  if (whole_ != nullptr) {
    whole_->begin_evaluation();
  }
  if (tables_ != nullptr) {
    tables_->gather();
  }
}

void GroupedSharding::end_evaluation() {
  forget_window();
  if (tables_ != nullptr) {
    tables_->give_back();
  }
}

void GroupedSharding::before_use(int64_t unit, Phase phase, int64_t) {
  if (whole_ == nullptr) {
    return;
  }
  const int64_t group = group_of_unit_[static_cast<size_t>(unit)];
  position_ = plan_.advance(unit, phase);
  if (!groups_[static_cast<size_t>(group)].is_whole) {
    if (under_way_ != group) {
      discard_prefetch();
      whole_->start(group);
    }
    under_way_ = -1;
    const int64_t pushed_out = whole_->finish(group);
    if (pushed_out >= 0) {
      groups_[static_cast<size_t>(pushed_out)].is_whole = false;
    }
    groups_[static_cast<size_t>(group)].is_whole = true;
  }
  if (under_way_ < 0) {
    // After the wait, so that the unit that is about to run does not wait for the one after it.
    const auto is_missing = [&](int64_t next) { return !groups_[static_cast<size_t>(next)].is_whole; };
    const int64_t next = settings_.mode == Mode::full_shard ? plan_.next_span(phase, position_) : plan_.next(phase, position_, is_missing);
    if (next >= 0 && is_missing(next)) {
      under_way_ = next;
      whole_->start(next);
    }
  }
}

void GroupedSharding::after_use(int64_t unit, Phase phase, int64_t) {
  if (whole_ != nullptr && settings_.mode == Mode::full_shard && plan_.is_last(phase, position_)) {
    give_back(group_of_unit_[static_cast<size_t>(unit)]);
  }
}

void GroupedSharding::reduce(int64_t unit, const std::vector<at::Tensor>& gradients) {
  const int64_t number = group_of_unit_[static_cast<size_t>(unit)];
  Group& group = groups_[static_cast<size_t>(number)];
  const std::vector<int64_t>& indices = index_[static_cast<size_t>(unit)];
  for (size_t p = 0; p < gradients.size(); ++p) {
    const auto found = std::find(group.reduced.begin(), group.reduced.end(), indices[p]);
    if (found != group.reduced.end()) {
      group.gradients[static_cast<size_t>(found - group.reduced.begin())] = gradients[p];
    }
  }
  if (++group.units_done < group.units) {
    return;
  }
  if (whole_ != nullptr) {
    give_back(number);
  }
  if (reducer_ != nullptr && group.is_trainable) {
    reducer_->reduce(number, group.gradients);
  }
  for (size_t m = 0; m < group.reduced.size(); ++m) {
    if (!group.gradients[m].defined()) {
      continue;
    }
    const auto shard = static_cast<size_t>(group.reduced[m]);
    gradients_[shard] = group.gradients[m];
    if (whole_ != nullptr) {
      const Own& own = group.own[m];
      gradients_[shard] = reducer_->reduced(number).narrow(0, own.place, own.end - own.begin).view(shards_[shard].local.sizes());
    }
  }
  group.gradients.assign(group.reduced.size(), at::Tensor());
}

std::vector<at::Tensor> GroupedSharding::end_window() {
  if (reducer_ != nullptr) {
    reducer_->drain();
  }
  forget_window();
  if (tables_ != nullptr) {
    tables_->give_back();
  }
  return gradients_;
}

at::Tensor GroupedSharding::gradient_norm(const std::vector<at::Tensor>& gradients) {
  std::vector<at::Tensor> held;
  for (const at::Tensor& gradient : gradients) {
    if (gradient.defined() && gradient.numel() > 0) {
      held.push_back(gradient);
    }
  }
  const auto of_sum = shards_.front().local.options().dtype(at::kFloat);
  at::Tensor squares = at::zeros({}, of_sum);
  if (!held.empty()) {
    squares = at::stack(at::_foreach_norm(held, 2, at::kFloat)).square().sum();
  }
  if (whole_ != nullptr) {
    comm_->all_reduce(squares, Reduction::sum, "gradient norm")->wait();
  }
  return squares.sqrt();
}

void GroupedSharding::abandon() {
  if (reducer_ != nullptr) {
    reducer_->abandon();
  }
  for (Group& group : groups_) {
    group.units_done = 0;
    group.gradients.assign(group.reduced.size(), at::Tensor());
  }
  gradients_.assign(shards_.size(), at::Tensor());
  plan_.restart();
  position_ = -1;
}

ShardingMemory GroupedSharding::memory(const std::vector<UnitSpec>& units, int64_t ranks, at::ScalarType dtype) const {
  const auto element = static_cast<int64_t>(c10::elementSize(dtype));
  const at::ScalarType wire = settings_.reduce_dtype.value_or(dtype);
  const auto wire_element = static_cast<int64_t>(c10::elementSize(wire));
  const bool is_cut = ranks > 1 && settings_.mode != Mode::no_shard;
  const Grouping grouping = grouping_of(units);
  std::vector<std::vector<Extent>> members(grouping.names.size()), reduced(grouping.names.size());
  std::vector<std::vector<bool>> trainable(grouping.names.size());
  for (size_t u = 0; u < units.size(); ++u) {
    for (const ParameterSpec& parameter : units[u].parameters) {
      const auto group = static_cast<size_t>(grouping.of_unit[u]);
      members[group].push_back(extent_of(parameter.shape));
      trainable[group].push_back(parameter.trainable);
      if (parameter.trainable || (is_cut && settings_.cut_frozen_gradients)) {
        reduced[group].push_back(members[group].back());
      }
    }
  }
  ShardingMemory memory;
  std::vector<Layout> layouts;
  int64_t largest = 0, reducing = 0;
  for (size_t group = 0; group < members.size(); ++group) {
    layouts.push_back(is_cut ? settings_.cut(members[group], ranks) : row_layout(members[group], 1));
    int64_t own = layouts.back().part;
    if (!is_cut) {
      own = 0;
      for (const Extent& member : members[group]) {
        own += member.elements();
      }
    }
    memory.weights += own * element;
    if (std::find(trainable[group].begin(), trainable[group].end(), true) == trainable[group].end()) {
      continue;
    }
    const Layout reduction = is_cut ? settings_.cut(reduced[group], ranks) : row_layout(reduced[group], 1);
    largest = std::max(largest, reduction.elements());
    ++reducing;
    if (is_cut) {
      memory.buffers += reduction.part * 4;
    }
  }
  // Of the rank that holds most of what is trained.
  std::vector<int64_t> trained(static_cast<size_t>(is_cut ? ranks : 1), 0);
  for (size_t group = 0; group < members.size(); ++group) {
    for (size_t rank = 0; rank < trained.size(); ++rank) {
      const std::vector<Own> own = own_of(layouts[group], static_cast<int64_t>(members[group].size()), static_cast<int64_t>(rank));
      for (size_t m = 0; m < own.size(); ++m) {
        trained[rank] += trainable[group][m] ? own[m].end - own[m].begin : 0;
      }
    }
  }
  memory.trainable_elements = *std::max_element(trained.begin(), trained.end());
  if (ranks > 1) {
    memory.buffers += std::min(settings_.max_reduce_inputs, reducing) * largest * wire_element;
  }
  if (is_cut) {
    // Before the tape has seen a micro-step: units in the order of describe(), the last one ends the forward pass.
    UsePlan expected(grouping.of_unit);
    std::vector<int64_t> order;
    for (size_t u = 0; u < units.size(); ++u) {
      order.push_back(static_cast<int64_t>(u));
    }
    expected.learn(Phase::forward, order);
    const Settings::WholeMemory whole = settings_.whole_memory(members, layouts, expected.spans(), settings_.mode, element);
    memory.whole = whole.later;
    memory.buffers += whole.buffers;
    memory.shards_tables = settings_.shard_tables;
    memory.detail = "1/" + std::to_string(ranks) + " of each; " + whole.detail;
  } else {
    memory.detail = ranks > 1 ? "on each of " + std::to_string(ranks) + " ranks (NO_SHARD)" : "one rank, nothing to cut";
  }
  return memory;
}

ShardingMemory GroupedSharding::held() const {
  ShardingMemory held;
  for (const Shard& shard : shards_) {
    held.trainable_elements += shard.trainable ? shard.end - shard.begin : 0;
    held.weights += whole_ == nullptr ? static_cast<int64_t>(shard.local.nbytes()) : 0;
  }
  for (const at::Tensor& part : parts_) {
    held.weights += static_cast<int64_t>(part.nbytes());
  }
  held.whole = whole_ != nullptr ? whole_->bytes() : 0;
  held.buffers = reducer_ != nullptr ? reducer_->bytes() : 0;
  return held;
}

}  // namespace sf::fsdp
