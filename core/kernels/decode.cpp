#include "core/kernels/decode.hpp"

#include "core/base/error.hpp"
#include "core/kernels/crew.hpp"
#include "core/kernels/cuda/decode_launchers.hpp"
#include "core/kernels/cuda_library.hpp"
#include "core/kernels/row_tiles.hpp"
#include "core/kernels/shape_check.hpp"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace sf {
namespace {

const cuda::DecodeLaunchers* decode_launchers() {
  static const cuda::DecodeLaunchers* found = [] {
    if (engine_cuda_handle() == nullptr) return static_cast<const cuda::DecodeLaunchers*>(nullptr);
    const auto entry = reinterpret_cast<const cuda::DecodeLaunchers* (*)()>(dlsym(engine_cuda_handle(), "sf_cuda_decode_launchers_v1"));
    return entry == nullptr ? nullptr : entry();
  }();
  return found;
}

struct Sizes {
  int64_t b, n, m, e, f, c;
};

Sizes sizes_of(const DecodeAttention& a) {
  const int64_t heads = a.query_heads + 2 * a.key_heads;
  const Sizes s{a.qkv_bx.size(0), a.query_heads, a.key_heads, a.qkv_bx.size(1) / heads, a.cos_bf.size(1), a.keys_bmce.size(2)};
  SF_CHECK(s.m > 0 && s.n % s.m == 0 && s.e * heads == a.qkv_bx.size(1) && 2 * s.f <= s.e, "{} values for {} query and {} key heads, {} rotated pairs", a.qkv_bx.size(1), s.n, s.m, s.f);
  SF_CHECK(a.tokens > 0 && s.b % a.tokens == 0, "{} rows for {} tokens of each sequence", s.b, a.tokens);
  const int64_t sequences = a.cache_rows.empty() ? s.b / a.tokens : a.keys_bmce.size(0);
  SF_CHECK(a.cache_rows.empty() || static_cast<int64_t>(a.cache_rows.size()) == s.b / a.tokens, "{} rows of a cache for {} sequences", a.cache_rows.size(), s.b / a.tokens);
  SF_CHECK_SHAPE(a.keys_bmce, {sequences, s.m, s.c, s.e});
  SF_CHECK_SHAPE(a.values_bmce, {sequences, s.m, s.c, s.e});
  SF_CHECK_SHAPE(a.cos_bf, {s.b, s.f});
  SF_CHECK_SHAPE(a.sin_bf, {s.b, s.f});
  SF_CHECK_SHAPE(a.positions_b, {s.b});
  return s;
}

at::Tensor normed(const at::Tensor& x_bne, const at::Tensor& weight_e, double eps) {
  if (!weight_e.defined()) return x_bne;
  const at::Tensor wide = x_bne.to(at::kFloat);
  return (wide * at::rsqrt(wide.square().mean(-1, /*keepdim=*/true).add_(eps))).to(x_bne.scalar_type()).mul_(weight_e);
}

at::Tensor turned(const at::Tensor& x_bne, const at::Tensor& cos_bf, const at::Tensor& sin_bf) {
  const int64_t f = cos_bf.size(1), e = x_bne.size(2);
  const at::Tensor cos = cos_bf.to(x_bne.scalar_type()).unsqueeze(1), sin = sin_bf.to(x_bne.scalar_type()).unsqueeze(1);
  const at::Tensor first = x_bne.narrow(2, 0, f), second = x_bne.narrow(2, f, f);
  std::vector<at::Tensor> parts{first * cos + second.neg() * sin, second * cos + first * sin};
  if (2 * f < e) parts.push_back(x_bne.narrow(2, 2 * f, e - 2 * f));
  return at::cat(parts, 2);
}

// A head of a new token: normed if it has a weight, turned if it has angles.
void make_head(const float* from, const float* weight, float eps, const float* cos, const float* sin, int64_t e, int64_t f, float scale, float* to) {
  float inverse = 1;
  if (weight != nullptr) {
    float squares = 0;
    for (int64_t i = 0; i < e; ++i) squares += from[i] * from[i];
    inverse = 1 / std::sqrt(squares / static_cast<float>(e) + eps);
  }
  for (int64_t i = 0; i < e; ++i) to[i] = weight != nullptr ? from[i] * inverse * weight[i] : from[i];
  for (int64_t i = 0; i < f; ++i) {
    const float x = to[i], y = to[i + f];
    to[i] = x * cos[i] - y * sin[i];
    to[i + f] = y * cos[i] + x * sin[i];
  }
  if (scale != 1) {
    for (int64_t i = 0; i < e; ++i) to[i] *= scale;
  }
}

// A task is a sequence and one of its key/value heads: it writes the new keys and values and attends with all queries that share them, so no two tasks touch the same memory
// and what comes out does not depend on the number of threads.
at::Tensor decode_attention_few(const DecodeAttention& a) {
  const Sizes s = sizes_of(a);
  SF_CHECK(a.qkv_bx.is_contiguous() && a.keys_bmce.is_contiguous() && a.values_bmce.is_contiguous() && a.cos_bf.is_contiguous() && a.sin_bf.is_contiguous() &&
               a.positions_b.is_contiguous() && a.cos_bf.scalar_type() == at::kFloat && a.positions_b.scalar_type() == at::kLong && a.keys_bmce.scalar_type() == at::kFloat,
           "decode_attention's tensors are not as it reads them");
  const at::Tensor out_bx = at::empty({s.b, s.n * s.e}, a.qkv_bx.options());
  const auto *qkv = a.qkv_bx.const_data_ptr<float>(), *cos = a.cos_bf.const_data_ptr<float>(), *sin = a.sin_bf.const_data_ptr<float>();
  const float* query_weight = a.query_weight_e.defined() ? a.query_weight_e.const_data_ptr<float>() : nullptr;
  const float* key_weight = a.key_weight_e.defined() ? a.key_weight_e.const_data_ptr<float>() : nullptr;
  const auto* positions = a.positions_b.const_data_ptr<int64_t>();
  auto *keys = a.keys_bmce.mutable_data_ptr<float>(), *values = a.values_bmce.mutable_data_ptr<float>(), *out = out_bx.mutable_data_ptr<float>();
  const int64_t t = a.tokens, group = s.n / s.m, queries = group * t;
  const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(s.e))), eps = static_cast<float>(a.eps);
  for (int64_t row = 0; row < s.b; ++row) SF_CHECK(positions[row] >= 0 && positions[row] < s.c, "token {} in a cache for {}", positions[row], s.c);
  in_crew(s.b / t * s.m, at::get_num_threads(), [&](int64_t task) {
    // A thread's own, kept from task to task.
    thread_local std::vector<float> query, found, scores;
    thread_local std::vector<int64_t> seen;
    query.resize(static_cast<size_t>(queries * s.e));
    found.resize(query.size());
    seen.resize(static_cast<size_t>(queries));
    const int64_t sequence = task / s.m, head = task % s.m, cache_row = a.cache_rows.empty() ? sequence : a.cache_rows[static_cast<size_t>(sequence)];
    float *head_keys = keys + (cache_row * s.m + head) * s.c * s.e, *head_values = values + (cache_row * s.m + head) * s.c * s.e;
    int64_t most = 0;
    for (int64_t j = 0; j < t; ++j) {
      const int64_t row = sequence * t + j, position = positions[row];
      const float *from = qkv + row * (s.n + 2 * s.m) * s.e, *row_cos = cos + row * s.f, *row_sin = sin + row * s.f;
      make_head(from + (s.n + head) * s.e, key_weight, eps, row_cos, row_sin, s.e, s.f, 1, head_keys + position * s.e);
      std::copy_n(from + (s.n + s.m + head) * s.e, s.e, head_values + position * s.e);
      for (int64_t g = 0; g < group; ++g) {
        make_head(from + (head * group + g) * s.e, query_weight, eps, row_cos, row_sin, s.e, s.f, scale, query.data() + (j * group + g) * s.e);
        seen[static_cast<size_t>(j * group + g)] = position + 1;
      }
      most = std::max(most, position + 1);
    }
    scores.resize(std::max(scores.size(), static_cast<size_t>(queries * score_stride(most))));
    row_tiles()->attend(query.data(), queries, s.e, head_keys, head_values, seen.data(), scores.data(), found.data());
    for (int64_t j = 0; j < t; ++j) std::copy_n(found.data() + j * group * s.e, group * s.e, out + ((sequence * t + j) * s.n + head * group) * s.e);
  });
  return out_bx;
}

}  // namespace

