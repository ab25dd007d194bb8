// Shapes: b batch · t tokens · h hidden · n heads · m key-value heads · d head size · r rotary size · v
// vocabulary
#include "core/model/target.hpp"

#include "core/base/error.hpp"
#include "core/data/weight_folder.hpp"
#include "core/kernels/cuda_library.hpp"
#include "core/kernels/decode.hpp"
#include "core/kernels/rms_norm.hpp"
#include "core/model/skinny_product.hpp"
#include "core/model/tensor_view.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>

namespace sf {

namespace {

// Projections that read the same input are one matrix: queries, keys and values; gate and up.
struct Layer {
  at::Tensor input_norm_h, post_norm_h;
  at::Tensor qkv_weight, qkv_bias;
  at::Tensor query_norm_d, key_norm_d;
  at::Tensor output_weight, output_bias;
  at::Tensor gate_up_weight, gate_up_bias;
  at::Tensor down_weight, down_bias;
};

// Fetches tensors by their decoder names and collects every problem before it gives up.
class Loader {
 public:
  Loader(const WeightFolder& weights, const TargetOptions& options) : weights_(weights), options_(options) {}

  at::Tensor get(const std::string& name, const std::vector<int64_t>& shape) {
    const TensorView* view = weights_.find_in_decoder(name);
    if (view == nullptr) {
      problems_.push_back(format("'{}' is missing", name));
    } else if (view->shape != shape) {
      problems_.push_back(format("'{}' has shape {}, {} expected", view->name, view->shape, shape));
    } else if (!is_floating(view->dtype)) {
      problems_.push_back(
          format("'{}' is {}, a floating type expected", view->name, dtype_name(view->dtype)));
    } else {
      return as_tensor(*view).to(options_.device, options_.dtype);
    }
    return {};
  }
  /// The rows of several matrices under each other.
  at::Tensor joined(const std::vector<std::pair<std::string, int64_t>>& parts, const std::string& end,
                    std::vector<int64_t> rest) {
    std::vector<at::Tensor> tensors;
    bool whole = true;
    for (const auto& [name, rows] : parts) {
      std::vector<int64_t> shape{rows};
      shape.insert(shape.end(), rest.begin(), rest.end());
      tensors.push_back(get(name + end, shape));
      whole = whole && tensors.back().defined();
    }
    return whole ? at::cat(tensors) : at::Tensor();
  }
  void finish() const {
    if (problems_.empty()) return;
    constexpr size_t kShown = 8;
    std::string text;
    for (size_t i = 0; i < std::min(problems_.size(), kShown); ++i) text += "\n  " + problems_[i];
    if (problems_.size() > kShown) text += format("\n  and {} more", problems_.size() - kShown);
    throw Error(ExitCode::kData, format("{}: weights and config.json disagree:{}", options_.folder, text),
                "fetch the model again, or name the tensors with model.embedding_key and model.lm_head_key");
  }

 private:
  const WeightFolder& weights_;
  const TargetOptions& options_;
  std::vector<std::string> problems_;
};

// Normalised in float32, rounded to the type of computation, then scaled; a GPU's kernel rounds once.
at::Tensor norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  if (has_kernels({x, weight})) return rms_norm(x, weight, eps);
  if (is_skinny(x, weight)) return skinny_add_norm(x.contiguous(), {}, weight, eps).second;
  const at::Tensor wide = x.to(at::kFloat);
  at::Tensor normal = wide * at::rsqrt(wide.square().mean(-1, /*keepdim=*/true).add_(eps));
  return normal.to(x.scalar_type()).mul_(weight);
}

// {x + delta, its norm}.
std::pair<at::Tensor, at::Tensor> add_and_norm(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& weight, double eps) {
  if (has_kernels({x, delta, weight})) {
    const std::vector<at::Tensor> both = residual_rms_norm(delta, x, weight, eps);
    return {both[0], both[1]};
  }
  if (is_skinny(x, weight)) return skinny_add_norm(x, delta, weight, eps);
  const at::Tensor sum = x + delta;
  return {sum, norm(sum, weight, eps)};
}

// The norm of a head is rounded as its rotation is, in a kernel and without one.
at::Tensor head_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  const at::Tensor wide = x.to(at::kFloat);
  return (wide * at::rsqrt(wide.square().mean(-1, /*keepdim=*/true).add_(eps))).to(x.scalar_type()).mul_(weight);
}

