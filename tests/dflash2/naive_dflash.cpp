#include "tests/dflash2/naive_dflash.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <limits>

namespace sf::testing {
namespace {

using Weights = std::map<std::string, at::Tensor>;

at::Tensor rms(const at::Tensor& x, const at::Tensor& w, double eps) { return w * x / at::sqrt(at::mean(x * x, {-1}, true) + eps); }

class Model {
 public:
  Model(const DflashConfig& config, const Weights& weights) : config_(config), weights_(weights) {}

  const at::Tensor& w(const std::string& name) const { return weights_.at(name); }

  at::Tensor linear(const std::string& name, const at::Tensor& x) const {
    const at::Tensor y = at::matmul(x, w(name + ".weight").t());
    const auto bias = weights_.find(name + ".bias");
    return bias == weights_.end() ? y : y + bias->second;
  }

  // x [b, rows, n, e] at float64 positions [b, rows].
  at::Tensor rope(const at::Tensor& x, const at::Tensor& positions) const {
    const auto& frequencies = config_.layers.rope.inverse_frequencies;
    const at::Tensor inverse = at::tensor(at::ArrayRef<float>(frequencies)).to(at::kDouble);
    const at::Tensor angle = (positions.unsqueeze(-1) * inverse).unsqueeze(2);
    const auto f = static_cast<int64_t>(frequencies.size());
    const at::Tensor a = x.narrow(-1, 0, f), b = x.narrow(-1, f, f), rest = x.narrow(-1, 2 * f, x.size(-1) - 2 * f);
    const double factor = config_.layers.rope.attention_scaling;
    return at::cat({(a * angle.cos() - b * angle.sin()) * factor, (b * angle.cos() + a * angle.sin()) * factor, rest}, -1);
  }

  // Convolution of a sub-layer, slot by slot.
  at::Tensor convolve(const std::string& name, const at::Tensor& source, const at::Tensor& x, int64_t side) const {
    const int64_t b = x.size(0), q = x.size(1), h = x.size(2), taps = config_.conv_taps, j = config_.block_size;
    const int64_t groups = h / config_.conv_group_size;
    const at::Tensor delta = linear(name + ".kernel_projection", source).view({b, q, 2, taps, groups}).select(2, side);
    const at::Tensor base = w(name + ".base_kernel").select(0, side);
    std::vector<at::Tensor> rows;
    for (int64_t row = 0; row < q; ++row) {
      at::Tensor sum = at::zeros({b, h}, x.options());
      for (int64_t t = 0; t <= std::min(taps - 1, row % j); ++t) {
        const at::Tensor coefficient = base[t] + delta.select(1, row).select(1, t).repeat_interleave(config_.conv_group_size, 1);
        sum = sum + coefficient * x.select(1, row - t);
      }
      rows.push_back(sum);
    }
    return at::stack(rows, 1);
  }

  at::Tensor visible(int64_t layer, const at::Tensor& anchors, const at::Tensor& keep, int64_t s) const {
    const int64_t b = anchors.size(0), w_ = anchors.size(1), j = config_.block_size;
    const bool slides = config_.layers.sliding[static_cast<size_t>(layer)];
    const int64_t window = slides ? config_.layers.sliding_window : 1 << 30;
    const bool causal = config_.layers.is_causal ? *config_.layers.is_causal : slides;
    at::Tensor seen = at::zeros({b, w_ * j, s + w_ * j}, at::kBool);
    auto out = seen.accessor<bool, 3>();
    for (int64_t r = 0; r < b; ++r) {
      for (int64_t row = 0; row < w_ * j; ++row) {
        const int64_t n = row / j, slot = row % j, anchor = anchors[r][n].item<int64_t>();
        if (!keep[r][n].item<bool>()) {
          continue;
        }
        for (int64_t t = 0; t < s; ++t) {
          out[r][row][t] = t < anchor && t >= anchor + slot - (window - 1);
        }
        for (int64_t other = 0; other < j; ++other) {
          out[r][row][s + n * j + other] = (!causal || other <= slot) && other >= slot - (window - 1);
        }
      }
    }
    return seen;
  }

