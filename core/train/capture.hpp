// core/train/capture.hpp: blocks replayed as CUDA graphs (training.compile_blocks). In: the uses of a micro-step's blocks, in order. Out: the same values
// and gradients as eager uses give, bit for bit, with one launch for each use and direction.
//
// All uses of a micro-step with one set of shapes are a program. The first micro-step of a program runs eagerly (libraries load and take memory at their
// first call), the second is recorded, forwards in tape order and backwards from the end, the rest are replayed. A use has graphs of its own: a second
// replay of one would overwrite what the first left for backward.
//
// Addresses: what a recorded use made is read where it lies; any other input or incoming gradient is copied to a fixed place first. Parameters and gradient
// buffers have fixed addresses anyway. All are checked before a replay.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "core/train/graphs.hpp"
#include "core/train/linear.hpp"
#include "sf/unit.hpp"

namespace sf {

/// One use of a unit as the runner has it. What it points to outlives the capture, the two functions can be called again at any time.
struct CapturedUnit {
  int64_t unit = 0, use = 0;
  const std::string* name = nullptr;
  bool recompute = false;
  const std::vector<at::Tensor>* parameters = nullptr;   // whole ones; empty before the unit's first forward
  std::vector<GradientSink>* sinks = nullptr;
  std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs)> forward;   // with a graph where gradients are recorded
  /// Adds the parameters' gradients to the sinks and returns those of `wanted`. Output i has gradient i, or none where that is undefined.
  std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& gradients, const std::vector<at::Tensor>& wanted)>
      differentiate;
};

class BlockCapture {
 public:
  struct Options {
    int64_t shapes_at_most = 6;   // distinct shapes of a use; more end the run
    bool static_shapes = false;   // for the message then
  };
  struct Counts {
    int64_t shapes = 0, uses = 0, graphs = 0, replays = 0;
    int64_t bytes = 0;            // that the graphs keep
    double milliseconds = 0;      // that recording took
  };

  BlockCapture(GraphRecorder& recorder, Options options);
  ~BlockCapture();

  void begin_micro_step();
  /// Shall this use run eagerly? Decides for the whole micro-step when asked for its first use. Throws Error(kUsage) when there are too many shapes.
  [[nodiscard]] bool is_eager(const CapturedUnit& unit, const std::vector<std::shared_ptr<ValueNode>>& inputs);

  struct Made {
    std::vector<at::Tensor> outputs;       // detached
    std::vector<bool> is_differentiable;
    int64_t place = 0;                     // of the use, for backward
  };
  Made forward(const CapturedUnit& unit, const std::vector<std::shared_ptr<ValueNode>>& inputs);
  /// The values that became of a use's outputs.
  void note_outputs(int64_t place, const std::vector<std::shared_ptr<ValueNode>>& outputs);
  /// One gradient for each output, undefined where there is none. Returns one for each different input that wants one, in the order of the inputs.
  std::vector<at::Tensor> backward(int64_t place, const CapturedUnit& unit, const std::vector<at::Tensor>& gradients);
  /// After the last backward of a micro-step.
  void end_micro_step();
  /// After a failure.
  void abandon();

  Counts counts() const;

 private:
  struct Use;
  struct Program;
  enum class Mode { undecided, eager, record, replay };

  Program& decide(const std::vector<std::string>& signature, const CapturedUnit& unit);
  std::vector<at::Tensor> inputs_of(Use& use, const std::vector<std::shared_ptr<ValueNode>>& nodes);
  void fill_inputs(const Use& use, const CapturedUnit& unit, const std::vector<std::shared_ptr<ValueNode>>& nodes);
  at::Tensor fixed_gradient(const at::Tensor& like_output);

  GraphRecorder& recorder_;
  Options options_;
  std::vector<std::unique_ptr<Program>> programs_;

  // Of the micro-step under way.
  Mode mode_ = Mode::undecided;
  Program* current_ = nullptr;
  size_t next_ = 0;                                                        // use of the program
  struct Origin { int64_t use, output; };
  std::map<const ValueNode*, Origin> made_;                                // by recorded uses
  std::map<const ValueNode*, size_t> copied_;                              // fixed inputs that hold a value
  std::map<size_t, std::shared_ptr<ValueNode>> held_;                      // which value a fixed input holds
  std::set<const void*> gradients_made_;                                   // addresses that recorded backwards filled
  int64_t replays_ = 0;
  double milliseconds_ = 0;
};

}  // namespace sf
