#include "core/kernels/lookup.hpp"

#include "core/base/error.hpp"
#include "core/kernels/shape_check.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

namespace sf {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Lookup : torch::autograd::Function<Lookup> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& table_vx, const at::Tensor& ids) {
    context->save_for_backward({ids});
    context->saved_data["rows"] = table_vx.size(0);
    std::vector<int64_t> shape = ids.sizes().vec();
    shape.push_back(table_vx.size(1));
    return table_vx.index_select(0, ids.reshape({-1})).view(shape);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const at::Tensor ids = context->get_saved_variables()[0].reshape({-1});
    const at::Tensor& gradient = gradients[0];
    const at::Tensor rows = wide(gradient).reshape({-1, gradient.size(-1)});
    // On the CPU each thread owns a range of tokens; on a GPU it sorts by token first. Neither adds in an order that changes.
    const at::Tensor table =
        at::embedding_dense_backward(rows, ids, context->saved_data["rows"].toInt(), /*padding_idx=*/-1, /*scale_grad_by_freq=*/false);
    return {table.to(gradient.scalar_type()), at::Tensor()};
  }
};

}  // namespace

at::Tensor lookup(const at::Tensor& table_vx, const at::Tensor& ids) {
  SF_CHECK(table_vx.dim() == 2, "lookup takes a table [v, x], found {}", table_vx.sizes().vec());
  SF_CHECK(ids.scalar_type() == at::kLong, "lookup takes int64 ids, found {}", c10::toString(ids.scalar_type()));
  return Lookup::apply(table_vx, ids);
}

}  // namespace sf