bool can_decode_few(const at::Tensor& like, int64_t head_size) {
  return like.is_cpu() && like.scalar_type() == at::kFloat && head_size % kHeadGrain == 0 && row_tiles() != nullptr;
}

at::Tensor decode_attention_aten(const DecodeAttention& a) {
  const Sizes s = sizes_of(a);
  SF_CHECK(a.tokens == 1 && a.cache_rows.empty(), "{} tokens of each sequence", a.tokens);
  const at::Tensor qkv = a.qkv_bx.view({s.b, s.n + 2 * s.m, s.e});
  const at::Tensor query = turned(normed(qkv.narrow(1, 0, s.n), a.query_weight_e, a.eps), a.cos_bf, a.sin_bf);
  const at::Tensor key = turned(normed(qkv.narrow(1, s.n, s.m), a.key_weight_e, a.eps), a.cos_bf, a.sin_bf);
  const at::Tensor place = a.positions_b.view({s.b, 1, 1, 1}).expand({s.b, s.m, 1, s.e});
  a.keys_bmce.scatter_(2, place, key.unsqueeze(2));
  a.values_bmce.scatter_(2, place, qkv.narrow(1, s.n + s.m, s.m).unsqueeze(2));
  const at::Tensor is_hidden = at::arange(s.c, a.positions_b.options()).unsqueeze(0) > a.positions_b.unsqueeze(1);
  const at::Tensor mask = at::zeros({s.b, s.c}, a.qkv_bx.options()).masked_fill_(is_hidden, -std::numeric_limits<double>::infinity());
  const int64_t group = s.n / s.m;
  const at::Tensor attended = at::scaled_dot_product_attention(query.reshape({s.b, s.m, group, s.e}), a.keys_bmce, a.values_bmce,
                                                               mask.view({s.b, 1, 1, s.c}).expand({s.b, 1, group, s.c}), 0.0, false);
  return attended.reshape({s.b, s.n * s.e});
}

