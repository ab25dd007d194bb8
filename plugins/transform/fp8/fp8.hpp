// plugins/transform/fp8: linear products of a draft's blocks in float8. Activations and weights are e4m3, output gradients e5m2 or e4m3; sums are float32.
//
// fp8.hpp: which linears, their weights (encoded once in a window, at fixed addresses), the codec of their gather, and what is told when a number is not
// finite. product.hpp has the products.
//
// Shapes: r rows · i input columns · o output columns
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "sf/transform.hpp"

namespace sf::fp8 {

struct Fp8Options {
  Float8Scaling scaling = Float8Scaling::tensor;
  Float8Format gradients = Float8Format::e4m3;
  bool grad_input_fp8 = true;
  bool grad_weight_fp8 = true;
  std::vector<std::string> skip;
  bool emulate = false;
  bool gather = false;
};

/// What may be not finite; the flags of a linear lie beside each other in this order.
enum Alarm : int64_t { kInput, kOutputGradient, kWeight, kAlarms };

/// A linear that was taken over.
struct Linear {
  LinearSpec spec;
  Float8Matrix weight;               // e4m3 [o, i]; with scales by row [i, o] as well, whose scales are others
  std::vector<at::Tensor> alarms;    // kAlarms elements of Fp8::alarms()
  bool is_gathered = false;          // in this window: the weight came encoded
};

class Fp8 final : public Transform, private GatherCodec {
 public:
  explicit Fp8(Fp8Options options) : options_(std::move(options)) {}
  virtual ~Fp8() = default;

  std::vector<bool> take_over(const std::vector<LinearSpec>& linears) override;
  TransformMemory memory() const override;
  void build(at::Device device, at::ScalarType dtype, Ops& ops) override;
  GatherCodec* codec() override { return options_.gather ? this : nullptr; }
  void begin_window() override;
  void encode_weights(int64_t unit, const std::vector<at::Tensor>& whole) override;
  std::vector<at::Tensor> linears(const std::vector<LinearProduct>& products, const at::Tensor& x) override;
  at::Tensor alarms() override;
  std::string alarm_text(const std::vector<double>& flags) const override;
  bool replaces(int64_t unit, int64_t parameter) const override { return options_.grad_input_fp8 && find(unit, parameter) != nullptr; }

  /// Called at the end of each window.
  void on_window(std::function<void()> listener) { on_window_ = std::move(listener); }
  [[nodiscard]] const Fp8Options& options() const { return options_; }
  [[nodiscard]] Ops& ops() const { return *ops_; }
  /// By the number that take_over was given.
  [[nodiscard]] const Linear& linear(int64_t number) const { return taken_[static_cast<size_t>(place_[static_cast<size_t>(number)])]; }
  /// The weight's transposed copy for the gradient of an input. Made when it is asked for where the scale is one: a byte for each element of every weight
  /// at all times would be more memory than float8 activations save.
  [[nodiscard]] Float8Operand transposed_weight(int64_t number) const;

 private:
  bool carries(int64_t unit, int64_t parameter) const override { return options_.gather && find(unit, parameter) != nullptr; }
  int64_t row_bytes(int64_t unit, int64_t parameter) const override { return find(unit, parameter)->spec.inputs; }
  at::Tensor magnitudes(const std::vector<at::Tensor>& parts_ri) override;
  void set_magnitudes(const at::Tensor& pooled) override;
  void encode(int64_t unit, int64_t parameter, const at::Tensor& part_ri, const at::Tensor& payload_rb) override;
  void decode(int64_t unit, int64_t parameter, int64_t row_begin, const at::Tensor& payload_rb) override;
  void decoded(int64_t unit, int64_t parameter) override;

  const Linear* find(int64_t unit, int64_t parameter) const;
  Linear& at(int64_t unit, int64_t parameter);
  Float8Encode encoding(const Linear& linear, const at::Tensor& weight_oi) const;
  bool keeps_both() const { return options_.grad_input_fp8 && options_.scaling == Float8Scaling::row; }

  Fp8Options options_;
  std::function<void()> on_window_;
  Ops* ops_ = nullptr;
  std::vector<Linear> taken_;
  std::vector<int64_t> place_;           // in taken_, of each linear; -1: not taken over
  at::Tensor alarms_;                    // float32 [taken, kAlarms]
  at::Tensor magnitudes_;                // float32 [taken], of the window, over all ranks
};

}  // namespace sf::fp8
