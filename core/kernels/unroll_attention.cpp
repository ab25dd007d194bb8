// Shapes: b batch · s rows · n query heads · m key/value heads · g = n/m query heads per key/value head · e head size · x later uses ·
//         c rows of a chunk · t keys that a chunk can see
//
// A chunk is a run of query rows. With s_j the scores of the causal part and s_x those of the diagonal ones, one softmax goes over both:
//   o = sum_j w_j v_j + sum_x w_x v_x,   w = exp(score - lse).
// Backward keeps lse and o alone and makes the weights again: with D = <do, o>,
//   dv = w do,   ds = w (<do, v> - D) scale,   dq = sum ds k,   dk = ds q,
// for both parts alike; a diagonal key belongs to one row, so its sums go over the query heads of a group only.
#include "core/kernels/unroll_attention.hpp"

#include "core/base/error.hpp"
#include "core/kernels/cuda_library.hpp"
#include "core/kernels/magnitudes.hpp"
#include "core/kernels/products.hpp"
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
constexpr int64_t kScoresCpu = int64_t{1} << 20;    // 4 MiB: near the caches, and short chunks skip more of what they can't see

struct Geometry {
  int64_t b, s, n, m, g, e, x;
  double scale;
  at::ScalarType factor, wide;

  [[nodiscard]] int64_t rows_per_chunk(bool is_cpu) const {
    return std::clamp<int64_t>((is_cpu ? kScoresCpu : kScoresCuda) / std::max<int64_t>(1, b * n * (s + x)), 1, s);
  }
};

// [b, s, m, e] as [b*m, s, e].
at::Tensor by_head(const at::Tensor& keys_bsme, const Geometry& geometry) {
  return keys_bsme.to(geometry.factor).transpose(1, 2).contiguous().view({geometry.b * geometry.m, geometry.s, geometry.e});
}

// Later uses side by side: x times [b, s, m, e] as [b, m, s, x, e]; undefined without any.
at::Tensor stacked(at::TensorList extras, const Geometry& geometry) {
  if (extras.empty()) {
    return {};
  }
  at::Tensor out = at::empty({geometry.b, geometry.m, geometry.s, geometry.x, geometry.e}, extras[0].options().dtype(geometry.factor));
  for (int64_t i = 0; i < geometry.x; ++i) {
    out.select(3, i).copy_(extras[static_cast<size_t>(i)].transpose(1, 2));
  }
  return out;
}

class Chunk {
 public:
  Chunk(const Geometry& geometry, int64_t begin, int64_t end) : g_(geometry), begin_(begin), rows_(end - begin), end_(end) {}

  [[nodiscard]] int64_t begin() const { return begin_; }
  [[nodiscard]] int64_t rows() const { return rows_; }
  [[nodiscard]] int64_t seen() const { return end_; }

  // Rows of [b, s, n, e] as [b*m, c*g, e].
  [[nodiscard]] at::Tensor take(const at::Tensor& rows_bsne) const {
    return rows_bsne.narrow(1, begin_, rows_)
        .to(g_.factor)
        .view({g_.b, rows_, g_.m, g_.g, g_.e})
        .permute({0, 2, 1, 3, 4})
        .contiguous()
        .view({g_.b * g_.m, rows_ * g_.g, g_.e});
  }
  void put(const at::Tensor& by_head, const at::Tensor& rows_bsne) const {
    rows_bsne.narrow(1, begin_, rows_)
        .view({g_.b, rows_, g_.m, g_.g, g_.e})
        .copy_(by_head.view({g_.b, g_.m, rows_, g_.g, g_.e}).permute({0, 2, 1, 3, 4}));
  }
  // The chunk's rows of [b, m, s, x, e] as [b*m*c, x, e].
  [[nodiscard]] at::Tensor diagonal(const at::Tensor& extras) const {
    return extras.narrow(2, begin_, rows_).reshape({g_.b * g_.m * rows_, g_.x, g_.e});
  }
  // [b*m, c*g, y] row by row, [b*m*c, g, y], and back.
  [[nodiscard]] at::Tensor as_rows(const at::Tensor& z) const { return z.reshape({g_.b * g_.m * rows_, g_.g, z.size(-1)}); }
  [[nodiscard]] at::Tensor as_heads(const at::Tensor& z) const { return z.reshape({g_.b * g_.m, rows_ * g_.g, z.size(-1)}); }

