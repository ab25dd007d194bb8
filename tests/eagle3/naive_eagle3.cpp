#include "tests/eagle3/naive_eagle3.hpp"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>

namespace sf::testing {
namespace {

at::Tensor rms(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return at::mul(at::mul(x, at::rsqrt(x.pow(2).mean(-1, true).add(eps))), weight);
}

at::Tensor rotate(const NaiveDraft& draft, const at::Tensor& x_bsne, int64_t offset) {
  const int64_t half = x_bsne.size(3) / 2, s = x_bsne.size(1);
  const at::Tensor frequency = at::tensor(at::ArrayRef<float>(draft.inverse_frequencies), at::TensorOptions().dtype(at::kFloat));
  const at::Tensor angle = at::mul(at::arange(offset, offset + s, at::TensorOptions().dtype(at::kFloat)).unsqueeze(1), frequency);
  const at::Tensor both = at::cat({angle, angle}, 1).view({1, s, 1, 2 * half});
  const at::Tensor turned = at::cat({x_bsne.narrow(3, half, half).neg(), x_bsne.narrow(3, 0, half)}, 3);
  return at::add(at::mul(x_bsne, both.cos().mul(draft.attention_scaling)), at::mul(turned, both.sin().mul(draft.attention_scaling)));
}

struct Cache {
  std::vector<at::Tensor> keys, values;  // [b, s, n, e], heads repeated
};

class Layer {
 public:
  explicit Layer(const NaiveDraft& draft) : d_(draft) {}

  const at::Tensor& w(const std::string& name) const { return d_.weights.at(name); }

  at::Tensor fuse(const at::Tensor& features) const {
    at::Tensor x = features;
    if (d_.fc_norm) {
      const int64_t width = x.size(-1) / 3;
      std::vector<at::Tensor> parts;
      for (int64_t n = 0; n < 3; ++n) {
        parts.push_back(rms(x.narrow(-1, n * width, width), w("fc_norm." + std::to_string(n) + ".weight"), d_.eps));
      }
      x = at::cat(parts, -1);
    }
    return at::matmul(x, w("fc.weight").t());
  }

  // One use over all rows; the cache grows by it.
  at::Tensor use(const at::Tensor& h, const at::Tensor& embedded, int64_t k, Cache& cache) const {
    const int64_t b = h.size(0), s = h.size(1), groups = d_.heads / d_.kv_heads;
    const at::Tensor x = at::cat({rms(embedded, w("midlayer.input_layernorm.weight"), d_.eps), rms(h, w("midlayer.hidden_norm.weight"), d_.eps)}, -1);
    const auto project = [&](const char* name, int64_t heads) {
      return at::matmul(x, w(std::string("midlayer.self_attn.") + name + ".weight").t()).view({b, s, heads, d_.head_dim});
    };
    const at::Tensor q = rotate(d_, project("q_proj", d_.heads), k);
    cache.keys.push_back(rotate(d_, project("k_proj", d_.kv_heads), k).repeat_interleave(groups, 2));
    cache.values.push_back(project("v_proj", d_.kv_heads).repeat_interleave(groups, 2));
    const at::Tensor keys = at::cat(cache.keys, 1), values = at::cat(cache.values, 1);
    at::Tensor allowed = at::zeros({s, (k + 1) * s}, at::TensorOptions().dtype(at::kBool));
    for (int64_t i = 0; i < s; ++i) {
      allowed[i].narrow(0, 0, i + 1).fill_(true);
      for (int64_t e = 1; e <= k; ++e) {
        allowed[i][e * s + i] = true;
      }
    }
    const at::Tensor scores = at::matmul(q.transpose(1, 2), keys.transpose(1, 2).transpose(2, 3)).div(std::sqrt(static_cast<double>(d_.head_dim)));
    const at::Tensor weights = scores.masked_fill(allowed.logical_not(), -std::numeric_limits<double>::infinity()).softmax(-1);
    const at::Tensor attended = at::matmul(weights, values.transpose(1, 2)).transpose(1, 2).reshape({b, s, d_.heads * d_.head_dim});
    const at::Tensor after = at::add(h, at::matmul(attended, w("midlayer.self_attn.o_proj.weight").t()));
    const at::Tensor u = rms(after, w("midlayer.post_attention_layernorm.weight"), d_.eps);
    const at::Tensor gated = at::mul(at::silu(at::matmul(u, w("midlayer.mlp.gate_proj.weight").t())), at::matmul(u, w("midlayer.mlp.up_proj.weight").t()));
    return at::add(after, at::matmul(gated, w("midlayer.mlp.down_proj.weight").t()));
  }

  at::Tensor logits(const at::Tensor& h) const {
    return at::matmul(d_.norm_output ? rms(h, w("norm.weight"), d_.eps) : h, w("lm_head.weight").t());
  }

