// core/train/transforms.hpp: the transforms of a run over the linears of a draft. Each linear goes to the first transform that takes it over, the rest stay
// the tape's own.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "sf/transform.hpp"
#include "sf/unit.hpp"

namespace sf {

/// Every NAME.weight of two dimensions, units and parameters in their order.
[[nodiscard]] std::vector<LinearSpec> linear_specs(const std::vector<UnitSpec>& units);

class Transforms {
 public:
  struct Member {
    std::string name;               // of the plugin
    Transform* transform = nullptr;  // outlives this object
    std::vector<bool> taken = {};   // by linear
  };
  struct Place {
    Transform* transform = nullptr;
    int64_t linear = 0;
  };

  /// Asks each in order what it takes over.
  Transforms(std::vector<Member> members, const std::vector<UnitSpec>& units);

  [[nodiscard]] const std::vector<LinearSpec>& linears() const { return linears_; }
  [[nodiscard]] const std::vector<Member>& members() const { return members_; }
  /// "block.0: self_attn.q_proj, ..." of a member, units that have the same linears on one line.
  [[nodiscard]] std::vector<std::string> taken_text(const Member& member) const;

  void build(at::Device device, at::ScalarType dtype, Ops& ops);
  /// The one transform that wants parameters gathered in its own way; null: none does. After build.
  [[nodiscard]] GatherCodec* codec() const;

  /// Null: the tape computes it.
  [[nodiscard]] const Place* find(int64_t unit, std::string_view name) const;
  void begin_window();
  [[nodiscard]] bool wants_weights(int64_t unit) const;
  void encode_weights(int64_t unit, const std::vector<at::Tensor>& whole);
  [[nodiscard]] bool replaces(int64_t unit, int64_t parameter) const;
  /// Flags of all members after one another, float32 [n] on the device; undefined: none has any.
  [[nodiscard]] at::Tensor alarms() const;
  /// What flags mean that are not all 0.
  [[nodiscard]] std::string alarm_text(const std::vector<double>& flags) const;

 private:
  std::vector<Member> members_;
  std::vector<LinearSpec> linears_;
  std::vector<std::map<std::string, Place, std::less<>>> by_unit_;
};

}  // namespace sf
