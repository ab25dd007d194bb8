// Shapes: b batch · s context tokens · w block slots · j tokens of a block · q = w*j draft rows · n query heads · m key/value heads ·
//         g = n/m query heads per key/value head · e head size · c context tokens that a chunk looks at
//
// A chunk is a run of blocks. Inside it queries are [b*m, rows*g, e], so that the heads which share keys share one matrix product; the same
// memory seen as [b*m*blocks, j*g, e] is what the own-block part needs.
#include "core/kernels/block_attention.hpp"

#include "core/base/error.hpp"
#include "core/kernels/cuda_library.hpp"
#include "core/kernels/magnitudes.hpp"
#include "core/kernels/shape_check.hpp"
#include "core/kernels/slow_paths.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <limits>

namespace sf {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kScoresCuda = int64_t{64} << 20;  // 256 MiB of float32
constexpr int64_t kScoresCpu = int64_t{4} << 20;    // 16 MiB: near the caches, and short chunks skip more context
constexpr double kNegativeInfinity = -std::numeric_limits<double>::infinity();

// a @ b in wide numbers. On a GPU half types are multiplied as they are, with float32 sums and results.
at::Tensor product(const at::Tensor& a, const at::Tensor& b, at::ScalarType operand) {
  if (operand == at::kFloat || operand == at::kDouble) {
    return at::bmm(a, b);
  }
  return at::bmm(a.to(operand), b.to(operand), at::kFloat);
}

struct Geometry {
  int64_t b, s, w, j, n, m, g, e;
  int64_t window_tokens, scores_max;
  bool causal;
  double scale;
  at::ScalarType operand, wide;  // what is multiplied, what sums are kept in

  [[nodiscard]] int64_t blocks_per_chunk() const {
    const int64_t scores_per_block = std::max<int64_t>(1, b * n * j * (s + j));
    return std::clamp<int64_t>(scores_max / scores_per_block, 1, std::max<int64_t>(1, w));
  }
};

struct Inputs {
  at::Tensor query, context_key, context_value, block_key, block_value, anchors, keep;
};

// Context as [b*m, s, e] in the type that is multiplied.
at::Tensor by_head(const at::Tensor& context_bsme, const Geometry& geometry) {
  return context_bsme.to(geometry.operand)
      .transpose(1, 2)
      .contiguous()
      .view({geometry.b * geometry.m, geometry.s, geometry.e});
}

class Chunk {
 public:
  Chunk(const Geometry& geometry, const Inputs& inputs, int64_t block_begin, int64_t block_end)
      : g_(geometry), block_begin_(block_begin), blocks_(block_end - block_begin), rows_(blocks_ * geometry.j) {
    query_ = rows_by_head(inputs.query);
    if (g_.operand == g_.wide) {
      query_ = query_.mul_(g_.scale);
    }
    key_ = blocks_by_head(inputs.block_key);
    value_ = blocks_by_head(inputs.block_value);
    place_context(inputs);
    make_masks(inputs);
  }

  [[nodiscard]] int64_t row_begin() const { return block_begin_ * g_.j; }
  [[nodiscard]] int64_t rows() const { return rows_; }
  [[nodiscard]] int64_t context_begin() const { return context_begin_; }
  [[nodiscard]] int64_t context_tokens() const { return context_end_ - context_begin_; }
  [[nodiscard]] const at::Tensor& query() const { return query_; }
  [[nodiscard]] const at::Tensor& key() const { return key_; }
  [[nodiscard]] const at::Tensor& value() const { return value_; }

  // Rows [b, rows, n, e] of a [b, q, n, e] tensor as [b*m, rows*g, e] of the type that is multiplied; always a copy.
  [[nodiscard]] at::Tensor rows_by_head(const at::Tensor& rows_bqne) const {
    at::Tensor out = at::empty({g_.b, g_.m, rows_, g_.g, g_.e}, rows_bqne.options().dtype(g_.operand));
    out.copy_(rows_bqne.narrow(1, row_begin(), rows_).view({g_.b, rows_, g_.m, g_.g, g_.e}).permute({0, 2, 1, 3, 4}));
    return out.view({g_.b * g_.m, rows_ * g_.g, g_.e});
  }

  // The other way, into its place in a [b, q, n, e] tensor.
  void put_rows(const at::Tensor& by_head, const at::Tensor& rows_bqne) const {
    rows_bqne.narrow(1, row_begin(), rows_)
        .view({g_.b, rows_, g_.m, g_.g, g_.e})
        .copy_(by_head.view({g_.b, g_.m, rows_, g_.g, g_.e}).permute({0, 2, 1, 3, 4}));
  }