  // [b*m, c*g, t + x], keys after a row at minus infinity.
  [[nodiscard]] at::Tensor scores(const at::Tensor& query, const at::Tensor& key, const at::Tensor& extra_keys) const {
    at::Tensor causal = wide_bmm(query, key.narrow(1, 0, end_).transpose(1, 2), g_.factor).mul_(g_.scale);
    const auto integers = key.options().dtype(at::kLong);
    const at::Tensor hidden = at::gt(at::arange(begin_, end_, integers).unsqueeze(0), at::arange(begin_, end_, integers).unsqueeze(1));
    causal.view({g_.b * g_.m, rows_, g_.g, end_})
        .narrow(3, begin_, rows_)
        .masked_fill_(hidden.view({1, rows_, 1, rows_}), -std::numeric_limits<double>::infinity());
    if (!extra_keys.defined()) {
      return causal;
    }
    const at::Tensor own = wide_bmm(as_rows(query), diagonal(extra_keys).transpose(1, 2), g_.factor).mul_(g_.scale);
    return at::cat({causal, as_heads(own)}, 2);
  }

 private:
  const Geometry& g_;
  int64_t begin_, rows_, end_;
};

struct UnrollAttentionFunction : torch::autograd::Function<UnrollAttentionFunction> {
  static Geometry geometry_of(const at::Tensor& query, const at::Tensor& key, size_t extras, double scale) {
    const int64_t n = query.size(2), m = key.size(2);
    return {query.size(0),     query.size(1), n, m, n / m, query.size(3), static_cast<int64_t>(extras), scale, factor_type(query),
            wide_type(query.scalar_type())};
  }