at::Tensor decode_attention(const DecodeAttention& a) {
  if (can_decode_few(a.qkv_bx, sizes_of(a).e)) return decode_attention_few(a);
  if (!has_kernels({a.qkv_bx, a.keys_bmce, a.values_bmce, a.query_weight_e, a.key_weight_e}) || decode_launchers() == nullptr) return decode_attention_aten(a);
  SF_CHECK(a.tokens == 1 && a.cache_rows.empty(), "{} tokens of each sequence", a.tokens);
  const Sizes s = sizes_of(a);
  if (s.e != 64 && s.e != 128) {
    note_slow_path("decode_attention", "its kernel takes head sizes of 64 and 128");
    return decode_attention_aten(a);
  }
  SF_CHECK(a.qkv_bx.is_contiguous() && a.keys_bmce.is_contiguous() && a.values_bmce.is_contiguous() && a.cos_bf.is_contiguous() && a.sin_bf.is_contiguous() &&
               a.cos_bf.scalar_type() == at::kFloat && a.positions_b.scalar_type() == at::kLong && a.positions_b.is_cuda(),
           "decode_attention's tensors are not as its kernel reads them");
  at::Tensor out = at::empty({s.b, s.n * s.e}, a.qkv_bx.options());
  check_launch("decode_attention", decode_launchers()->attention({.type = kernel_type(a.qkv_bx), .b = s.b, .n = s.n, .m = s.m, .e = s.e, .f = s.f, .capacity = s.c, .eps = a.eps,
                                                                  .scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(s.e))), .qkv_bxe = pointer(a.qkv_bx),
                                                                  .query_weight_e = pointer(a.query_weight_e), .key_weight_e = pointer(a.key_weight_e),
                                                                  .cos_bf = a.cos_bf.const_data_ptr<float>(), .sin_bf = a.sin_bf.const_data_ptr<float>(),
                                                                  .positions_b = a.positions_b.const_data_ptr<int64_t>(), .keys_bmce = pointer_to_write(a.keys_bmce),
                                                                  .values_bmce = pointer_to_write(a.values_bmce), .out_bne = pointer_to_write(out)},
                                                                 stream_of(out)));
  return out;
}