  // [b*m*blocks, j, e] into its place in a [b, q, m, e] tensor.
  void put_blocks(const at::Tensor& by_head, const at::Tensor& rows_bqme) const {
    rows_bqme.narrow(1, row_begin(), rows_).copy_(by_head.view({g_.b, g_.m, rows_, g_.e}).transpose(1, 2));
  }

  // [b*m, rows*g, x] seen block by block, and back.
  [[nodiscard]] at::Tensor as_blocks(const at::Tensor& x) const {
    return x.view({g_.b * g_.m * blocks_, g_.j * g_.g, x.size(-1)});
  }
  [[nodiscard]] at::Tensor as_rows(const at::Tensor& x) const { return x.view({g_.b * g_.m, rows_ * g_.g, x.size(-1)}); }

  // Scores with what a row must not see at minus infinity: context [b*m, rows*g, c] (undefined when c = 0), own block [b*m, rows*g, j].
  [[nodiscard]] at::Tensor context_scores(const at::Tensor& context_key) const {
    if (context_tokens() == 0) {
      return {};
    }
    at::Tensor scores = product(query_, context_part(context_key).transpose(1, 2), g_.operand);
    return mask(scale(scores), context_hidden_);
  }
  [[nodiscard]] at::Tensor own_scores() const {
    at::Tensor scores = as_rows(product(as_blocks(query_), key_.transpose(1, 2), g_.operand));
    return mask(scale(scores), own_hidden_);
  }
  [[nodiscard]] at::Tensor context_part(const at::Tensor& context) const {
    return context.narrow(1, context_begin_, context_tokens());
  }

 private:
  [[nodiscard]] at::Tensor blocks_by_head(const at::Tensor& rows_bqme) const {
    return rows_bqme.narrow(1, row_begin(), rows_)
        .to(g_.operand)
        .transpose(1, 2)
        .contiguous()
        .view({g_.b * g_.m * blocks_, g_.j, g_.e});
  }

  // The part of the context that some live row of the chunk can see. Known without waiting for a device only when anchors are on the host.
  void place_context(const Inputs& inputs) {
    context_begin_ = 0;
    context_end_ = g_.s;
    if (!inputs.anchors.is_cpu()) {
      return;
    }
    int64_t first = g_.s;
    int64_t last = 0;
    const auto anchors = inputs.anchors.accessor<int64_t, 2>();
    const auto keep = inputs.keep.accessor<bool, 2>();
    for (int64_t row = 0; row < g_.b; ++row) {
      for (int64_t slot = block_begin_; slot < block_begin_ + blocks_; ++slot) {
        if (keep[row][slot]) {
          first = std::min(first, anchors[row][slot]);
          last = std::max(last, anchors[row][slot]);
        }
      }
    }
    context_end_ = std::min(last, g_.s);
    if (g_.window_tokens > 0) {
      context_begin_ = std::max<int64_t>(0, first - (g_.window_tokens - 1));
    }
    context_begin_ = std::min(context_begin_, context_end_);
  }

  void make_masks(const Inputs& inputs) {
    const at::Tensor keep = inputs.keep.narrow(1, block_begin_, blocks_);
    const at::Tensor anchors = inputs.anchors.narrow(1, block_begin_, blocks_);
    const auto integers = anchors.options();
    const at::Tensor slot = at::arange(g_.j, integers);
    const auto per_row = [&](const at::Tensor& per_block) {
      return per_block.unsqueeze(-1).expand({g_.b, blocks_, g_.j}).reshape({g_.b, rows_, 1});
    };
    if (context_tokens() > 0) {
      const at::Tensor token = at::arange(context_begin_, context_end_, integers);
      context_hidden_ = at::ge(token, per_row(at::where(keep, anchors, at::zeros_like(anchors))));  // [b, rows, c]
      if (g_.window_tokens > 0) {
        const at::Tensor position = at::add(anchors.unsqueeze(-1), slot).reshape({g_.b, rows_, 1});
        context_hidden_ = at::logical_or(context_hidden_, at::lt(token, position - (g_.window_tokens - 1)));
      }
    }
    at::Tensor own = at::zeros({g_.j, g_.j}, keep.options());  // [row, key]
    if (g_.causal) {
      own = at::logical_or(own, at::gt(slot.unsqueeze(0), slot.unsqueeze(1)));
    }
    if (g_.window_tokens > 0) {
      own = at::logical_or(own, at::lt(slot.unsqueeze(0), slot.unsqueeze(1) - (g_.window_tokens - 1)));
    }
    own_hidden_ = at::logical_or(own, keep.logical_not().view({g_.b, blocks_, 1, 1})).reshape({g_.b, rows_, g_.j});
  }