  static at::Tensor forward(AutogradContext* context, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            at::TensorList extra_keys, at::TensorList extra_values, double scale) {
    const Geometry geometry = geometry_of(query, key, extra_keys.size(), scale);
    const at::Tensor keys = by_head(key, geometry), values = by_head(value, geometry);
    const at::Tensor later_keys = stacked(extra_keys, geometry), later_values = stacked(extra_values, geometry);
    at::Tensor out = at::empty(query.sizes(), query.options());
    at::Tensor log_sum_exp = at::empty({geometry.b * geometry.m, geometry.s * geometry.g}, query.options().dtype(geometry.wide));
    const int64_t step = geometry.rows_per_chunk(query.is_cpu());
    for (int64_t begin = 0; begin < geometry.s; begin += step) {
      const Chunk chunk(geometry, begin, std::min(geometry.s, begin + step));
      at::Tensor weights = chunk.scores(chunk.take(query), keys, later_keys);
      const at::Tensor lse = weights.logsumexp(2);
      log_sum_exp.narrow(1, begin * geometry.g, chunk.rows() * geometry.g).copy_(lse);
      weights.sub_(lse.unsqueeze(2)).exp_();
      at::Tensor sum = wide_bmm(weights.narrow(2, 0, chunk.seen()), values.narrow(1, 0, chunk.seen()), geometry.factor);
      if (geometry.x > 0) {
        const at::Tensor own = chunk.as_rows(weights.narrow(2, chunk.seen(), geometry.x));
        sum.add_(chunk.as_heads(wide_bmm(own, chunk.diagonal(later_values), geometry.factor)));
      }
      chunk.put(sum, out);
    }
    variable_list saved = {query, key, value, out, log_sum_exp};
    saved.insert(saved.end(), extra_keys.begin(), extra_keys.end());
    saved.insert(saved.end(), extra_values.begin(), extra_values.end());
    context->save_for_backward(saved);
    context->saved_data["scale"] = scale;
    return out;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &query = saved[0], &key = saved[1], &out = saved[3], &log_sum_exp = saved[4];
    const size_t x = (saved.size() - 5) / 2;
    const Geometry geometry = geometry_of(query, key, x, context->saved_data["scale"].toDouble());
    const at::Tensor keys = by_head(key, geometry), values = by_head(saved[2], geometry);
    const at::Tensor later_keys = stacked(at::TensorList(saved).slice(5, x), geometry);
    const at::Tensor later_values = stacked(at::TensorList(saved).slice(5 + x, x), geometry);
    const auto wide_options = query.options().dtype(geometry.wide);
    const at::Tensor grad_out = gradients[0].contiguous();

    at::Tensor grad_query = at::empty(query.sizes(), query.options());
    at::Tensor grad_keys = at::zeros(keys.sizes(), wide_options), grad_values = at::zeros(keys.sizes(), wide_options);
    at::Tensor grad_later_keys, grad_later_values;
    if (x > 0) {
      grad_later_keys = at::empty(later_keys.sizes(), wide_options);
      grad_later_values = at::empty(later_keys.sizes(), wide_options);
    }
    const int64_t step = geometry.rows_per_chunk(query.is_cpu());
    for (int64_t begin = 0; begin < geometry.s; begin += step) {
      const Chunk chunk(geometry, begin, std::min(geometry.s, begin + step));
      const int64_t t = chunk.seen();
      const at::Tensor q = chunk.take(query), go = chunk.take(grad_out);
      const at::Tensor d = at::mul(go.to(geometry.wide), chunk.take(out)).sum(2, /*keepdim=*/true);
      at::Tensor weights = chunk.scores(q, keys, later_keys);
      weights.sub_(log_sum_exp.narrow(1, begin * geometry.g, chunk.rows() * geometry.g).unsqueeze(2)).exp_();
      const at::Tensor causal = weights.narrow(2, 0, t);
      grad_values.narrow(1, 0, t).add_(wide_bmm(causal.transpose(1, 2), go, geometry.factor));
      at::Tensor grad_scores = wide_bmm(go, values.narrow(1, 0, t).transpose(1, 2), geometry.factor);
      grad_scores.sub_(d).mul_(causal).mul_(geometry.scale);
      at::Tensor grad_q = wide_bmm(grad_scores, keys.narrow(1, 0, t), geometry.factor);
      grad_keys.narrow(1, 0, t).add_(wide_bmm(grad_scores.transpose(1, 2), q, geometry.factor));
      if (x > 0) {
        const at::Tensor own = chunk.as_rows(weights.narrow(2, t, geometry.x)), go_rows = chunk.as_rows(go);
        at::Tensor grad_own = wide_bmm(go_rows, chunk.diagonal(later_values).transpose(1, 2), geometry.factor);
        grad_own.sub_(chunk.as_rows(d)).mul_(own).mul_(geometry.scale);
        grad_q.add_(chunk.as_heads(wide_bmm(grad_own, chunk.diagonal(later_keys), geometry.factor)));
        const auto put = [&](const at::Tensor& rows, at::Tensor& into) {
          into.narrow(2, begin, chunk.rows()).copy_(rows.view({geometry.b, geometry.m, chunk.rows(), geometry.x, geometry.e}));
        };
        put(wide_bmm(grad_own.transpose(1, 2), chunk.as_rows(q), geometry.factor), grad_later_keys);
        put(wide_bmm(own.transpose(1, 2), go_rows, geometry.factor), grad_later_values);
      }
      chunk.put(grad_q, grad_query);
    }

    const auto as_given = [&](const at::Tensor& by_head_gradient) {
      return by_head_gradient.view({geometry.b, geometry.m, geometry.s, geometry.e}).transpose(1, 2).to(query.scalar_type());
    };
    variable_list result = {grad_query, as_given(grad_keys), as_given(grad_values)};
    for (const at::Tensor* later : {&grad_later_keys, &grad_later_values}) {
      for (size_t i = 0; i < x; ++i) {
        result.push_back(later->select(3, static_cast<int64_t>(i)).transpose(1, 2).to(query.scalar_type()));
      }
    }
    result.emplace_back();
    return result;
  }
};

