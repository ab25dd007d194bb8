#include "core/kernels/lookup.hpp"

#include "core/base/error.hpp"
#include "core/kernels/cuda_library.hpp"
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
    if (has_kernels({gradient})) {
      at::Tensor table = at::zeros({context->saved_data["rows"].toInt(), gradient.size(-1)}, gradient.options().dtype(at::kFloat));
      add_by_token(table, ids, gradient.reshape({-1, gradient.size(-1)}));
      return {table.to(gradient.scalar_type()), at::Tensor()};
    }
    const at::Tensor rows = wide(gradient).reshape({-1, gradient.size(-1)});
    // On the CPU each thread owns a range of tokens; on a GPU it sorts by token first. Neither adds in an order that changes.
    const at::Tensor table =
        at::embedding_dense_backward(rows, ids, context->saved_data["rows"].toInt(), /*padding_idx=*/-1, /*scale_grad_by_freq=*/false);
    return {table.to(gradient.scalar_type()), at::Tensor()};
  }
};

}  // namespace

void add_by_token(at::Tensor& table_vx, const at::Tensor& ids_r, const at::Tensor& rows_rx) {
  if (table_vx.is_cpu()) {
    table_vx.index_add_(0, ids_r, rows_rx.to(table_vx.scalar_type()));
    return;
  }
  if (!has_kernels({rows_rx}) || table_vx.scalar_type() != at::kFloat) {
    table_vx.index_put_({ids_r}, rows_rx.to(table_vx.scalar_type()), /*accumulate=*/true);  // sorts by token first
    return;
  }
  const int64_t count = ids_r.size(0), x = rows_rx.size(1);
  const at::Tensor rows = whole(rows_rx);
  const auto [sorted, order] = at::sort(ids_r, /*stable=*/true, /*dim=*/0, /*descending=*/false);
  const at::Tensor partial = at::empty({(count + cuda::kSegmentRows - 1) / cuda::kSegmentRows, 2, x}, table_vx.options());
  check_launch("add_by_token", cuda_launchers()->segment_sum({.row_type = kernel_type(rows), .count = count, .x = x,
                                                              .sorted_ids = sorted.const_data_ptr<int64_t>(),
                                                              .order = order.const_data_ptr<int64_t>(), .rows = pointer(rows),
                                                              .table_vx = table_vx.data_ptr<float>(), .partial = partial.data_ptr<float>()},
                                                             stream_of(table_vx)));
}

at::Tensor lookup(const at::Tensor& table_vx, const at::Tensor& ids) {
  SF_CHECK(table_vx.dim() == 2, "lookup takes a table [v, x], found {}", table_vx.sizes().vec());
  SF_CHECK(ids.scalar_type() == at::kLong, "lookup takes int64 ids, found {}", c10::toString(ids.scalar_type()));
  return Lookup::apply(table_vx, ids);
}

}  // namespace sf