// Value m of the first r turns together with value m + r/2.
at::Tensor rotate(const at::Tensor& x_bntd, const at::Tensor& cos_tr, const at::Tensor& sin_tr) {
  const int64_t rotary = cos_tr.size(-1);
  const at::Tensor turning = x_bntd.narrow(-1, 0, rotary);
  const at::Tensor first = turning.narrow(-1, 0, rotary / 2);
  const at::Tensor second = turning.narrow(-1, rotary / 2, rotary / 2);
  at::Tensor turned = turning * cos_tr + at::cat({second.neg(), first}, -1) * sin_tr;
  if (rotary == x_bntd.size(-1)) return turned;
  return at::cat({turned, x_bntd.narrow(-1, rotary, x_bntd.size(-1) - rotary)}, -1);
}

// What one pass adds to a cache and sees of it, the same for every layer.
struct CachePlace {
  KeyValueCache* cache = nullptr;
  std::vector<int64_t> rows;
  bool are_all_rows = false;   // rows are 0 .. rows - 1, so no copy is needed to read them
  int64_t seen = 0;            // keys that the longest row sees
  at::Tensor positions_bt;     // int64
  at::Tensor places;           // int64 [b * m * t], into [rows * m * capacity]
  at::Tensor rows_b;           // int64
  at::Tensor hidden_b1qs;      // float, 0 or minus infinity; q = query heads of a key-value head x tokens
};

CachePlace place_in_cache(const TargetRequest& request, const TargetConfig& config, const at::Tensor& like, bool is_masked) {
  KeyValueCache& cache = *request.cache;
  const int64_t b = request.input_ids_bt.size(0), t = request.input_ids_bt.size(1);
  const int64_t m = config.num_key_value_heads, group = config.num_attention_heads / m;
  CachePlace place;
  place.cache = &cache;
  place.rows = request.rows;
  if (place.rows.empty()) {
    for (int64_t i = 0; i < b; ++i) place.rows.push_back(i);
  }
  SF_CHECK(static_cast<int64_t>(place.rows.size()) == b && static_cast<int64_t>(request.starts.size()) == b,
           "{} rows and {} starts for a batch of {}", place.rows.size(), request.starts.size(), b);
  place.are_all_rows = true;
  for (int64_t i = 0; i < b; ++i) {
    const int64_t row = place.rows[static_cast<size_t>(i)], start = request.starts[static_cast<size_t>(i)];
    SF_CHECK(row >= 0 && row < cache.rows && start >= 0 && start + t <= cache.capacity,
             "tokens {} to {} of sequence {} in a cache for {} sequences of {} tokens", start, start + t, row, cache.rows,
             cache.capacity);
    place.are_all_rows = place.are_all_rows && row == i;
    place.seen = std::max(place.seen, start + t);
  }
  place.are_all_rows = place.are_all_rows && b == cache.rows;
  const auto integers = at::TensorOptions().dtype(at::kLong);
  const at::Tensor starts_b = at::tensor(request.starts, integers);
  const at::Tensor rows_b = at::tensor(place.rows, integers);
  const at::Tensor positions = starts_b.unsqueeze(1) + at::arange(t, integers);
  place.positions_bt = positions.to(like.device());
  if (!is_masked) return place;
  const at::Tensor heads = rows_b.unsqueeze(1) * m + at::arange(m, integers);  // [b, m]
  const at::Tensor places = heads.unsqueeze(2) * cache.capacity + positions.unsqueeze(1);
  const at::Tensor hidden = at::arange(place.seen, integers).view({1, 1, -1}) > positions.unsqueeze(2);  // [b, t, s]
  const at::Tensor mask = at::zeros(hidden.sizes(), at::kFloat).masked_fill_(hidden, -std::numeric_limits<double>::infinity());
  place.places = places.reshape({-1}).to(like.device());
  place.rows_b = rows_b.to(like.device());
  place.hidden_b1qs = mask.view({b, 1, t, place.seen})
                          .expand({b, group, t, place.seen})
                          .reshape({b, 1, group * t, place.seen})
                          .to(like.device(), like.scalar_type());
  return place;
}