StepStart decode_start(const at::Tensor& ids_b, const at::Tensor& positions_b, const at::Tensor& embedding_vh, const at::Tensor& inverse_frequencies_f, double scaling) {
  const int64_t b = ids_b.size(0), h = embedding_vh.size(1), f = inverse_frequencies_f.size(0);
  SF_CHECK_SHAPE(positions_b, {b});
  if (has_kernels({embedding_vh}) && decode_launchers() != nullptr && ids_b.is_cuda() && ids_b.is_contiguous() && positions_b.is_cuda() && positions_b.is_contiguous() &&
      embedding_vh.is_contiguous()) {
    const auto floats = embedding_vh.options().dtype(at::kFloat);
    StepStart made{at::empty({b, h}, embedding_vh.options()), at::empty({b, f}, floats), at::empty({b, f}, floats)};
    check_launch("decode_start", decode_launchers()->start({.type = kernel_type(embedding_vh), .b = b, .h = h, .f = f, .scaling = static_cast<float>(scaling), .ids_b = ids_b.const_data_ptr<int64_t>(),
                                                            .positions_b = positions_b.const_data_ptr<int64_t>(), .embedding_vh = pointer(embedding_vh),
                                                            .inverse_frequencies_f = inverse_frequencies_f.const_data_ptr<float>(), .x_bh = pointer_to_write(made.x_bh),
                                                            .cos_bf = made.cos_bf.mutable_data_ptr<float>(), .sin_bf = made.sin_bf.mutable_data_ptr<float>()}, stream_of(made.x_bh)));
    return made;
  }
  const at::Tensor angle_bf = positions_b.to(at::kFloat).unsqueeze(1) * inverse_frequencies_f;
  const auto type = embedding_vh.scalar_type();
  return {at::embedding(embedding_vh, ids_b), (angle_bf.cos() * scaling).to(type).to(at::kFloat), (angle_bf.sin() * scaling).to(type).to(at::kFloat)};
}

void decode_choose(const at::Tensor& logits_bv, const at::Tensor& said_b, const at::Tensor& ids_b, const at::Tensor& positions_b) {
  const int64_t b = logits_bv.size(0), v = logits_bv.size(1);
  for (const at::Tensor& each : {said_b, ids_b, positions_b}) SF_CHECK_SHAPE(each, {b});
  if (has_kernels({logits_bv}) && decode_launchers() != nullptr && logits_bv.is_contiguous() && said_b.is_contiguous() && ids_b.is_contiguous() && positions_b.is_contiguous()) {
    check_launch("decode_choose", decode_launchers()->choose({.type = kernel_type(logits_bv), .b = b, .v = v, .logits_bv = pointer(logits_bv), .said_b = said_b.mutable_data_ptr<int64_t>(),
                                                              .ids_b = ids_b.mutable_data_ptr<int64_t>(), .positions_b = positions_b.mutable_data_ptr<int64_t>()}, stream_of(logits_bv)));
    return;
  }
  said_b.copy_(logits_bv.argmax(-1));
  ids_b.copy_(said_b);
  positions_b.add_(1);
}

at::Tensor decode_gate(const at::Tensor& gate_up_b2i) {
  const int64_t b = gate_up_b2i.size(0), i = gate_up_b2i.size(1) / 2;
  if (has_kernels({gate_up_b2i}) && decode_launchers() != nullptr && i % 8 == 0 && gate_up_b2i.is_contiguous()) {
    at::Tensor out = at::empty({b, i}, gate_up_b2i.options());
    check_launch("decode_gate", decode_launchers()->gate({.type = kernel_type(out), .b = b, .i = i, .gate_up_b2i = pointer(gate_up_b2i), .out_bi = pointer_to_write(out)}, stream_of(out)));
    return out;
  }
  return at::silu(gate_up_b2i.narrow(1, 0, i)).mul_(gate_up_b2i.narrow(1, i, i));
}

}  // namespace sf
