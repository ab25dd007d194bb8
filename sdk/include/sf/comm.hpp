// sf/comm.hpp: the service "sf.comm/1", collectives between the ranks of a run. Sharding backends get it with their Placement; every other plugin
// of tier torch_cxx by host.find_service<sf::Comm>(sf::kCommService): there from Sharding::build and Algorithm::bind on, and only in a run of several
// ranks. Lives until destroy.
//
// Order is the contract: every rank issues the same calls with the same sizes in the same order on each channel. Each call starts
// after what the current stream has queued so far and runs beside what is queued later; wait() makes the current stream wait, never the
// host. On the CPU a call may be done when it returns. A collective that does not finish within the run's time limit ends the run with its
// label and the ranks that had not arrived. All calls are [main].
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace sf {

/// A collective that has been issued. Keeps its tensors alive until wait() or destruction.
class CommWork {
 public:
  virtual ~CommWork() = default;
  /// The current stream waits for the result. May be called once.
  virtual void wait() = 0;
};

/// Two collectives of one channel run one after the other. `reduction` is a communicator of its own after open_reduction_channel,
/// else the same as `main`.
enum class Channel { main, reduction };
enum class Reduction { sum, max };

/// A run of a whole [W * n] that lies in memory of its own: its elements [place, place + memory.numel()), all of them of one rank's part. `memory` is contiguous.
struct PartRun {
  at::Tensor memory;
  int64_t place = 0;
};

class Comm {
 public:
  virtual int64_t rank() const = 0;
  virtual int64_t size() const = 0;  // W
  virtual int64_t local_rank() const = 0;

  /// whole [W * n] <- part [n] of every rank, in rank order. `part` may be the rank's own place in `whole`. Contiguous, any dtype.
  virtual std::unique_ptr<CommWork> all_gather(const at::Tensor& whole, const at::Tensor& part, std::string_view label,
                                               Channel channel = Channel::main) = 0;
  /// part [n] <- sum over ranks of their whole [W * n] at this rank's place. float32 or bfloat16; a float32 part of a bfloat16 whole gets the sum as it is
  /// formed. On the CPU, and where GPUs of one machine copy from each other, that is in rank order in float32; NCCL rounds sums to bfloat16 on its way.
  virtual std::unique_ptr<CommWork> reduce_scatter(const at::Tensor& part, const at::Tensor& whole, std::string_view label,
                                                   Channel channel = Channel::main) = 0;
  /// In place. float32, float64, bfloat16, int64. The same bits on every rank.
  virtual std::unique_ptr<CommWork> all_reduce(const at::Tensor& tensor, Reduction reduction, std::string_view label,
                                               Channel channel = Channel::main) = 0;
  /// In place, from `root`. Any dtype.
  virtual std::unique_ptr<CommWork> broadcast(const at::Tensor& tensor, int64_t root, std::string_view label,
                                              Channel channel = Channel::main) = 0;

  /// A second communicator over the same ranks for Channel::reduction. All ranks call it or none.
  virtual void open_reduction_channel() = 0;
  /// A buffer at a fixed address for the rest of the run, so that the library may register it. No effect where that means nothing.
  virtual void register_buffer(const at::Tensor& buffer) = 0;

  /// Host side, through the run's store, not through the device: one text of each rank, in rank order. Waits for all of them.
  virtual std::vector<std::string> gather_texts(const std::string& text, std::string_view label) = 0;

  /// How many collectives of each kind were issued so far, by label: "all_gather block.0" -> 12. For tests and metrics.
  virtual std::vector<std::pair<std::string, int64_t>> counts() const = 0;

  /// An all_gather whose result goes to the memory of `runs`, of the part's dtype, and not to `staging` [W * n]: it may come through there, and what that holds
  /// afterwards is not defined. Nobody reads or writes either before wait(). Counted as all_gather; ranks may differ in their runs.
  virtual std::unique_ptr<CommWork> all_gather_to(const std::vector<PartRun>& runs, const at::Tensor& staging, const at::Tensor& part, std::string_view label,
                                                  Channel channel = Channel::main) = 0;
  /// A reduce_scatter in which this rank's own share of its part comes from `own`, float32, unchanged until wait(), and not from its place in `whole`, which may be
  /// overwritten. Elements of that place that no run covers are padding: what the part holds there afterwards is not defined. Where GPUs of one machine copy from
  /// each other the own share is added as it is, elsewhere in the type of `whole`. Counted as reduce_scatter, and one rank may call this where another calls that.
  virtual std::unique_ptr<CommWork> reduce_scatter_from(const std::vector<PartRun>& own, const at::Tensor& part, const at::Tensor& whole, std::string_view label,
                                                        Channel channel = Channel::main) = 0;
  /// Whether an all_gather_to of a registered part writes to its runs alone, so that `staging` may be undefined. The same on all ranks. False from a register_buffer
  /// on whose memory some rank can't share; never true after that.
  virtual bool gathers_straight() const = 0;

 protected:
  ~Comm() = default;
};

inline constexpr const char* kCommService = "sf.comm/1";

}  // namespace sf