// Attention of new tokens over what the cache holds of their sequences, themselves included. Query heads that share keys are rows of one product,
// so keys are read once and never copied for each head.
at::Tensor attend_cached(const CachePlace& place, int64_t layer, const at::Tensor& query_bntd, const at::Tensor& key_bmtd,
                         const at::Tensor& value_bmtd) {
  const int64_t b = query_bntd.size(0), n = query_bntd.size(1), t = query_bntd.size(2), d = query_bntd.size(3), m = key_bmtd.size(1);
  const auto put = [&](const at::Tensor& into, const at::Tensor& rows) {
    into.view({-1, d}).index_copy_(0, place.places, rows.reshape({-1, d}));
    const at::Tensor seen = into.narrow(2, 0, place.seen);
    return place.are_all_rows ? seen : seen.index_select(0, place.rows_b);
  };
  const at::Tensor keys = put(place.cache->keys_bmtd[static_cast<size_t>(layer)], key_bmtd);
  const at::Tensor values = put(place.cache->values_bmtd[static_cast<size_t>(layer)], value_bmtd);
  const at::Tensor query = query_bntd.reshape({b, m, n / m * t, d});
  const at::Tensor attended = at::scaled_dot_product_attention(query, keys, values, place.hidden_b1qs, 0.0, false);
  return attended.reshape({b, n, t, d});
}

}  // namespace

KeyValueCache KeyValueCache::copy() const {
  KeyValueCache other{.rows = rows, .capacity = capacity};
  for (const at::Tensor& keys : keys_bmtd) other.keys_bmtd.push_back(keys.clone());
  for (const at::Tensor& values : values_bmtd) other.values_bmtd.push_back(values.clone());
  return other;
}

KeyValueCache KeyValueCache::select(const std::vector<int64_t>& wanted) const {
  KeyValueCache other{.rows = static_cast<int64_t>(wanted.size()), .capacity = capacity};
  if (empty()) return other;
  const at::Tensor rows_b = at::tensor(wanted, at::kLong).to(keys_bmtd[0].device());
  for (const at::Tensor& keys : keys_bmtd) other.keys_bmtd.push_back(keys.index_select(0, rows_b));
  for (const at::Tensor& values : values_bmtd) other.values_bmtd.push_back(values.index_select(0, rows_b));
  return other;
}

int64_t KeyValueCache::bytes() const {
  int64_t sum = 0;
  for (const auto* list : {&keys_bmtd, &values_bmtd}) {
    for (const at::Tensor& tensor : *list) sum += static_cast<int64_t>(tensor.nbytes());
  }
  return sum;
}

struct Target::Weights {
  TargetConfig config;
  at::Tensor embedding_vh, final_norm_h, head_vh;
  at::Tensor inverse_frequencies;  // float32
  std::vector<Layer> layers;
};

Target::Target(std::unique_ptr<Weights> weights) : weights_(std::move(weights)) {}
Target::Target(Target&&) noexcept = default;
Target& Target::operator=(Target&&) noexcept = default;
Target::~Target() = default;

const TargetConfig& Target::config() const {
  return weights_->config;
}

at::ScalarType compute_type(const TargetConfig& config, at::Device device) {
  if (device.is_cpu()) return at::kFloat;
  if (config.dtype == "bfloat16") return at::kBFloat16;
  return config.dtype == "float16" ? at::kHalf : at::kFloat;
}