  at::Tensor forward(const TinyProblem& problem, const at::Tensor& embedding) const {
    const double eps = config_.layers.rms_norm_eps;
    const at::Tensor& ids = problem.batch.at("input_ids");
    const at::Tensor& anchors = problem.batch.at("anchors");
    const at::Tensor& keep = problem.batch.at("keep");
    const int64_t b = ids.size(0), s = ids.size(1), blocks = anchors.size(1), j = config_.block_size;
    at::Tensor noise = at::full({b, blocks, j}, config_.mask_token_id, at::kLong);
    noise.select(2, 0).copy_(at::where(keep, ids.gather(1, anchors), config_.mask_token_id));
    at::Tensor h = embedding.index_select(0, noise.view({-1})).view({b, blocks * j, -1});
    const at::Tensor ctx = rms(linear("fc", problem.batch.at("hidden_states").to(at::kDouble)), w("hidden_norm.weight"), eps);
    const at::Tensor here = (anchors.unsqueeze(-1) + at::arange(j)).view({b, blocks * j}).to(at::kDouble);
    const at::Tensor there = at::arange(s).to(at::kDouble).unsqueeze(0).expand({b, s});
    const int64_t e = config_.layers.head_dim, n = config_.layers.heads, m = config_.layers.kv_heads;
    for (int64_t layer = 0; layer < config_.layers.layers; ++layer) {
      const std::string p = "layers." + std::to_string(layer) + ".";
      at::Tensor x = rms(h, w(p + "input_layernorm.weight"), eps);
      const at::Tensor source = x;
      if (config_.dflash2) {
        x = convolve(p + "attention_conv", source, x, 0);
      }
      const at::Tensor both = at::cat({ctx, x}, 1), positions = at::cat({there, here}, 1);
      const auto heads = [&](const char* name, const at::Tensor& in, int64_t count) {
        return linear(p + "self_attn." + name, in).view({b, in.size(1), count, e});
      };
      const at::Tensor q = rope(rms(heads("q_proj", x, n), w(p + "self_attn.q_norm.weight"), eps), here);
      const at::Tensor k = rope(rms(heads("k_proj", both, m), w(p + "self_attn.k_norm.weight"), eps), positions).repeat_interleave(n / m, 2);
      const at::Tensor v = heads("v_proj", both, m).repeat_interleave(n / m, 2);
      const at::Tensor seen = visible(layer, anchors, keep, s).unsqueeze(1);
      const at::Tensor scores = at::einsum("bqne,bkne->bnqk", {q, k}) / std::sqrt(static_cast<double>(e));
      const at::Tensor weight = at::where(seen, scores, at::full({}, -1e300, scores.options())).softmax(-1) * seen;
      at::Tensor o = linear(p + "self_attn.o_proj", at::einsum("bnqk,bkne->bqne", {weight, v}).reshape({b, blocks * j, n * e}));
      if (config_.dflash2) {
        o = convolve(p + "attention_conv", source, o, 1);
      }
      h = h + o;
      x = rms(h, w(p + "post_attention_layernorm.weight"), eps);
      const at::Tensor mlp_source = x;
      if (config_.dflash2) {
        x = convolve(p + "mlp_conv", mlp_source, x, 0);
      }
      const at::Tensor gate = linear(p + "mlp.gate_proj", x);
      at::Tensor y = linear(p + "mlp.down_proj", gate * at::sigmoid(gate) * linear(p + "mlp.up_proj", x));
      if (config_.dflash2) {
        y = convolve(p + "mlp_conv", mlp_source, y, 1);
      }
      h = h + y;
    }
    return rms(h, w("norm.weight"), eps).view({b, blocks, j, -1});
  }

