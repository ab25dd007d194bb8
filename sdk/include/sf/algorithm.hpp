// sf/algorithm.hpp: the interface "sf.algorithm/1" of an algorithm plugin.
//
// Order of calls: describe (also from `sf-host plan`, without device or weights) · bind · then for each sample prepare, for each batch finish and
// weigh (these three with host tensors only, in the data thread and, for evaluation, in the main thread at the same time: they keep no
// state), for each micro-step micro_step · export_spec at the end.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "sf/unit.hpp"

namespace sf {

/// What the recipe and the two model configurations say. JSON texts are Hugging Face config.json files.
struct ModelFacts {
  std::string target_config_json;
  std::string draft_config_json;          // empty: the algorithm makes one from the target's
  std::string draft_config_path = {};     // where that text stands, for messages
  int64_t draft_num_hidden_layers = 0;    // 0: as the configuration or the algorithm says
  int64_t draft_block_size = 0;           // 0: likewise
  std::vector<int64_t> target_layer_ids;  // empty: likewise
  int64_t mask_token_id = -1;             // -1: likewise
  int64_t tokenizer_mask_token_id = -1;   // of the target's tokenizer; -1: it has none, or it is not known
  int64_t tokenizer_tokens = -1;          // its length; -1: not known
  std::string rope_rounding = "exact";    // or "reference"
  bool bfloat16 = true;                   // type of weights and computation, else float32
  bool static_shapes = false;             // every batch has the same number of block slots
};

/// One tensor of a feature record. `columns` 0: a vector over tokens.
struct FeatureRead {
  std::string name;                   // "hidden_states"
  int64_t columns = 0;                // layers x hidden
  bool optional = false;
  std::vector<int64_t> layer_ids = {};  // which target layers, in this order; empty for tokens and masks
  bool last_state = false;            // the post-norm state that the target multiplies by its head
};

enum class Axis { tokens, slots, none };

/// A tensor that prepare() leaves in a sample; the host pads its first axis and stacks it to [b, ...].
struct BatchField {
  std::string name;
  Axis axis = Axis::tokens;
  double pad_value = 0;
};

enum class Pooling { window, micro, mean };  // how numerators and denominators of a window pool

/// A tensor that belongs to a draft and is not trained: saved with checkpoints and exported, the same on every rank.
struct BufferSpec {
  std::string name;
  std::vector<int64_t> shape;
  at::ScalarType dtype = at::ScalarType::Long;
};

/// How often a token stands at supervised positions of the training samples.
struct TokenCount {
  int64_t token = 0, count = 0;
};

/// One line for the user.
struct Remark {
  std::string text;
  bool is_warning = false;
};

struct Description {
  std::vector<UnitSpec> units;
  std::vector<FeatureRead> reads;
  std::vector<BatchField> fields;
  Pooling pooling = Pooling::window;
  int64_t slots = 0;                  // block slots per sample with static shapes; 0: the algorithm has none
  int64_t slots_at_most = 0;          // likewise without static shapes, for size estimates; 0: as `slots`
  int64_t rows_per_slot = 0;          // draft rows per slot (block size), for size estimates
  int64_t drafted_tokens = 0;         // tokens drafted after a known one, what the bigram baseline drafts, too; 0: rows_per_slot - 1
  int64_t head_rows_at_most = 0;      // rows whose logits exist at the same time, for size estimates; 0: all draft rows
  int64_t rows_per_token = 0;         // draft rows per token of a sample, instead of slots; for size estimates
  int64_t head_columns = 0;           // width of the draft's own head, for size estimates; 0: the target's vocabulary
  std::vector<BufferSpec> buffers;
  bool wants_token_counts = false;    // buffers are made from set_token_counts() when there is no buffers_file and no checkpoint
  std::string buffers_file;           // a safetensors or torch.save file that holds the buffers; empty: none
  bool needs_embedding = true;        // frozen tables of the target
  bool needs_head = true;
  std::string draft_config_json;      // the resolved configuration; checkpoints and exports carry it
  std::map<std::string, std::string> fixed;  // what a resumed run must share, as text: "block_size" -> "16"
};

/// Frozen tables of the target on the training device; undefined when not asked for.
struct TargetTables {
  at::Tensor embedding_vh;
  at::Tensor head_vh;
};

/// One record on its way to a batch. Tensors are on the CPU; features keep the type they were captured in.
struct Sample {
  int64_t index = 0;
  int64_t tokens = 0;
  std::map<std::string, at::Tensor> tensors;   // "input_ids" [s] int64, "loss_mask" [s] int64, features [s, columns]
};

/// Random numbers that depend on (seed, stream, epoch, sample, position) alone.
struct SampleContext {
  bool evaluating = false;                     // draws are the evaluation's own; every position that may start a block is wanted
  std::function<std::vector<uint64_t>(const char* stream, int64_t count)> draw;
};

struct Batch {
  int64_t rows = 0;        // b; a dead row has every field at its pad value
  int64_t tokens = 0;      // padded s
  int64_t slots = 0;       // padded w
  std::vector<int64_t> sample_indices;         // -1 for a dead row
  std::map<std::string, at::Tensor> tensors;   // [b, ...]