at::ScalarType Target::dtype() const {
  return weights_->embedding_vh.scalar_type();
}

at::Device Target::device() const {
  return weights_->embedding_vh.device();
}

int64_t Target::bytes_read() const {
  int64_t sum = weights_->head_vh.defined() ? static_cast<int64_t>(weights_->head_vh.nbytes()) : 0;
  for (const Layer& layer : weights_->layers) {
    for (const at::Tensor* tensor : {&layer.qkv_weight, &layer.output_weight, &layer.gate_up_weight, &layer.down_weight}) {
      sum += static_cast<int64_t>(tensor->nbytes());
    }
  }
  return sum;
}

KeyValueCache Target::new_cache(int64_t rows, int64_t capacity) const {
  const TargetConfig& config = weights_->config;
  KeyValueCache cache{.rows = rows, .capacity = capacity};
  for (size_t i = 0; i < weights_->layers.size(); ++i) {
    for (auto* list : {&cache.keys_bmtd, &cache.values_bmtd}) {
      list->push_back(at::zeros({rows, config.num_key_value_heads, capacity, config.head_dim}, weights_->embedding_vh.options()));
    }
  }
  return cache;
}

void Target::extend_cache(KeyValueCache& cache, int64_t capacity) const {
  if (capacity <= cache.capacity) return;
  for (auto* list : {&cache.keys_bmtd, &cache.values_bmtd}) {
    for (at::Tensor& tensor : *list) tensor = at::constant_pad_nd(tensor, {0, 0, 0, capacity - cache.capacity}, 0);
  }
  cache.capacity = capacity;
}

Target Target::load(const TargetOptions& options) {
  const at::NoGradGuard no_grad;
  const std::string source = (options.folder / "config.json").string();
  const Json json = read_model_config(options.folder);
  auto result = std::make_unique<Weights>();
  TargetConfig& config = result->config;
  config = target_config(json, source);
  if (const std::string reason = why_not_runnable(json, config); !reason.empty()) {
    throw Error(ExitCode::kData, format("{}: this target can't be run here: {}", source, reason),
                "capture its hidden states with a serving engine and give them as features");
  }
  const WeightFolder folder = WeightFolder::open(options.folder);
  Loader loader(folder, options);
  const int64_t hidden = config.hidden_size;
  const int64_t queries = config.num_attention_heads * config.head_dim;
  const int64_t keys = config.num_key_value_heads * config.head_dim;
  const int64_t inner = config.intermediate_size;
  const int64_t layers = options.layers_needed < 0
                             ? config.num_hidden_layers
                             : std::min(options.layers_needed, config.num_hidden_layers);

  result->embedding_vh = loader.get(options.embedding_key, {config.vocab_size, hidden});
  for (int64_t i = 0; i < layers; ++i) {
    const std::string name = format("model.layers.{}.", i);
    const std::vector<std::pair<std::string, int64_t>> qkv{{name + "self_attn.q_proj", queries},
                                                           {name + "self_attn.k_proj", keys},
                                                           {name + "self_attn.v_proj", keys}};
    const std::vector<std::pair<std::string, int64_t>> gate_up{{name + "mlp.gate_proj", inner},
                                                               {name + "mlp.up_proj", inner}};
    Layer layer;
    layer.input_norm_h = loader.get(name + "input_layernorm.weight", {hidden});
    layer.post_norm_h = loader.get(name + "post_attention_layernorm.weight", {hidden});
    layer.qkv_weight = loader.joined(qkv, ".weight", {hidden});
    if (config.qkv_bias) layer.qkv_bias = loader.joined(qkv, ".bias", {});
    if (config.query_key_norm) {
      layer.query_norm_d = loader.get(name + "self_attn.q_norm.weight", {config.head_dim});
      layer.key_norm_d = loader.get(name + "self_attn.k_norm.weight", {config.head_dim});
    }
    layer.output_weight = loader.get(name + "self_attn.o_proj.weight", {hidden, queries});
    if (config.output_bias) layer.output_bias = loader.get(name + "self_attn.o_proj.bias", {hidden});
    layer.gate_up_weight = loader.joined(gate_up, ".weight", {hidden});
    layer.down_weight = loader.get(name + "mlp.down_proj.weight", {hidden, inner});
    if (config.mlp_bias) {
      layer.gate_up_bias = loader.joined(gate_up, ".bias", {});
      layer.down_bias = loader.get(name + "mlp.down_proj.bias", {hidden});
    }
    result->layers.push_back(std::move(layer));
  }
  if (layers == config.num_hidden_layers) result->final_norm_h = loader.get("model.norm.weight", {hidden});
  if (options.head_needed) {
    result->head_vh = config.tied_embeddings ? result->embedding_vh
                                             : loader.get(options.lm_head_key, {config.vocab_size, hidden});
    if (config.logits_width_multiplier != 0 && result->head_vh.defined()) {
      result->head_vh = result->head_vh / config.logits_width_multiplier;
    }
  }
  loader.finish();
  result->inverse_frequencies = at::tensor(config.rope.inverse_frequencies, at::kFloat).to(options.device);
  return Target(std::move(result));
}