  [[nodiscard]] at::Tensor scale(const at::Tensor& scores) const { return g_.operand == g_.wide ? scores : scores.mul(g_.scale); }

  [[nodiscard]] at::Tensor mask(const at::Tensor& scores, const at::Tensor& hidden) const {
    const int64_t columns = scores.size(-1);
    scores.view({g_.b, g_.m, rows_, g_.g, columns}).masked_fill_(hidden.view({g_.b, 1, rows_, 1, columns}), kNegativeInfinity);
    return scores;
  }

  const Geometry& g_;
  int64_t block_begin_, blocks_, rows_;
  int64_t context_begin_ = 0, context_end_ = 0;
  at::Tensor query_, key_, value_;
  at::Tensor context_hidden_, own_hidden_;  // bool, true where a row must not look
};

template <class Body>
void for_each_chunk(const Geometry& geometry, const Inputs& inputs, Body&& body) {
  const int64_t step = geometry.blocks_per_chunk();
  for (int64_t begin = 0; begin < geometry.w; begin += step) {
    body(Chunk(geometry, inputs, begin, std::min(geometry.w, begin + step)));
  }
}

Geometry geometry_of(const Inputs& inputs, int64_t block_size, int64_t window_tokens, bool causal, double scale, int64_t scores_max) {
  const at::ScalarType type = inputs.query.scalar_type();
  const int64_t n = inputs.query.size(2);
  const int64_t m = inputs.context_key.size(2);
  return {.b = inputs.query.size(0),
          .s = inputs.context_key.size(1),
          .w = inputs.anchors.size(1),
          .j = block_size,
          .n = n,
          .m = m,
          .g = n / m,
          .e = inputs.query.size(3),
          .window_tokens = window_tokens,
          .scores_max = scores_max,
          .causal = causal,
          .scale = scale,
          .operand = inputs.query.is_cuda() ? type : wide_type(type),
          .wide = wide_type(type)};
}

struct BlockAttentionFunction : torch::autograd::Function<BlockAttentionFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& query, const at::Tensor& context_key,
                            const at::Tensor& context_value, const at::Tensor& block_key, const at::Tensor& block_value,
                            const at::Tensor& anchors, const at::Tensor& keep, int64_t block_size, int64_t window_tokens, bool causal,
                            double scale, int64_t scores_max) {
    const Inputs inputs{query, context_key, context_value, block_key, block_value, anchors, keep};
    const Geometry geometry = geometry_of(inputs, block_size, window_tokens, causal, scale, scores_max);
    const at::Tensor keys = by_head(context_key, geometry);
    const at::Tensor values = by_head(context_value, geometry);
    at::Tensor out = at::empty(query.sizes(), query.options());
    at::Tensor log_sum_exp = at::empty({geometry.b * geometry.m, geometry.w * geometry.j * geometry.g}, query.options().dtype(geometry.wide));

    for_each_chunk(geometry, inputs, [&](const Chunk& chunk) {
      at::Tensor own = chunk.own_scores();
      at::Tensor far = chunk.context_scores(keys);
      at::Tensor largest = own.amax(-1, true);
      if (far.defined()) {
        largest = at::maximum(largest, far.amax(-1, true));
      }
      largest.masked_fill_(at::eq(largest, kNegativeInfinity), 0);  // dead rows
      own.sub_(largest).exp_();
      at::Tensor sum = own.sum(-1, true);
      at::Tensor result = chunk.as_rows(product(chunk.as_blocks(own), chunk.value(), geometry.operand));
      if (far.defined()) {
        far.sub_(largest).exp_();
        sum.add_(far.sum(-1, true));
        result.add_(product(far, chunk.context_part(values), geometry.operand));
      }
      const at::Tensor dead = at::eq(sum, 0);
      sum.masked_fill_(dead, 1);
      chunk.put_rows(result.div_(sum).masked_fill_(dead, 0), out);
      log_sum_exp.narrow(1, chunk.row_begin() * geometry.g, chunk.rows() * geometry.g).copy_(sum.log_().add_(largest).squeeze(-1));
    });

    context->save_for_backward({query, context_key, context_value, block_key, block_value, anchors, keep, out, log_sum_exp});
    context->saved_data["block_size"] = block_size;
    context->saved_data["window_tokens"] = window_tokens;
    context->saved_data["causal"] = causal;
    context->saved_data["scale"] = scale;
    context->saved_data["scores_max"] = scores_max;
    return out;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const Inputs inputs{saved[0], saved[1], saved[2], saved[3], saved[4], saved[5], saved[6]};
    const at::Tensor& out = saved[7];
    const at::Tensor& log_sum_exp = saved[8];
    const Geometry geometry = geometry_of(inputs, context->saved_data["block_size"].toInt(), context->saved_data["window_tokens"].toInt(),
                                          context->saved_data["causal"].toBool(), context->saved_data["scale"].toDouble(),
                                          context->saved_data["scores_max"].toInt());
    const at::ScalarType operand = geometry.operand;
    // With scaled queries the key's gradient needs no factor; otherwise it gets the scale like the query's.
    const double key_scale = operand == geometry.wide ? 1.0 : geometry.scale;
    const at::Tensor grad_out = gradients[0].contiguous();
    const at::Tensor keys = by_head(inputs.context_key, geometry);
    const at::Tensor values = by_head(inputs.context_value, geometry);
    at::Tensor grad_keys = at::zeros(keys.sizes(), keys.options().dtype(geometry.wide));
    at::Tensor grad_values = at::zeros(values.sizes(), grad_keys.options());
    at::Tensor grad_query = at::empty(inputs.query.sizes(), inputs.query.options());
    at::Tensor grad_block_key = at::empty(inputs.block_key.sizes(), inputs.block_key.options());
    at::Tensor grad_block_value = at::empty(inputs.block_value.sizes(), inputs.block_value.options());

    for_each_chunk(geometry, inputs, [&](const Chunk& chunk) {
      const at::Tensor grad = chunk.rows_by_head(grad_out);  // [b*m, rows*g, e]
      const at::Tensor along = at::mul(grad.to(geometry.wide), chunk.rows_by_head(out)).sum(-1, true);
      const at::Tensor lse = log_sum_exp.narrow(1, chunk.row_begin() * geometry.g, chunk.rows() * geometry.g).unsqueeze(-1);

      at::Tensor own = chunk.own_scores().sub_(lse).exp_();  // probabilities
      const at::Tensor grad_blocks = chunk.as_blocks(grad);
      chunk.put_blocks(product(chunk.as_blocks(own).transpose(1, 2), grad_blocks, operand), grad_block_value);
      own.mul_(chunk.as_rows(product(grad_blocks, chunk.value().transpose(1, 2), operand)).sub_(along));  // gradient of scores
      const at::Tensor own_blocks = chunk.as_blocks(own);
      chunk.put_blocks(product(own_blocks.transpose(1, 2), chunk.as_blocks(chunk.query()), operand).mul_(key_scale), grad_block_key);
      at::Tensor grad_rows = chunk.as_rows(product(own_blocks, chunk.key(), operand));

      at::Tensor far = chunk.context_scores(keys);
      if (far.defined()) {
        far.sub_(lse).exp_();
        chunk.context_part(grad_values).add_(product(far.transpose(1, 2), grad, operand));
        far.mul_(product(grad, chunk.context_part(values).transpose(1, 2), operand).sub_(along));
        chunk.context_part(grad_keys).add_(product(far.transpose(1, 2), chunk.query(), operand), key_scale);
        grad_rows.add_(product(far, chunk.context_part(keys), operand));
      }
      chunk.put_rows(grad_rows.mul_(geometry.scale), grad_query);
    });

    const auto by_token = [&](const at::Tensor& by_head_) {
      return by_head_.view({geometry.b, geometry.m, geometry.s, geometry.e}).transpose(1, 2).to(inputs.query.scalar_type());
    };
    variable_list result(12);
    result[0] = grad_query;
    result[1] = by_token(grad_keys);
    result[2] = by_token(grad_values);
    result[3] = grad_block_key;
    result[4] = grad_block_value;
    return result;
  }
};

