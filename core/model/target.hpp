// core/model/target.hpp
//
// Forward pass of dense Llama, Qwen2 and Qwen3 targets, without gradient: whole samples at once for capturing hidden
// states, or some new tokens of sequences whose earlier keys and values are kept, for generating.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "core/data/target_config.hpp"

namespace sf {

struct TargetOptions {
  std::filesystem::path folder;
  at::ScalarType dtype = at::ScalarType::Float;  // of weights and computation
  at::Device device = at::Device(at::DeviceType::CPU);
  int64_t layers_needed = -1;  // load only the first so many layers; -1: all
  bool head_needed = false;
  std::string embedding_key = "model.embed_tokens.weight";
  std::string lm_head_key = "lm_head.weight";
};

/// Keys and values of some sequences, layer by layer, so that a forward pass needs new tokens only. Who holds it knows
/// how far each sequence has come; what lies behind that is junk that the next tokens write over.
struct KeyValueCache {
  int64_t rows = 0;      // sequences
  int64_t capacity = 0;  // tokens of each that there is room for
  std::vector<at::Tensor> keys_bmtd, values_bmtd;  // rope applied to the keys

  [[nodiscard]] bool empty() const { return keys_bmtd.empty(); }
  [[nodiscard]] KeyValueCache copy() const;
  /// Only these sequences, in this order.
  [[nodiscard]] KeyValueCache select(const std::vector<int64_t>& rows) const;
  [[nodiscard]] int64_t bytes() const;
};

struct TargetRequest {
  /// [b, t] int64 on any device. Shorter samples are padded at the right: attention is causal, so nothing of
  /// a padding token reaches a real one, and what comes out at padding places means nothing.
  at::Tensor input_ids_bt;
  /// Output of decoder layer i (counted from 0), before the final norm; each at most once.
  std::vector<int64_t> layer_ids;
  bool last_state = false;  // the final norm's output, which the head multiplies
  bool logits = false;
  /// With a cache: input row i is sequence rows[i] (i when empty) and its first token stands at position starts[i]. Its
  /// keys and values are put behind those of the tokens before it. The cache needs room for the longest.
  KeyValueCache* cache = nullptr;
  std::vector<int64_t> rows = {};
  std::vector<int64_t> starts = {};
  /// int64, places in [b * t]: logits for these alone, [r, v]. Undefined: for all.
  at::Tensor logit_places_r = {};
};

struct TargetStates {
  std::vector<at::Tensor> layers_bth;  // in the order of layer_ids, in the type of computation
  at::Tensor last_state_bth;
  at::Tensor logits_btv;  // [r, v] with logit_places_r
};

/// What a target computes in: float32 on a CPU, where it is fastest, and its own type on a GPU.
[[nodiscard]] at::ScalarType compute_type(const TargetConfig& config, at::Device device);

class Target {
 public:
  /// Reads configuration and weights, checks every shape. Throws sf::Error (data) with all tensors that are
  /// missing or misshapen, or with the reason why this model can't be run.
  [[nodiscard]] static Target load(const TargetOptions& options);
  Target(Target&&) noexcept;
  Target& operator=(Target&&) noexcept;
  ~Target();

  [[nodiscard]] const TargetConfig& config() const;
  [[nodiscard]] at::ScalarType dtype() const;
  [[nodiscard]] at::Device device() const;
  /// Bytes of weights that a forward pass of one token reads: all layers and the head.
  [[nodiscard]] int64_t bytes_read() const;
  /// Bytes of keys and values that one token of one sequence takes.
  [[nodiscard]] int64_t cache_bytes_per_token() const;
  /// Room for `rows` sequences of `capacity` tokens.
  [[nodiscard]] KeyValueCache new_cache(int64_t rows, int64_t capacity) const;
  /// More room in the same cache; what is there stays.
  void extend_cache(KeyValueCache& cache, int64_t capacity) const;
  /// Stops after the last layer that is asked for. Throws sf::Error (data) when an id is outside the
  /// vocabulary.
  [[nodiscard]] TargetStates forward(const TargetRequest& request) const;
  /// Logits [b, v] behind one new token of every sequence of the cache: ids and positions int64 [b] on the target's device, positions below the cache's
  /// capacity. Asks the device nothing and copies nothing to it, so it can be recorded; the ids are not checked. Same logits as forward().
  [[nodiscard]] at::Tensor decode_step(const at::Tensor& ids_b, const at::Tensor& positions_b, const KeyValueCache& cache) const;

 private:
  struct Weights;
  // Rows of a pass whose attention reads a cache: `tokens` of each sequence side by side.
  struct FewTokens {
    at::Tensor ids_b, positions_b;
    int64_t tokens = 1;
    std::vector<int64_t> cache_rows = {};  // empty: all, in order
  };
  /// What the head multiplies, [b, h]; states_bh[j] is what layer layer_ids[j] leaves.
  at::Tensor few_tokens(const FewTokens& few, const KeyValueCache& cache, int64_t layers, const std::vector<int64_t>& layer_ids, std::vector<at::Tensor>& states_bh) const;
  explicit Target(std::unique_ptr<Weights> weights);
  std::unique_ptr<Weights> weights_;
};

}  // namespace sf