  at::Tensor embed(const at::Tensor& ids) const { return at::embedding(w("embed_tokens.weight"), ids); }

 private:
  const NaiveDraft& d_;
};

// Drops the first column and appends a zero.
at::Tensor shifted(const at::Tensor& x_bs) { return at::cat({x_bs.narrow(1, 1, x_bs.size(1) - 1), at::zeros_like(x_bs.narrow(1, 0, 1))}, 1); }

}  // namespace

NaiveResult naive_unroll(const NaiveDraft& draft, const NaiveBatch& batch) {
  const Layer layer(draft);
  const int64_t b = batch.input_ids_bs.size(0), s = batch.input_ids_bs.size(1);
  at::Tensor ids = shifted(batch.input_ids_bs);
  at::Tensor state = shifted(batch.last_state_bsx);
  const at::Tensor z = at::matmul(state, draft.target_head_vx.t());
  at::Tensor best = z.argmax(-1);
  const at::Tensor kept = z.index_select(2, draft.tokens_w);
  at::Tensor expected = kept.softmax(-1), truth = at::sub(kept, z.logsumexp(-1, true)).exp();
  at::Tensor counted = batch.counted_bs.to(at::kFloat);
  at::Tensor mask = at::mul(at::isin(best, draft.tokens_w).to(at::kFloat), counted);

  NaiveResult result;
  Cache cache;
  at::Tensor h = layer.fuse(batch.features_bsx);
  at::Tensor total = at::zeros({});
  for (int64_t k = 0; k < draft.uses; ++k) {
    h = layer.use(h, layer.embed(ids), k, cache);
    const at::Tensor logits = layer.logits(h);
    const at::Tensor accepted = at::minimum(truth, logits.softmax(-1)).sum(-1);
    const auto mean = [&](const at::Tensor& x) { return at::mul(x, mask).sum().div(mask.sum().clamp_min(1e-8)); };
    const at::Tensor kl = at::mul(at::mul(expected, logits.log_softmax(-1)).sum(-1).neg(), mask).sum().div(static_cast<double>(b * s));
    at::Tensor loss = kl;
    if (draft.loss == DistillLoss::alpha) {
      loss = mean(at::where(at::gt(accepted, 0), accepted, at::ones_like(accepted)).log()).neg();
    } else if (draft.loss == DistillLoss::lambda) {
      const at::Tensor weight = mean(accepted).detach().mul(-draft.kl_decay).exp().mul(draft.kl_scale);
      loss = at::add(at::mul(weight, kl), at::mul(at::rsub(weight, 1), at::rsub(mean(accepted), 1)));
    }
    total = at::add(total, loss.mul(std::pow(0.8, static_cast<double>(k))));
    result.step_losses.push_back(loss.detach());
    const at::Tensor guess = draft.tokens_w.index_select(0, logits.argmax(-1).view({-1})).view({b, s});
    result.correct.push_back(at::mul(at::eq(guess, best), counted).sum().item<double>());
    result.count.push_back(counted.sum().item<double>());
    result.acceptance.push_back(mean(accepted.detach()).item<double>());
    ids = shifted(ids);
    expected = at::cat({expected.narrow(1, 1, s - 1), at::full_like(expected.narrow(1, 0, 1), 1.0 / static_cast<double>(draft.tokens_w.size(0)))}, 1);
    truth = shifted(truth);
    best = shifted(best);
    counted = shifted(counted);
    mask = shifted(mask);
  }
  result.loss = total;
  return result;
}

std::vector<int64_t> naive_greedy(const NaiveDraft& draft, const NaiveBatch& batch, int64_t row, int64_t anchor) {
  at::NoGradGuard no_grad;
  const Layer layer(draft);
  // What decoding knows: tokens 0 .. anchor and the target's states of 0 .. anchor - 1.
  const at::Tensor ids = batch.input_ids_bs.narrow(0, row, 1).narrow(1, 1, anchor);
  at::Tensor h = layer.fuse(batch.features_bsx.narrow(0, row, 1).narrow(1, 0, anchor));
  at::Tensor embedded = layer.embed(ids);
  Cache cache;
  std::vector<int64_t> guesses;
  for (int64_t k = 0; k < draft.uses; ++k) {
    h = layer.use(h, embedded, k, cache);
    const at::Tensor last = layer.logits(h.narrow(1, anchor - 1, 1));
    guesses.push_back(draft.tokens_w[last.argmax(-1).item<int64_t>()].item<int64_t>());
    // Only the last row drafts on; the others never see a later use.
    embedded = layer.embed(at::full({1, anchor}, guesses.back(), at::TensorOptions().dtype(at::kLong)));
  }
  return guesses;
}

}  // namespace sf::testing