int64_t Target::cache_bytes_per_token() const {
  const TargetConfig& config = weights_->config;
  return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * static_cast<int64_t>(weights_->embedding_vh.element_size());
}

at::Tensor Target::few_tokens(const FewTokens& few, const KeyValueCache& cache, int64_t layers, const std::vector<int64_t>& layer_ids, std::vector<at::Tensor>& states_bh) const {
  const Weights& w = *weights_;
  const TargetConfig& config = w.config;
  const at::Tensor &ids_b = few.ids_b, &positions_b = few.positions_b;
  auto [x_bh, cos_bf, sin_bf] = decode_start(ids_b, positions_b, w.embedding_vh, w.inverse_frequencies, config.rope.attention_scaling);  // rounded as forward() rounds them
  at::Tensor normed_bh = norm(x_bh, w.layers.front().input_norm_h, config.rms_norm_eps);
  for (size_t i = 0; i < static_cast<size_t>(layers); ++i) {
    const Layer& layer = w.layers[i];
    const at::Tensor attended_bx = decode_attention({.qkv_bx = skinny_linear(normed_bh, layer.qkv_weight, layer.qkv_bias),
                                                     .query_heads = config.num_attention_heads,
                                                     .key_heads = config.num_key_value_heads,
                                                     .query_weight_e = layer.query_norm_d,
                                                     .key_weight_e = layer.key_norm_d,
                                                     .eps = config.rms_norm_eps,
                                                     .cos_bf = cos_bf,
                                                     .sin_bf = sin_bf,
                                                     .positions_b = positions_b,
                                                     .keys_bmce = cache.keys_bmtd[i],
                                                     .values_bmce = cache.values_bmtd[i],
                                                     .tokens = few.tokens,
                                                     .cache_rows = few.cache_rows});
    std::tie(x_bh, normed_bh) = add_and_norm(x_bh, skinny_linear(attended_bx, layer.output_weight, layer.output_bias), layer.post_norm_h, config.rms_norm_eps);
    const at::Tensor active_bi = is_skinny(normed_bh, layer.gate_up_weight)
                                     ? skinny_gate(normed_bh, layer.gate_up_weight, layer.gate_up_bias)
                                     : decode_gate(skinny_linear(normed_bh, layer.gate_up_weight, layer.gate_up_bias));
    // The last layer of a target of which not all were loaded has no norm behind it; what comes out of this one means nothing then.
    const at::Tensor& next_norm_h = i + 1 < w.layers.size() ? w.layers[i + 1].input_norm_h : w.final_norm_h.defined() ? w.final_norm_h : layer.input_norm_h;
    std::tie(x_bh, normed_bh) = add_and_norm(x_bh, skinny_linear(active_bi, layer.down_weight, layer.down_bias), next_norm_h, config.rms_norm_eps);
    for (size_t j = 0; j < layer_ids.size(); ++j) {
      if (layer_ids[j] == static_cast<int64_t>(i)) states_bh[j] = x_bh;
    }
  }
  return normed_bh;
}