 private:
  const DflashConfig& config_;
  const Weights& weights_;
};

}  // namespace

NaiveOutcome naive_dflash(const DflashConfig& config, const DflashOptions& options, const TinyProblem& problem, double alpha) {
  Weights weights;
  std::vector<at::Tensor> leaves;
  for (const auto& [name, tensor] : problem.weights) {
    weights[name] = tensor.to(at::kDouble).detach().clone().requires_grad_();
    leaves.push_back(weights[name]);
  }
  const Model model(config, weights);
  const at::Tensor embedding = problem.tables.embedding_vh.to(at::kDouble), head = problem.tables.head_vh.to(at::kDouble);
  const at::Tensor& ids = problem.batch.at("input_ids");
  const at::Tensor& anchors = problem.batch.at("anchors");
  const at::Tensor keep = problem.batch.at("keep").to(at::kDouble);
  const at::Tensor loss_mask = problem.batch.at("loss_mask").to(at::kDouble);
  const int64_t b = ids.size(0), s = ids.size(1), blocks = anchors.size(1), j = config.block_size;

  const at::Tensor out = model.forward(problem, embedding);
  at::Tensor u = at::matmul(out, head.t()) * config.output_multiplier;
  if (config.final_logit_softcapping > 0) {
    u = at::tanh(u / config.final_logit_softcapping) * config.final_logit_softcapping;
  }
  const at::Tensor position = anchors.unsqueeze(-1) + at::arange(j);  // [b, w, j]
  const at::Tensor safe = position.clamp_max(s - 1);
  const auto pick = [&](const at::Tensor& values) { return values.gather(1, safe.view({b, -1})).view({b, blocks, j}); };
  const at::Tensor y = pick(ids);
  at::Tensor mask = pick(loss_mask) * (position < s) * keep.unsqueeze(-1);
  mask = mask * (at::arange(j) > 0);
  const at::Tensor log_p = at::log_softmax(u, -1);
  const at::Tensor nll = -log_p.gather(-1, y.unsqueeze(-1)).squeeze(-1);
  const at::Tensor p = at::exp(-nll).detach();

  at::Tensor weight;
  NaiveOutcome result;
  if (options.loss_type == LossType::kDflash) {
    weight = mask.clone();
    if (options.loss_decay_gamma > 0) {
      weight = weight * at::exp(-at::clamp_min(at::arange(j).to(at::kDouble) - 1, 0) / options.loss_decay_gamma);
    }
    result.denominator = weight.sum().item<double>();
  } else {
    weight = at::zeros_like(mask);
    for (int64_t r = 0; r < b; ++r) {
      int64_t count = 0;
      for (int64_t n = 0; n < blocks; ++n) {
        count += mask[r][n].sum().item<double>() > 0 ? 1 : 0;
      }
      for (int64_t n = 0; n < blocks; ++n) {
        std::vector<double> before(static_cast<size_t>(j), 1.0);
        double running = 1;
        for (int64_t k = 0; k < j; ++k) {
          const double m = mask[r][n][k].item<double>();
          running *= m > 0 ? (1 - options.dpace_alpha) * p[r][n][k].item<double>() + options.dpace_alpha : 1.0;
          before[static_cast<size_t>(k)] = running;
        }
        for (int64_t k = 0; k < j; ++k) {
          double after = 0;
          for (int64_t i = k; i < j; ++i) {
            after += before[static_cast<size_t>(i)] * mask[r][n][i].item<double>();
          }
          const double f = options.loss_type == LossType::kDpace             ? after
                           : options.loss_type == LossType::kDpaceConfidence ? before[static_cast<size_t>(k)]
                                                                             : after / before[static_cast<size_t>(k)];
          weight[r][n][k] = f * mask[r][n][k].item<double>() / (options.dpace_per_sequence ? static_cast<double>(std::max<int64_t>(1, count)) : 1.0);
        }
      }
      result.denominator += options.dpace_per_sequence ? (count > 0 ? 1 : 0) : 1;
    }
  }

  const at::Tensor ce = (nll * weight).sum(), tv = ((1 - at::exp(-nll)) * weight).sum();
  at::Tensor numerator = ce;
  if (options.lk == draft::Lk::total_variation) {
    numerator = tv;
  } else if (options.lk == draft::Lk::lambda) {
    const double mean = (p * mask).sum().item<double>() / std::max(1.0, mask.sum().item<double>());
    const double kw = options.kl_scale * std::exp(-options.kl_decay * mean);
    numerator = kw * ce + (1 - kw) * tv;
  }

  result.mask_bwj = mask;
  result.weight_bwj = weight.detach();
  result.labels_bwj = y;
  result.position_bwj = position;
  result.log_p_bwjv = log_p.detach();
  result.strict_bwjk = std::get<1>(u.detach().topk(config.dflash2 ? config.selector_top_k : std::min<int64_t>(16, u.size(-1)), -1));
  const at::Tensor best = u.argmax(-1);
  const double mask_sum = mask.sum().item<double>();
  result.accuracy = ((best == y) * (mask > 0.5)).sum().item<double>() / mask_sum;
  at::Tensor hits = (best == y);

  if (config.dflash2) {
    const at::Tensor pred = at::cat({y.narrow(2, 0, 1), y.narrow(2, 0, j - 1)}, 2);
    const auto [values, strict] = u.topk(config.selector_top_k, -1);
    at::Tensor candidates = strict.clone();
    const at::Tensor covered_strict = (strict == y.unsqueeze(-1)).any(-1);
    if (options.insert_gold) {
      candidates.select(-1, config.selector_top_k - 1).copy_(at::where(covered_strict, strict.select(-1, config.selector_top_k - 1), y));
    }
    const at::Tensor covered = (candidates == y.unsqueeze(-1)).any(-1);
    const at::Tensor from = options.selector_stop_gradient ? out.detach() : out;
    const at::Tensor logits = options.selector_stop_gradient ? u.detach() : u;
    const at::Tensor projected = at::matmul(from, model.w("candidate_selector.hidden_projection.weight").t());
    const at::Tensor context = model.w("candidate_selector.predecessor_codebook").index({pred}) * projected;
    const at::Tensor rows = model.w("candidate_selector.successor_codebook").index({candidates});
    const at::Tensor scores = logits.gather(-1, candidates) + (rows * context.unsqueeze(-2)).sum(-1);
    const at::Tensor target = (candidates == y.unsqueeze(-1)).to(at::kInt).argmax(-1, true);
    const at::Tensor sce = -at::log_softmax(scores, -1).gather(-1, target).squeeze(-1);
    const at::Tensor learnt = weight * covered;
    result.selected_bwj = (candidates.gather(-1, scores.argmax(-1, true)).squeeze(-1) == y).to(at::kDouble);
    if (options.selector_loss_alpha > 0) {
      numerator = numerator + alpha * (sce * learnt).sum();
    }
    result.selector_loss = (sce * learnt).sum().item<double>() / std::max(1e-12, learnt.sum().item<double>());
    result.covered = (mask * covered_strict).sum().item<double>() / mask_sum;

    // The greedy path of each block.
    at::Tensor path_hits = at::zeros_like(hits);
    const at::Tensor predecessor_table = model.w("candidate_selector.predecessor_codebook").detach();
    const at::Tensor successor_table = model.w("candidate_selector.successor_codebook").detach();
    for (int64_t r = 0; r < b; ++r) {
      for (int64_t n = 0; n < blocks; ++n) {
        int64_t previous = y[r][n][0].item<int64_t>();
        for (int64_t k = 1; k < j; ++k) {
          const at::Tensor row = predecessor_table[previous] * projected.detach()[r][n][k];
          double best_score = -std::numeric_limits<double>::infinity();
          int64_t chosen = -1;
          for (int64_t i = 0; i < config.selector_top_k; ++i) {
            const int64_t token = strict[r][n][k][i].item<int64_t>();
            const double score = values[r][n][k][i].item<double>() + (successor_table[token] * row).sum().item<double>();
            if (score > best_score) {
              best_score = score;
              chosen = token;
            }
          }
          path_hits[r][n][k] = chosen == y[r][n][k].item<int64_t>();
          previous = chosen;
        }
      }
    }
    hits = path_hits;
    result.greedy_bwj = path_hits.to(at::kDouble);
  }

  double total = 0, counted = 0;
  for (int64_t r = 0; r < b; ++r) {
    for (int64_t n = 0; n < blocks; ++n) {
      bool any = false;
      int64_t length = 0;
      bool alive = true;
      for (int64_t k = 1; k < j; ++k) {
        const bool supervised = mask[r][n][k].item<double>() > 0.5;
        any = any || supervised;
        alive = alive && supervised && hits[r][n][k].item<bool>();
        length += alive ? 1 : 0;
      }
      if (any) {
        total += 1.0 + static_cast<double>(length);
        counted += 1;
      }
    }
  }
  result.acceptance_length = total / counted;

  const at::Tensor loss = numerator / result.denominator;
  result.loss = loss.item<double>();
  const auto gradients = torch::autograd::grad({loss}, leaves, {}, false, false, /*allow_unused=*/true);
  size_t i = 0;
  for (const auto& [name, leaf] : weights) {
    result.gradients[name] = gradients[i].defined() ? gradients[i] : at::zeros_like(leaf);
    ++i;
  }
  return result;
}

}  // namespace sf::testing
