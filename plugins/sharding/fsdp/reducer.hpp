// plugins/sharding/fsdp/reducer.hpp: gradients of a group on their way to the ranks that update them. In: the gradient buffers of a window, whole,
// float32 or bfloat16. Out: each rank's part of their sums over the ranks, float32.
//
// Inputs of the collectives come from a ring of buffers at fixed addresses. Before a buffer is filled again its collective has been waited for, oldest
// first, by the current stream and never by the host: at most `max_inputs` reductions are in flight, whatever the order of groups.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "plugins/sharding/fsdp/layout.hpp"
#include "sf/comm.hpp"

namespace sf::fsdp {

class Reducer {
 public:
  struct Group {
    std::string name;   // label of the collective
    Layout layout;      // of the parameters with a gradient; with `replicate`, cut for one rank
  };
  struct Options {
    Comm* comm = nullptr;
    at::Device device = at::kCPU;
    at::ScalarType dtype = at::kFloat;      // of the sums on the wire
    int64_t max_inputs = 1;                 // at least 1
    Channel channel = Channel::main;
    bool replicate = false;                 // every rank gets the whole sum (all-reduce), written over the gradients that were given
  };
  Reducer(std::vector<Group> groups, Options options);

  /// `gradients` by member of the group's layout; undefined ones count as zero. They are read, and with `replicate` written, until drain.
  void reduce(int64_t group, const std::vector<at::Tensor>& gradients);
  /// This rank's part of the sums: float32 [part], complete after drain().
  [[nodiscard]] const at::Tensor& reduced(int64_t group) const { return reduced_[static_cast<size_t>(group)]; }
  /// The current stream waits for everything in flight.
  void drain();
  /// Forgets the window. The current stream waits for what is in flight, as its gradients may be overwritten now; what that says does not matter any more.
  void abandon();

  [[nodiscard]] int64_t buffers() const { return static_cast<int64_t>(inputs_.size()); }
  [[nodiscard]] int64_t bytes() const;

 private:
  struct InFlight {
    int64_t group = 0;
    at::Tensor input;
    std::vector<at::Tensor> gradients;   // written with `replicate`, else kept while they are read
    std::unique_ptr<CommWork> work;
  };
  void finish_oldest();

  std::vector<Group> groups_;
  Options options_;
  std::vector<at::Tensor> inputs_;       // the ring, each as large as the largest group
  int64_t next_input_ = 0;
  std::vector<at::Tensor> reduced_;      // [part], float32 whatever the wire's type: the collective adds in it
  std::deque<InFlight> in_flight_;       // oldest first
};

}  // namespace sf::fsdp
