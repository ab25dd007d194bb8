// sf/transform.hpp: the interface "sf.transform/1" of a transform: a plugin that computes linear products of a draft in its own way (float8, for one).
//
// Order of calls: take_over (also from `sf-host plan`, without device or weights) · build · codec, before the sharding backend is built · then for each
// window begin_window, encode_weights once for each unit before its first use, linears along the tape · alarms at its end. Evaluations never come here:
// they compute what an export will be served with. All calls are [main].
//
// Shapes: r rows · i input columns · o output columns · n linears taken over
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "sf/ops.hpp"

namespace sf {

/// Where a parameter's gradient of the window is summed. `buffer` is allocated once; `touched` says that the window has added to it.
struct GradientSink {
  at::Tensor buffer;
  bool touched = false;
  bool ever_touched = false;

  void touch() { touched = ever_touched = true; }
};

/// A product of a unit: a parameter NAME.weight of two dimensions, with or without NAME.bias.
struct LinearSpec {
  std::string unit;           // "block.0"
  std::string shard_group;    // of the unit; "root" for all that is no block
  std::string name;           // as UnitContext::linear takes it: "self_attn.q_proj"
  int64_t unit_index = 0;     // in Description::units
  int64_t parameter = 0;      // of the weight, among the unit's
  int64_t inputs = 0, outputs = 0;
  bool trainable = true;
};

/// One product of a call.
struct LinearProduct {
  int64_t linear = 0;                   // its place in the list that take_over was given
  at::Tensor weight_oi;                 // the whole parameter, a leaf
  at::Tensor bias_o;                    // undefined: none
  GradientSink* weight_sink = nullptr;  // null for a frozen parameter; outlives the graph
  GradientSink* bias_sink = nullptr;
};

/// What it keeps on the device for the whole run, in bytes.
struct TransformMemory {
  int64_t weights = 0;
  int64_t replaced_elements = 0;  // of the parameters that replaces() names
  std::string detail;         // "35 linears in float8, both layouts"
  bool is_gathered = false;   // its codec carries the weights that it took over, a byte for each element
};

/// How the parameters that a transform took over travel in a gather: encoded by the rank that holds a part, decoded where they are used. A sharding
/// backend with the capability `gather-codec` asks it for each parameter. The parts are whole rows, any number of them, none included; rows that only pad
/// a part may be encoded and gathered with it and are not decoded.
///
/// For each window: magnitudes of this rank's parts, made the maximum over the ranks by the backend (one all-reduce for all parameters), given back; then
/// encode, gather, decode. What a carried parameter's whole tensor holds meanwhile is undefined: its products come from what was decoded. An
/// evaluation gathers as if there were no codec.
class GatherCodec {
 public:
  /// Does the parameter travel encoded? The same answer at all times once built.
  virtual bool carries(int64_t unit, int64_t parameter) const = 0;
  /// Bytes of a row in a payload.
  virtual int64_t row_bytes(int64_t unit, int64_t parameter) const = 0;
  /// Largest magnitude of each part, 0 for one without rows: float32 [parts.size()] on the device. `parts` are those of the carried parameters, units and
  /// parameters in their order.
  virtual at::Tensor magnitudes(const std::vector<at::Tensor>& parts_ri) = 0;
  /// The maximum over all ranks of what magnitudes() gave.
  virtual void set_magnitudes(const at::Tensor& pooled) = 0;
  /// Rows of this rank's part into bytes: payload_rb is uint8 [r, row_bytes]. Enqueued on the current stream.
  virtual void encode(int64_t unit, int64_t parameter, const at::Tensor& part_ri, const at::Tensor& payload_rb) = 0;
  /// Rows row_begin and following of the whole parameter from their payload, on the current stream.
  virtual void decode(int64_t unit, int64_t parameter, int64_t row_begin, const at::Tensor& payload_rb) = 0;
  /// All rows have been decoded, and serve until the next window.
  virtual void decoded(int64_t unit, int64_t parameter) = 0;

 protected:
  ~GatherCodec() = default;
};

class Transform {
 public:
  /// Which linears it computes, from shapes alone: a flag for each. Asking again gives the same answer. Throws sf::Error when it can do nothing with this draft.
  virtual std::vector<bool> take_over(const std::vector<LinearSpec>& linears) = 0;
  /// After take_over.
  virtual TransformMemory memory() const = 0;
  /// Allocates on the device what take_over asks for. `ops` outlives the transform.
  virtual void build(at::Device device, at::ScalarType dtype, Ops& ops) = 0;
  /// Null when parameters are to be gathered as they are. After build.
  virtual GatherCodec* codec() = 0;

  virtual void begin_window() = 0;
  /// The unit's whole parameters are there for the first time in this window: `whole[p]` by place in the unit. Never inside a recorded graph, so what it
  /// writes to fixed addresses is seen by one.
  virtual void encode_weights(int64_t unit, const std::vector<at::Tensor>& whole) = 0;
  /// x @ W^T (+ bias) for products that read the same x [..., i]; all were taken over. Differentiable in x; weight and bias gradients are added to the sinks,
  /// which are touched. May be recorded into a graph: no host reads, no state that changes from call to call.
  virtual std::vector<at::Tensor> linears(const std::vector<LinearProduct>& products, const at::Tensor& x) = 0;

  /// Flags of this window on the device, float32, 0 where all was well; undefined: none. Fixed size. The host reads them with its one read of the window.
  virtual at::Tensor alarms() = 0;
  /// What flags that are not all 0 mean: what happened, naming unit and linear. The run ends with it.
  virtual std::string alarm_text(const std::vector<double>& flags) const = 0;

  /// Is encode_weights the only reader of this parameter in a window? Then its memory may serve others from there to the update, which writes it anew.
  virtual bool replaces(int64_t unit, int64_t parameter) const {
    (void)unit, (void)parameter;
    return false;
  }

 protected:
  ~Transform() = default;
};

inline constexpr const char* kTransformInterface = "sf.transform/1";

}  // namespace sf