// Tensor cores, no mask, context beyond the last anchor of a tile not looked at.
bool runs_on_kernels(const BlockAttention& attention) {
  if (!has_kernels({attention.query_bqne, attention.context_key_bsme, attention.context_value_bsme, attention.block_key_bqme,
                    attention.block_value_bqme}) ||
      !attention.anchors_bw.is_cuda() || !attention.keep_bw.is_cuda()) {
    return false;
  }
  const int64_t e = attention.query_bqne.size(3);
  if (const char* why = slow_attention(attention.query_bqne.scalar_type() == at::kBFloat16, e)) {
    note_slow_path("block_attention", why);
    return false;
  }
  constexpr int64_t kOffsetsMost = int64_t{1} << 31;  // a sample's offsets are 32 bits wide
  return attention.query_bqne.numel() / attention.query_bqne.size(0) < kOffsetsMost;
}

struct KernelInputs {
  at::Tensor query, context_key, context_value, block_key, block_value, anchors, keep;
};

cuda::BlockAttention arguments_of(const KernelInputs& in, int64_t block_size, int64_t window_tokens, bool causal, double scale) {
  return {.b = in.query.size(0),
          .s = in.context_key.size(1),
          .w = in.anchors.size(1),
          .j = block_size,
          .n = in.query.size(2),
          .m = in.context_key.size(2),
          .e = in.query.size(3),
          .q = in.query.size(1),
          .own = in.query.size(1),
          .own_per_block = block_size,
          .window_tokens = window_tokens,
          .causal = causal,
          .scale = static_cast<float>(scale),
          .query_bqne = pointer(in.query),
          .context_key_bsme = pointer(in.context_key),
          .context_value_bsme = pointer(in.context_value),
          .block_key_bqme = pointer(in.block_key),
          .block_value_bqme = pointer(in.block_value),
          .anchors_bw = in.anchors.const_data_ptr<int64_t>(),
          .keep_bw = in.keep.const_data_ptr<bool>()};
}

