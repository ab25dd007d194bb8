#include "plugins/transform/fp8/fp8.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <set>

#include "plugins/transform/fp8/product.hpp"
#include "plugins/transform/fp8/skip.hpp"
#include "sf/error.hpp"

namespace sf::fp8 {
namespace {

constexpr int64_t kMultiple = 16;   // of both dimensions of a weight: what the products of the cards ask for

std::string full_name(const LinearSpec& spec) { return spec.unit + "." + spec.name; }

}  // namespace

std::vector<bool> Fp8::take_over(const std::vector<LinearSpec>& linears) {
  taken_.clear();
  int64_t skipped = 0;
  place_.assign(linears.size(), -1);
  std::vector<bool> is_used(options_.skip.size(), false);
  std::string passed;   // why the others were not
  std::set<std::string> names;
  for (size_t i = 0; i < linears.size(); ++i) {
    const LinearSpec& spec = linears[i];
    if (spec.shard_group == "root" || !spec.trainable) {
      continue;
    }
    names.insert(spec.name);
    bool is_skipped = false;
    for (size_t s = 0; s < options_.skip.size(); ++s) {
      if (names_linear(options_.skip[s], full_name(spec))) {
        is_skipped = is_used[s] = true;
      }
    }
    if (is_skipped) {
      ++skipped;
    } else if (spec.inputs % kMultiple != 0 || spec.outputs % kMultiple != 0) {
      passed += (passed.empty() ? "" : ", ") + full_name(spec) + " is " + std::to_string(spec.outputs) + " x " + std::to_string(spec.inputs);
    } else {
      place_[i] = static_cast<int64_t>(taken_.size());
      taken_.push_back({.spec = spec, .weight = {}, .alarms = {}});
    }
  }
  for (size_t s = 0; s < options_.skip.size(); ++s) {
    if (!is_used[s]) {
      std::string listed;
      for (const std::string& name : names) {
        listed += (listed.empty() ? "" : ", ") + name;
      }
      throw Error(ExitCode::kUsage, "plugin.fp8.skip: \"" + options_.skip[s] + "\" names no linear of the draft's blocks",
                  "write the last parts of a name, like \"down_proj\", without .weight; the blocks have " + (listed.empty() ? "none" : listed));
    }
  }
  if (taken_.empty()) {
    throw Error(ExitCode::kUsage,
                "[F5] fp8 has nothing to do: no trainable linear of the draft's blocks has two dimensions that are multiples of 16" +
                    (passed.empty() ? std::string(skipped > 0 ? ", or plugin.fp8.skip names them all" : "") : " (" + passed + ")"),
                "leave fp8 out of backend.transforms, or change the draft's sizes");
  }
  std::vector<bool> flags;
  for (const int64_t place : place_) {
    flags.push_back(place >= 0);
  }
  return flags;
}

TransformMemory Fp8::memory() const {
  TransformMemory memory;
  const int64_t layouts = keeps_both() ? 2 : 1;
  for (const Linear& linear : taken_) {
    memory.weights += layouts * linear.spec.inputs * linear.spec.outputs;
    memory.replaced_elements += options_.grad_input_fp8 ? linear.spec.inputs * linear.spec.outputs : 0;
  }
  memory.detail = std::to_string(taken_.size()) + " weights encoded" + (layouts == 2 ? ", and transposed" : "");
  memory.is_gathered = options_.gather;
  return memory;
}

void Fp8::build(at::Device device, at::ScalarType, Ops& ops) {
  ops_ = &ops;
  const auto wide = at::TensorOptions().device(device).dtype(at::kFloat);
  const auto narrow = wide.dtype(at::kFloat8_e4m3fn);
  alarms_ = at::zeros({static_cast<int64_t>(taken_.size()), kAlarms}, wide);
  magnitudes_ = at::zeros({static_cast<int64_t>(taken_.size())}, wide);
  for (size_t i = 0; i < taken_.size(); ++i) {
    Linear& linear = taken_[i];
    const int64_t o = linear.spec.outputs, n = linear.spec.inputs;
    const bool by_row = options_.scaling == Float8Scaling::row;
    linear.weight.values_rc = at::empty({o, n}, narrow);
    linear.weight.inverse_scale = by_row ? at::ones({o, 1}, wide) : at::ones({}, wide);
    if (keeps_both()) {
      linear.weight.values_cr = at::empty({n, o}, narrow);
      linear.weight.inverse_scale_c = at::ones({n, 1}, wide);
    }
    for (int64_t alarm = 0; alarm < kAlarms; ++alarm) {
      linear.alarms.push_back(alarms_[static_cast<int64_t>(i)][alarm]);
    }
  }
}

void Fp8::begin_window() {
  alarms_.zero_();
  for (Linear& linear : taken_) {
    linear.is_gathered = false;
  }
}

Float8Encode Fp8::encoding(const Linear& linear, const at::Tensor& weight_oi) const {
  return {.x_rc = weight_oi,
          .format = Float8Format::e4m3,
          .scaling = options_.scaling,
          .amax = {},
          .rows = true,
          .columns = keeps_both(),
          .alarm = linear.alarms[kWeight],
          .into = linear.weight};
}

void Fp8::encode_weights(int64_t unit, const std::vector<at::Tensor>& whole) {
  for (Linear& linear : taken_) {
    if (linear.spec.unit_index == unit && !linear.is_gathered) {
      (void)ops_->float8_encode(encoding(linear, whole[static_cast<size_t>(linear.spec.parameter)].detach()));
    }
  }
}

Float8Operand Fp8::transposed_weight(int64_t number) const {
  const Float8Matrix& weight = linear(number).weight;
  if (weight.values_cr.defined()) {
    return weight.columns();
  }
  const at::Tensor values_io = at::empty({weight.values_rc.size(1), weight.values_rc.size(0)}, weight.values_rc.options());
  ops_->float8_transpose(weight.values_rc, values_io);
  return {values_io, weight.inverse_scale};
}

std::vector<at::Tensor> Fp8::linears(const std::vector<LinearProduct>& products, const at::Tensor& x) { return products_of(*this, products, x); }

at::Tensor Fp8::alarms() {
  if (on_window_) {
    on_window_();
  }
  return alarms_;
}

// What comes first on a tape made everything behind it not finite, too: of inputs the first linear, of gradients the last.
std::string Fp8::alarm_text(const std::vector<double>& flags) const {
  const auto is_raised = [&](size_t linear, Alarm alarm) { return flags[linear * kAlarms + alarm] != 0; };
  const auto told = [&](size_t linear, const char* what) {
    return std::string(what) + " of linear '" + taken_[linear].spec.name + "' in unit '" + taken_[linear].spec.unit + "' is not finite";
  };
  for (size_t i = 0; i < taken_.size(); ++i) {
    if (is_raised(i, kWeight)) {
      return told(i, "the weight");
    }
  }
  for (size_t i = 0; i < taken_.size(); ++i) {
    if (is_raised(i, kInput)) {
      return told(i, "the input");
    }
  }
  for (size_t i = taken_.size(); i-- > 0;) {
    if (is_raised(i, kOutputGradient)) {
      return told(i, "the output's gradient");
    }
  }
  return "a number is not finite";
}

const Linear* Fp8::find(int64_t unit, int64_t parameter) const {
  const auto found = std::find_if(taken_.begin(), taken_.end(), [&](const Linear& linear) {
    return linear.spec.unit_index == unit && linear.spec.parameter == parameter;
  });
  return found == taken_.end() ? nullptr : &*found;
}

Linear& Fp8::at(int64_t unit, int64_t parameter) { return const_cast<Linear&>(*find(unit, parameter)); }

at::Tensor Fp8::magnitudes(const std::vector<at::Tensor>& parts_ri) {
  at::NoGradGuard no_grad;
  const bool are_whole = std::all_of(parts_ri.begin(), parts_ri.end(), [](const at::Tensor& part) { return part.numel() > 0; });
  std::vector<at::Tensor> found;
  if (are_whole && parts_ri.front().is_cuda()) {
    found = at::_foreach_norm(parts_ri, std::numeric_limits<double>::infinity());
    return at::stack(found).to(at::kFloat);
  }
  for (const at::Tensor& part : parts_ri) {
    found.push_back(ops_->float8_amax(part));
  }
  return at::stack(found);
}

void Fp8::set_magnitudes(const at::Tensor& pooled) { magnitudes_.copy_(pooled); }

void Fp8::encode(int64_t unit, int64_t parameter, const at::Tensor& part_ri, const at::Tensor& payload_rb) {
  at::NoGradGuard no_grad;
  Linear& linear = at(unit, parameter);
  Float8Encode encode = encoding(linear, part_ri);
  encode.amax = magnitudes_[&linear - taken_.data()];
  encode.columns = false;
  encode.into = {.values_rc = payload_rb.view(at::kFloat8_e4m3fn), .values_cr = {}, .inverse_scale = linear.weight.inverse_scale, .inverse_scale_c = {}};
  if (part_ri.size(0) == 0) {  // this rank decodes rows of others all the same, and the scale is written with what is encoded
    encode.x_rc = at::zeros({1, linear.spec.inputs}, part_ri.options());
    encode.into.values_rc = at::Tensor();
  }
  (void)ops_->float8_encode(encode);
}

void Fp8::decode(int64_t unit, int64_t parameter, int64_t row_begin, const at::Tensor& payload_rb) {
  at::NoGradGuard no_grad;
  at(unit, parameter).weight.values_rc.view(at::kByte).narrow(0, row_begin, payload_rb.size(0)).copy_(payload_rb);
}

void Fp8::decoded(int64_t unit, int64_t parameter) {
  at(unit, parameter).is_gathered = true;
}

}  // namespace sf::fp8