// On a GPU the kernels of block attention do it: a block of one row sees the context up to itself, and the later uses' keys of its row are its own ones.
bool runs_on_kernels(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, at::TensorList extra_keys, at::TensorList extra_values) {
  if (!has_kernels({query, key, value})) {
    return false;
  }
  for (const at::TensorList& extras : {extra_keys, extra_values}) {
    for (const at::Tensor& extra : extras) {
      if (!has_kernels({query, extra})) {
        return false;
      }
    }
  }
  if (const char* why = slow_attention(query.scalar_type() == at::kBFloat16, query.size(3))) {
    note_slow_path("unroll_attention", why);
    return false;
  }
  return query.numel() / query.size(0) < int64_t{1} << 31;
}

struct KernelUnrollAttention : torch::autograd::Function<KernelUnrollAttention> {
  static cuda::BlockAttention arguments_of(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& later_keys,
                                           const at::Tensor& later_values, int64_t x, double scale) {
    const int64_t s = query.size(1);
    return {.b = query.size(0),
            .s = s,
            .w = s,
            .j = 1,
            .n = query.size(2),
            .m = key.size(2),
            .e = query.size(3),
            .q = s,
            .own = s * x,
            .own_per_block = x,
            .window_tokens = 0,
            .causal = false,
            .scale = static_cast<float>(scale),
            .query_bqne = pointer(query),
            .context_key_bsme = pointer(key),
            .context_value_bsme = pointer(value),
            .block_key_bqme = pointer(later_keys),
            .block_value_bqme = pointer(later_values)};
  }