at::Tensor Target::decode_step(const at::Tensor& ids_b, const at::Tensor& positions_b, const KeyValueCache& cache) const {
  const at::NoGradGuard no_grad;
  const Weights& w = *weights_;
  SF_CHECK(w.final_norm_h.defined() && w.head_vh.defined(), "a step needs all {} layers and the head", w.config.num_hidden_layers);
  SF_CHECK(ids_b.dim() == 1 && ids_b.size(0) == cache.rows, "{} tokens for a cache of {} sequences", ids_b.sizes().vec(), cache.rows);
  std::vector<at::Tensor> no_states;
  return skinny_linear(few_tokens({.ids_b = ids_b, .positions_b = positions_b}, cache, w.config.num_hidden_layers, {}, no_states), w.head_vh, {});
}

TargetStates Target::forward(const TargetRequest& request) const {
  const at::NoGradGuard no_grad;
  const Weights& w = *weights_;
  const TargetConfig& config = w.config;
  const auto layers_loaded = static_cast<int64_t>(w.layers.size());
  SF_CHECK(request.input_ids_bt.dim() == 2, "input_ids has {} axes, [b, t] expected",
           request.input_ids_bt.dim());
  const bool to_the_end = request.last_state || request.logits;
  SF_CHECK(!to_the_end || w.final_norm_h.defined(), "the last state needs all {} layers",
           config.num_hidden_layers);
  SF_CHECK(!request.logits || w.head_vh.defined(), "logits need the head, which was not loaded");
  int64_t layers_run = to_the_end ? config.num_hidden_layers : 0;
  for (const int64_t id : request.layer_ids) {
    SF_CHECK(id >= 0 && id < layers_loaded, "layer {} of {} loaded", id, layers_loaded);
    layers_run = std::max(layers_run, id + 1);
  }
  const int64_t b = request.input_ids_bt.size(0);
  const int64_t t = request.input_ids_bt.size(1);
  const int64_t d = config.head_dim;
  const int64_t n = config.num_attention_heads;
  const int64_t m = config.num_key_value_heads;
  if (request.input_ids_bt.numel() > 0) {
    const int64_t low = request.input_ids_bt.min().item<int64_t>();
    const int64_t high = request.input_ids_bt.max().item<int64_t>();
    if (low < 0 || high >= config.vocab_size) {
      throw Error(ExitCode::kData, format("token id {}, but the target has the tokens 0 to {}",
                                          low < 0 ? low : high, config.vocab_size - 1));
    }
  }

  TargetStates states;
  states.layers_bth.resize(request.layer_ids.size());
  // Few tokens behind what a cache holds: all of it in few passes over memory.
  if (request.cache != nullptr && b * t <= kSkinnyRows && b * t > 0 && can_decode_few(w.embedding_vh, d)) {
    const CachePlace place = place_in_cache(request, config, w.embedding_vh, /*is_masked=*/false);
    std::vector<at::Tensor> states_bh(request.layer_ids.size());
    at::Tensor last = few_tokens({.ids_b = request.input_ids_bt.to(w.embedding_vh.device()).reshape({b * t}),
                                  .positions_b = place.positions_bt.reshape({b * t}),
                                  .tokens = t,
                                  .cache_rows = place.rows},
                                 *request.cache, layers_run, request.layer_ids, states_bh);
    for (size_t j = 0; j < states_bh.size(); ++j) states.layers_bth[j] = states_bh[j].view({b, t, -1});
    if (request.logits) {
      const at::Tensor asked = request.logit_places_r.defined() ? last.index_select(0, request.logit_places_r.to(last.device())) : last.view({b, t, -1});
      states.logits_btv = skinny_linear(asked, w.head_vh, {});
    }
    if (request.last_state) states.last_state_bth = last.view({b, t, -1});
    return states;
  }
  at::Tensor x_bth = at::embedding(w.embedding_vh, request.input_ids_bt.to(w.embedding_vh.device()));
  // Angles in float32; cos and sin are rounded once, to the type of computation.
  std::optional<CachePlace> place;
  if (request.cache != nullptr) place = place_in_cache(request, config, x_bth, /*is_masked=*/true);
  // [t, r], or [b, 1, t, r] when each sequence has positions of its own.
  const at::Tensor positions = place ? place->positions_bt.unsqueeze(1).to(at::kFloat) : at::arange(t, w.inverse_frequencies.options());
  const at::Tensor half_tr = positions.unsqueeze(-1) * w.inverse_frequencies;
  const at::Tensor angles_tr = at::cat({half_tr, half_tr}, -1);
  const at::Tensor cos_tr = (angles_tr.cos() * config.rope.attention_scaling).to(x_bth.scalar_type());
  const at::Tensor sin_tr = (angles_tr.sin() * config.rope.attention_scaling).to(x_bth.scalar_type());

  for (int64_t i = 0; i < layers_run; ++i) {
    const Layer& layer = w.layers[static_cast<size_t>(i)];
    const at::Tensor attention_in = norm(x_bth, layer.input_norm_h, config.rms_norm_eps);
    const at::Tensor qkv =
        skinny_linear(attention_in, layer.qkv_weight, layer.qkv_bias).view({b, t, n + 2 * m, d});
    at::Tensor query = qkv.narrow(2, 0, n);
    at::Tensor key = qkv.narrow(2, n, m);
    const at::Tensor value = qkv.narrow(2, n + m, m).transpose(1, 2);
    if (config.query_key_norm) {
      query = head_norm(query, layer.query_norm_d, config.rms_norm_eps);
      key = head_norm(key, layer.key_norm_d, config.rms_norm_eps);
    }
    query = rotate(query.transpose(1, 2), cos_tr, sin_tr);
    key = rotate(key.transpose(1, 2), cos_tr, sin_tr);
    // Query head q reads key-value head q / (n / m).
    const auto for_all_heads = [&](const at::Tensor& x_bmtd) {
      return n == m ? x_bmtd : x_bmtd.unsqueeze(2).expand({b, m, n / m, t, d}).reshape({b, n, t, d});
    };
    const at::Tensor attended =
        place ? attend_cached(*place, i, query, key, value)
              : at::scaled_dot_product_attention(query, for_all_heads(key), for_all_heads(value), /*attn_mask=*/{},
                                                 /*dropout_p=*/0.0, /*is_causal=*/true);
    x_bth = x_bth + skinny_linear(attended.transpose(1, 2).reshape({b, t, n * d}), layer.output_weight, layer.output_bias);
    const at::Tensor mlp_in = norm(x_bth, layer.post_norm_h, config.rms_norm_eps);
    const at::Tensor gate_up = skinny_linear(mlp_in, layer.gate_up_weight, layer.gate_up_bias);
    const at::Tensor active =
        at::silu(gate_up.narrow(-1, 0, config.intermediate_size))
            .mul_(gate_up.narrow(-1, config.intermediate_size, config.intermediate_size));
    x_bth = x_bth + skinny_linear(active, layer.down_weight, layer.down_bias);
    for (size_t j = 0; j < request.layer_ids.size(); ++j) {
      if (request.layer_ids[j] == i) states.layers_bth[j] = x_bth;
    }
  }
  if (to_the_end) {
    at::Tensor last = norm(x_bth, w.final_norm_h, config.rms_norm_eps);
    if (request.logits) {
      const at::Tensor asked = request.logit_places_r.defined()
                                   ? last.reshape({-1, last.size(-1)}).index_select(0, request.logit_places_r.to(last.device()))
                                   : last;
      states.logits_btv = skinny_linear(asked, w.head_vh, {});
    }
    if (request.last_state) states.last_state_bth = std::move(last);
  }
  return states;
}

}  // namespace sf