struct KernelBlockAttention : torch::autograd::Function<KernelBlockAttention> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& query, const at::Tensor& context_key,
                            const at::Tensor& context_value, const at::Tensor& block_key, const at::Tensor& block_value,
                            const at::Tensor& anchors, const at::Tensor& keep, int64_t block_size, int64_t window_tokens, bool causal,
                            double scale) {
    const KernelInputs in{whole(query),       whole(context_key), whole(context_value), whole(block_key),
                          whole(block_value), whole(anchors),     whole(keep)};
    cuda::BlockAttention arguments = arguments_of(in, block_size, window_tokens, causal, scale);
    at::Tensor out = at::empty(query.sizes(), query.options());
    const at::Tensor log_sum_exp = at::empty({arguments.b, arguments.n, arguments.q}, query.options().dtype(at::kFloat));
    const at::Tensor bounds = at::empty({arguments.b, arguments.q, 4}, query.options().dtype(at::kInt));
    arguments.out_bqne = pointer_to_write(out);
    arguments.log_sum_exp_bmr = log_sum_exp.data_ptr<float>();
    arguments.bounds_bq4 = bounds.data_ptr<int32_t>();
    const at::Tensor magnitude = open_magnitude(out);
    arguments.amax = magnitude_pointer(magnitude);
    check_launch("block_attention", cuda_launchers()->block_attention_forward(arguments, stream_of(query)));
    note_magnitude(out, magnitude);
    context->save_for_backward({in.query, in.context_key, in.context_value, in.block_key, in.block_value, in.anchors, in.keep, out, log_sum_exp,
                                bounds});
    context->saved_data["block_size"] = block_size;
    context->saved_data["window_tokens"] = window_tokens;
    context->saved_data["causal"] = causal;
    context->saved_data["scale"] = scale;
    return out;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const KernelInputs in{saved[0], saved[1], saved[2], saved[3], saved[4], saved[5], saved[6]};
    cuda::BlockAttention arguments =
        arguments_of(in, context->saved_data["block_size"].toInt(), context->saved_data["window_tokens"].toInt(),
                     context->saved_data["causal"].toBool(), context->saved_data["scale"].toDouble());
    const at::Tensor grad_out = whole(gradients[0]);
    const auto floats = grad_out.options().dtype(at::kFloat);
    const int64_t tiles = (arguments.q * (arguments.n / arguments.m) + 63) / 64;
    const at::Tensor along = at::empty({arguments.b, arguments.n, arguments.q}, floats);
    const at::Tensor ranges = at::empty({arguments.b, tiles, 4}, floats.dtype(at::kInt));
    const at::Tensor partial = at::empty({2, cuda::attention_splits(), arguments.b, arguments.s, arguments.m, arguments.e}, floats);
    variable_list result(11);
    for (size_t i = 0; i < 5; ++i) {
      result[i] = at::empty(saved[i].sizes(), saved[i].options());
    }
    arguments.out_bqne = saved[7].mutable_data_ptr();
    arguments.log_sum_exp_bmr = saved[8].data_ptr<float>();
    arguments.bounds_bq4 = saved[9].data_ptr<int32_t>();
    arguments.grad_out_bqne = pointer(grad_out);
    arguments.along_bmr = along.data_ptr<float>();
    arguments.tiles_bt4 = ranges.data_ptr<int32_t>();
    arguments.partial_key = partial.data_ptr<float>();
    arguments.partial_value = partial[1].data_ptr<float>();
    arguments.grad_query_bqne = pointer_to_write(result[0]);
    arguments.grad_context_key_bsme = pointer_to_write(result[1]);
    arguments.grad_context_value_bsme = pointer_to_write(result[2]);
    arguments.grad_block_key_bqme = pointer_to_write(result[3]);
    arguments.grad_block_value_bqme = pointer_to_write(result[4]);
    const at::Tensor of_context = open_magnitude(grad_out), of_own = open_magnitude(grad_out);
    arguments.amax = magnitude_pointer(of_own);
    arguments.amax_context_value = magnitude_pointer(of_context);
    check_launch("block_attention backward", cuda_launchers()->block_attention_backward(arguments, stream_of(grad_out)));
    note_magnitude(result[2], of_context);
    note_magnitude(result[4], of_own);
    return result;
  }
};

