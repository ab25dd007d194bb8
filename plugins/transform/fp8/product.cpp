#include "plugins/transform/fp8/product.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

namespace sf::fp8 {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What a node keeps beside its tensors.
struct Call final : torch::CustomClassHolder {
  const Fp8* fp8 = nullptr;
  std::vector<LinearProduct> products;   // without bias tensors
  std::vector<int64_t> x_sizes;
  at::ScalarType type = at::kFloat;
  bool is_recorded = false, wants_weights = false;
};

// The places of saved tensors; the weights follow when grad_input is bf16.
enum Saved : size_t { kX, kScale, kWeights };

struct Product : torch::autograd::Function<Product> {
  // `trigger`: a weight, which wants gradient where x does not; the node gives it none.
  static variable_list forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& trigger, Call* call_of, const std::vector<LinearProduct>* products) {
    (void)trigger;
    const auto call = c10::intrusive_ptr<Call>::reclaim(call_of);
    const Fp8& fp8 = *call->fp8;
    const Fp8Options& options = fp8.options();
    const at::Tensor x_ri = x.reshape({-1, x.size(-1)}).contiguous();
    const bool keeps_copy = call->is_recorded && call->wants_weights && options.grad_weight_fp8;
    const bool by_tensor = options.scaling == Float8Scaling::tensor;
    const Float8Matrix encoded = fp8.ops().float8_encode({.x_rc = x_ri,
                                                          .format = Float8Format::e4m3,
                                                          .scaling = options.scaling,
                                                          .amax = by_tensor ? fp8.ops().float8_amax(x) : at::Tensor(),
                                                          .rows = true,
                                                          .columns = keeps_copy,
                                                          .alarm = fp8.linear(products->front().linear).alarms[kInput],
                                                          .into = {}});
    variable_list results;
    std::vector<int64_t> sizes = call->x_sizes;
    for (const LinearProduct& product : *products) {
      const Linear& linear = fp8.linear(product.linear);
      at::Tensor y_ro = fp8.ops().float8_product({.a_rk = encoded.rows(),
                                                  .b_ck = linear.weight.rows(),
                                                  .type = call->type,
                                                  .add_to_rc = {},
                                                  .fast_accumulation = true,
                                                  .emulate = options.emulate});
      if (product.bias_o.defined()) {
        y_ro.add_(product.bias_o);
      }
      sizes.back() = linear.spec.outputs;
      results.push_back(y_ro.view(sizes));
    }
    if (call->is_recorded) {
      variable_list saved = {keeps_copy ? encoded.values_cr : call->wants_weights ? x_ri : at::Tensor(), keeps_copy ? encoded.inverse_scale_c : at::Tensor()};
      if (!options.grad_input_fp8) {
        for (const LinearProduct& product : *products) {
          saved.push_back(product.weight_oi);
        }
      }
      context->save_for_backward(saved);
      context->saved_data["call"] = c10::IValue::make_capsule(call);
      context->set_materialize_grads(false);
    }
    return results;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const auto call = c10::static_intrusive_pointer_cast<Call>(context->saved_data["call"].toCapsule());
    const Fp8& fp8 = *call->fp8;
    const Fp8Options& options = fp8.options();
    const bool wants_x = context->needs_input_grad(0), by_tensor = options.scaling == Float8Scaling::tensor;
    at::Tensor grad_x;
    for (size_t p = 0; p < gradients.size(); ++p) {
      if (!gradients[p].defined()) {
        continue;
      }
      const LinearProduct& product = call->products[p];
      const Linear& linear = fp8.linear(product.linear);
      at::Tensor grad_ro = gradients[p].reshape({-1, linear.spec.outputs}).contiguous();
      const bool rows = wants_x && options.grad_input_fp8, columns = product.weight_sink != nullptr && options.grad_weight_fp8;
      Float8Matrix encoded;
      if (rows || columns) {
        encoded = fp8.ops().float8_encode({.x_rc = grad_ro,
                                           .format = options.gradients,
                                           .scaling = options.scaling,
                                           .amax = by_tensor ? fp8.ops().float8_amax(gradients[p]) : at::Tensor(),
                                           .rows = rows,
                                           .columns = columns,
                                           .alarm = linear.alarms[kOutputGradient],
                                           .into = {}});
      }
      if (product.bias_sink != nullptr) {
        product.bias_sink->buffer.add_(grad_ro.sum(0, false, product.bias_sink->buffer.scalar_type()));
        product.bias_sink->touch();
      }
      gradients[p] = at::Tensor();
      if ((rows || !wants_x) && (columns || product.weight_sink == nullptr)) {
        grad_ro = at::Tensor();   // its memory serves the products
      }
      if (columns) {
        (void)fp8.ops().float8_product({.a_rk = encoded.columns(),
                                        .b_ck = {saved[kX], saved[kScale]},
                                        .type = product.weight_sink->buffer.scalar_type(),
                                        .add_to_rc = product.weight_sink->buffer,
                                        .fast_accumulation = true,
                                        .emulate = options.emulate});
        encoded.values_cr = at::Tensor();
      } else if (product.weight_sink != nullptr) {
        fp8.ops().add_weight_gradient(product.weight_sink->buffer, grad_ro, saved[kX]);
      }
      if (product.weight_sink != nullptr) {
        product.weight_sink->touch();
      }
      if (rows) {
        grad_x = fp8.ops().float8_product({.a_rk = encoded.rows(),
                                           .b_ck = fp8.transposed_weight(product.linear),
                                           .type = call->type,
                                           .add_to_rc = grad_x,
                                           .fast_accumulation = true,
                                           .emulate = options.emulate});
      } else if (wants_x) {
        grad_x = grad_x.defined() ? grad_x.addmm_(grad_ro, saved[kWeights + p]) : at::mm(grad_ro, saved[kWeights + p]);
      }
    }
    return {grad_x.defined() ? grad_x.view(call->x_sizes) : grad_x, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

std::vector<at::Tensor> products_of(const Fp8& fp8, const std::vector<LinearProduct>& products, const at::Tensor& x) {
  auto call = c10::make_intrusive<Call>();
  call->fp8 = &fp8;
  call->products = products;
  call->x_sizes = x.sizes().vec();
  call->type = x.scalar_type();
  at::Tensor trigger = products.front().weight_oi;
  bool wants = x.requires_grad();
  for (LinearProduct& product : call->products) {
    wants = wants || product.weight_sink != nullptr || product.bias_sink != nullptr;
    call->wants_weights = call->wants_weights || product.weight_sink != nullptr;
    product.weight_oi = at::Tensor();
    product.bias_o = at::Tensor();
  }
  for (const LinearProduct& product : products) {
    trigger = product.weight_oi.requires_grad() ? product.weight_oi : trigger;
  }
  call->is_recorded = at::GradMode::is_enabled() && wants;
  return Product::apply(x, trigger, call.release(), &products);
}

}  // namespace sf::fp8