  const at::Tensor& at(const std::string& name) const { return tensors.at(name); }
};

/// What an export consists of, and the contract it is checked against before anything is written.
struct ExportSpec {
  std::string config_json;                           // for config.json
  std::vector<std::string> required_config_keys;     // dotted: "dflash_config.mask_token_id"
  std::vector<ParameterSpec> tensors;                // full names and shapes that the engine reads
  std::vector<BufferSpec> buffers;                   // likewise, in their own type
  std::string engine_note;                           // one line for the user: what serves it
};

class Algorithm {
 public:
  /// Throws sf::Error with what, why and fix when configuration and options do not fit. May be called again before bind; then the
  /// units of the earlier call are gone. [main]
  virtual Description describe(const ModelFacts& facts) = 0;
  /// The unit behind describe().units[index]; lives as long as the algorithm. [main]
  virtual Unit& unit(int64_t index) = 0;
  /// Frozen tables and the device; called once before the first batch. [main]
  virtual void bind(const TargetTables& tables, Ops& ops) = 0;
  /// Makes the buffers from the training samples: tokens in the order in which they first appear, samples in their order, each sample's tokens
  /// ascending. Once, before the first batch, unless set_buffers was called. Returns what became of them. [main]
  virtual Remark set_token_counts(const std::vector<TokenCount>&) { return {}; }
  /// The buffers of a checkpoint or a file, by name, on the CPU; `source` for messages. Checked: throws sf::Error (data). After bind. [main]
  virtual void set_buffers(const std::map<std::string, at::Tensor>&, const std::string& source) { (void)source; }
  /// All of Description::buffers by name, on the CPU; empty before they are made. [main]
  virtual std::map<std::string, at::Tensor> buffers() const { return {}; }
  /// Adds figures that are no ratio of sums but a function of some. [main]
  virtual void derive_metrics(std::map<std::string, double>&) const {}
  /// Content checks and what is drawn per sample (anchors, label rows). Returns why the sample can't be used, empty when it can. [data]
  virtual std::string prepare(Sample& sample, const SampleContext& context) = 0;
  /// After stacking: whatever spans rows of the batch (row lists). Host tensors. [data]
  virtual void finish(Batch& batch) = 0;
  /// The batch's denominator, from masks and anchors alone; 0 for a dead batch. [data]
  virtual double weigh(const Batch& batch) const = 0;
  /// One forward; calls units in an order that depends on the recipe and the phase only. [main]
  virtual void micro_step(Runner& runner, const Batch& batch) = 0;
  /// What the export consists of, from the last describe(); the host checks and writes it. [main]
  virtual ExportSpec export_spec() const = 0;

 protected:
  ~Algorithm() = default;
};

inline constexpr const char* kAlgorithmInterface = "sf.algorithm/1";
inline constexpr const char* kOpsService = "sf.ops/1";

}  // namespace sf
