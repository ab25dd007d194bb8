// core/model/target.hpp
//
// Forward pass of dense Llama, Qwen2 and Qwen3 targets, for capturing hidden states: one prefill a batch, no
// cache, no gradient.
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

struct TargetRequest {
  /// [b, t] int64 on any device. Shorter samples are padded at the right: attention is causal, so nothing of
  /// a padding token reaches a real one, and what comes out at padding places means nothing.
  at::Tensor input_ids_bt;
  /// Output of decoder layer i (counted from 0), before the final norm; each at most once.
  std::vector<int64_t> layer_ids;
  bool last_state = false;  // the final norm's output, which the head multiplies
  bool logits = false;
};

struct TargetStates {
  std::vector<at::Tensor> layers_bth;  // in the order of layer_ids, in the type of computation
  at::Tensor last_state_bth;
  at::Tensor logits_btv;
};

class Target {
 public:
  /// Reads configuration and weights, checks every shape. Throws sf::Error (data) with all tensors that are
  /// missing or misshapen, or with the reason why this model can't be run.
  [[nodiscard]] static Target load(const TargetOptions& options);
  Target(Target&&) noexcept;
  Target& operator=(Target&&) noexcept;
  ~Target();

  [[nodiscard]] const TargetConfig& config() const;
  /// Stops after the last layer that is asked for. Throws sf::Error (data) when an id is outside the
  /// vocabulary.
  [[nodiscard]] TargetStates forward(const TargetRequest& request) const;

 private:
  struct Weights;
  explicit Target(std::unique_ptr<Weights> weights);
  std::unique_ptr<Weights> weights_;
};

}  // namespace sf
