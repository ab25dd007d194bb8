#include "core/train/transforms.hpp"

#include <ATen/ATen.h>

#include <algorithm>

#include "core/base/error.hpp"
#include "core/base/text.hpp"

namespace sf {

std::vector<LinearSpec> linear_specs(const std::vector<UnitSpec>& units) {
  const std::string suffix = ".weight";
  std::vector<LinearSpec> found;
  for (size_t u = 0; u < units.size(); ++u) {
    for (size_t p = 0; p < units[u].parameters.size(); ++p) {
      const ParameterSpec& parameter = units[u].parameters[p];
      if (parameter.shape.size() == 2 && parameter.name.ends_with(suffix)) {
        found.push_back({.unit = units[u].name,
                         .shard_group = units[u].shard_group,
                         .name = parameter.name.substr(0, parameter.name.size() - suffix.size()),
                         .unit_index = static_cast<int64_t>(u),
                         .parameter = static_cast<int64_t>(p),
                         .inputs = parameter.shape[1],
                         .outputs = parameter.shape[0],
                         .trainable = parameter.trainable});
      }
    }
  }
  return found;
}

Transforms::Transforms(std::vector<Member> members, const std::vector<UnitSpec>& units)
    : members_(std::move(members)), linears_(linear_specs(units)), by_unit_(units.size()) {
  for (Member& member : members_) {
    member.taken = member.transform->take_over(linears_);
    SF_CHECK(member.taken.size() == linears_.size(), "transform \"{}\" answered for {} of {} linears", member.name, member.taken.size(), linears_.size());
    for (size_t i = 0; i < linears_.size(); ++i) {
      if (member.taken[i]) {
        auto& places = by_unit_[static_cast<size_t>(linears_[i].unit_index)];
        member.taken[i] = places.try_emplace(linears_[i].name, Place{member.transform, static_cast<int64_t>(i)}).second;
      }
    }
  }
}

std::vector<std::string> Transforms::taken_text(const Member& member) const {
  std::vector<std::pair<std::string, std::string>> units;   // name, linears
  for (size_t i = 0; i < linears_.size(); ++i) {
    if (member.taken[i]) {
      if (units.empty() || units.back().first != linears_[i].unit) {
        units.emplace_back(linears_[i].unit, "");
      }
      units.back().second += (units.back().second.empty() ? "" : ", ") + linears_[i].name;
    }
  }
  std::vector<std::string> lines;
  for (size_t begin = 0; begin < units.size();) {
    size_t end = begin + 1;
    while (end < units.size() && units[end].second == units[begin].second) {
      ++end;
    }
    lines.push_back(units[begin].first + (end - begin > 1 ? " to " + units[end - 1].first : "") + ": " + units[begin].second);
    begin = end;
  }
  return lines;
}

void Transforms::build(at::Device device, at::ScalarType dtype, Ops& ops) {
  for (const Member& member : members_) {
    member.transform->build(device, dtype, ops);
  }
}

GatherCodec* Transforms::codec() const {
  GatherCodec* found = nullptr;
  for (const Member& member : members_) {
    if (GatherCodec* codec = member.transform->codec(); codec != nullptr) {
      if (found != nullptr) {
        throw Error(ExitCode::kUsage, format("transform \"{}\" is the second that gathers parameters in its own way", member.name),
                    "turn its gather option off, or leave one of the transforms out");
      }
      found = codec;
    }
  }
  return found;
}

const Transforms::Place* Transforms::find(int64_t unit, std::string_view name) const {
  const auto& places = by_unit_[static_cast<size_t>(unit)];
  const auto found = places.find(name);
  return found == places.end() ? nullptr : &found->second;
}

void Transforms::begin_window() {
  for (const Member& member : members_) {
    member.transform->begin_window();
  }
}

bool Transforms::wants_weights(int64_t unit) const { return !by_unit_[static_cast<size_t>(unit)].empty(); }

void Transforms::encode_weights(int64_t unit, const std::vector<at::Tensor>& whole) {
  for (const Member& member : members_) {
    member.transform->encode_weights(unit, whole);
  }
}

bool Transforms::replaces(int64_t unit, int64_t parameter) const {
  return std::any_of(members_.begin(), members_.end(), [&](const Member& member) { return member.transform->replaces(unit, parameter); });
}

at::Tensor Transforms::alarms() const {
  std::vector<at::Tensor> all;
  for (const Member& member : members_) {
    if (const at::Tensor alarms = member.transform->alarms(); alarms.defined()) {
      all.push_back(alarms.view({-1}));
    }
  }
  return all.empty() ? at::Tensor() : all.size() == 1 ? all.front() : at::cat(all);
}

std::string Transforms::alarm_text(const std::vector<double>& flags) const {
  std::string text;
  auto begin = flags.begin();
  for (const Member& member : members_) {
    const at::Tensor alarms = member.transform->alarms();
    if (!alarms.defined()) {
      continue;
    }
    const std::vector<double> own(begin, begin + alarms.numel());
    begin += alarms.numel();
    if (std::any_of(own.begin(), own.end(), [](double flag) { return flag != 0; })) {
      text += (text.empty() ? "" : "; ") + member.transform->alarm_text(own);
    }
  }
  return text;
}

}  // namespace sf