void check(const BlockAttention& attention) {
  SF_CHECK(attention.query_bqne.dim() == 4 && attention.context_key_bsme.dim() == 4 && attention.anchors_bw.dim() == 2,
           "block_attention takes query [b, q, n, e], context [b, s, m, e], anchors [b, w]; found {}, {}, {}",
           attention.query_bqne.sizes().vec(), attention.context_key_bsme.sizes().vec(), attention.anchors_bw.sizes().vec());
  const int64_t b = attention.query_bqne.size(0), q = attention.query_bqne.size(1), n = attention.query_bqne.size(2);
  const int64_t e = attention.query_bqne.size(3);
  const int64_t s = attention.context_key_bsme.size(1), m = attention.context_key_bsme.size(2);
  const int64_t w = attention.anchors_bw.size(1);
  SF_CHECK(attention.block_size > 0 && q == w * attention.block_size, "block_attention: {} rows for {} blocks of {}", q, w,
           attention.block_size);
  SF_CHECK(m > 0 && n % m == 0, "block_attention: {} query heads do not share {} key heads evenly", n, m);
  SF_CHECK(attention.window_tokens >= 0 && attention.scale > 0, "block_attention: window {}, scale {}", attention.window_tokens,
           attention.scale);
  SF_CHECK_SHAPE(attention.context_key_bsme, {b, s, m, e});
  SF_CHECK_SHAPE(attention.context_value_bsme, {b, s, m, e});
  SF_CHECK_SHAPE(attention.block_key_bqme, {b, q, m, e});
  SF_CHECK_SHAPE(attention.block_value_bqme, {b, q, m, e});
  SF_CHECK_SHAPE(attention.anchors_bw, {b, w});
  SF_CHECK_SHAPE(attention.keep_bw, {b, w});
  SF_CHECK(attention.keep_bw.scalar_type() == at::kBool && attention.anchors_bw.scalar_type() == at::kLong,
           "block_attention: anchors are int64 and keep is bool");
}

}  // namespace

at::Tensor block_attention(const BlockAttention& attention) {
  check(attention);
  if (runs_on_kernels(attention)) {
    return KernelBlockAttention::apply(attention.query_bqne, attention.context_key_bsme, attention.context_value_bsme,
                                       attention.block_key_bqme, attention.block_value_bqme, attention.anchors_bw, attention.keep_bw,
                                       attention.block_size, attention.window_tokens, attention.causal, attention.scale);
  }
  return block_attention(attention, attention.query_bqne.is_cuda() ? kScoresCuda : kScoresCpu);
}

at::Tensor block_attention(const BlockAttention& attention, int64_t scores_max) {
  check(attention);
  return BlockAttentionFunction::apply(attention.query_bqne, attention.context_key_bsme, attention.context_value_bsme,
                                       attention.block_key_bqme, attention.block_value_bqme, attention.anchors_bw, attention.keep_bw,
                                       attention.block_size, attention.window_tokens, attention.causal, attention.scale, scores_max);
}

}  // namespace sf