  static at::Tensor forward(AutogradContext* context, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            at::TensorList extra_keys, at::TensorList extra_values, double scale) {
    const at::Tensor q = whole(query), k = whole(key), v = whole(value);
    const auto x = static_cast<int64_t>(extra_keys.size());
    // Beside each other, [b, s, x, m, e].
    const at::Tensor later_keys = x > 0 ? at::stack(extra_keys, 2) : at::Tensor(), later_values = x > 0 ? at::stack(extra_values, 2) : at::Tensor();
    cuda::BlockAttention arguments = arguments_of(q, k, v, later_keys, later_values, x, scale);
    at::Tensor out = at::empty(q.sizes(), q.options());
    const at::Tensor log_sum_exp = at::empty({arguments.b, arguments.n, arguments.q}, q.options().dtype(at::kFloat));
    const at::Tensor bounds = at::empty({arguments.b, arguments.q, 4}, q.options().dtype(at::kInt));
    arguments.out_bqne = pointer_to_write(out);
    arguments.log_sum_exp_bmr = log_sum_exp.data_ptr<float>();
    arguments.bounds_bq4 = bounds.data_ptr<int32_t>();
    const at::Tensor magnitude = open_magnitude(out);
    arguments.amax = magnitude_pointer(magnitude);
    check_launch("unroll_attention", cuda_launchers()->block_attention_forward(arguments, stream_of(q)));
    note_magnitude(out, magnitude);
    context->save_for_backward({q, k, v, later_keys, later_values, out, log_sum_exp, bounds});
    context->saved_data["x"] = x;
    context->saved_data["scale"] = scale;
    return out;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const int64_t x = context->saved_data["x"].toInt();
    cuda::BlockAttention arguments = arguments_of(saved[0], saved[1], saved[2], saved[3], saved[4], x, context->saved_data["scale"].toDouble());
    const at::Tensor grad_out = whole(gradients[0]);
    const auto floats = grad_out.options().dtype(at::kFloat);
    const int64_t tiles = (arguments.q * (arguments.n / arguments.m) + 63) / 64;
    const at::Tensor along = at::empty({arguments.b, arguments.n, arguments.q}, floats);
    const at::Tensor ranges = at::empty({arguments.b, tiles, 4}, floats.dtype(at::kInt));
    const at::Tensor partial = at::empty({2, cuda::attention_splits(), arguments.b, arguments.s, arguments.m, arguments.e}, floats);
    variable_list made(5);
    for (size_t i = 0; i < 5; ++i) {
      made[i] = saved[i].defined() ? at::empty(saved[i].sizes(), saved[i].options()) : at::Tensor();
    }
    arguments.out_bqne = saved[5].mutable_data_ptr();
    arguments.log_sum_exp_bmr = saved[6].data_ptr<float>();
    arguments.bounds_bq4 = saved[7].data_ptr<int32_t>();
    arguments.grad_out_bqne = pointer(grad_out);
    arguments.along_bmr = along.data_ptr<float>();
    arguments.tiles_bt4 = ranges.data_ptr<int32_t>();
    arguments.partial_key = partial.data_ptr<float>();
    arguments.partial_value = partial[1].data_ptr<float>();
    arguments.grad_query_bqne = pointer_to_write(made[0]);
    arguments.grad_context_key_bsme = pointer_to_write(made[1]);
    arguments.grad_context_value_bsme = pointer_to_write(made[2]);
    arguments.grad_block_key_bqme = pointer_to_write(made[3]);
    arguments.grad_block_value_bqme = pointer_to_write(made[4]);
    check_launch("unroll_attention backward", cuda_launchers()->block_attention_backward(arguments, stream_of(grad_out)));
    variable_list result = {made[0], made[1], made[2]};
    for (const size_t later : {3, 4}) {
      for (int64_t i = 0; i < x; ++i) {
        result.push_back(made[later].select(2, i));
      }
    }
    result.emplace_back();
    return result;
  }
};

}  // namespace

at::Tensor unroll_attention(const UnrollAttention& attention) {
  const at::Tensor &query = attention.query_bsne, &key = attention.key_bsme;
  SF_CHECK(query.dim() == 4 && key.dim() == 4, "unroll_attention takes queries [b, s, n, e] and keys [b, s, m, e], found {} and {}",
           query.sizes().vec(), key.sizes().vec());
  const int64_t b = query.size(0), s = query.size(1), e = query.size(3), m = key.size(2);
  SF_CHECK(s > 0 && m > 0 && query.size(2) % m == 0, "unroll_attention: {} query heads do not share {} key heads evenly, {} rows", query.size(2), m, s);
  SF_CHECK_SHAPE(key, {b, s, m, e});
  SF_CHECK_SHAPE(attention.value_bsme, {b, s, m, e});
  SF_CHECK(attention.extra_keys_bsme.size() == attention.extra_values_bsme.size(), "unroll_attention: {} extra keys, {} extra values",
           attention.extra_keys_bsme.size(), attention.extra_values_bsme.size());
  for (const auto* extras : {&attention.extra_keys_bsme, &attention.extra_values_bsme}) {
    for (const at::Tensor& extra : *extras) {
      SF_CHECK_SHAPE(extra, {b, s, m, e});
    }
  }
  if (runs_on_kernels(query, key, attention.value_bsme, at::TensorList(attention.extra_keys_bsme), at::TensorList(attention.extra_values_bsme))) {
    return KernelUnrollAttention::apply(query, key, attention.value_bsme, at::TensorList(attention.extra_keys_bsme),
                                        at::TensorList(attention.extra_values_bsme), attention.scale);
  }
  return UnrollAttentionFunction::apply(query.contiguous(), key, attention.value_bsme, at::TensorList(attention.extra_keys_bsme),
                                        at::TensorList(attention.extra_values_bsme), attention.scale);
}

}  // namespace sf
