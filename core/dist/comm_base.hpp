// core/dist/comm_base.hpp: what the collectives of all libraries share: numbers and counts for the watchdog, tests and metrics, texts through the store.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/dist/rank_group.hpp"
#include "sf/comm.hpp"

namespace sf {

class RankComm : public Comm {
 public:
  explicit RankComm(RankGroup& group) : group_(group) {}
  virtual ~RankComm() = default;

  int64_t rank() const final { return group_.world().rank; }
  int64_t size() const final { return group_.world().size; }
  int64_t local_rank() const final { return group_.world().local_rank; }
  std::vector<std::string> gather_texts(const std::string& text, std::string_view label) final { return group_.gather_texts(text, label); }
  std::vector<std::pair<std::string, int64_t>> counts() const final { return {counts_.begin(), counts_.end()}; }

  /// "gloo" or "NCCL 2.28.9", for the log.
  virtual std::string library() const = 0;

 protected:
  /// Counts and returns "all_gather block.0".
  std::string count(const char* kind, std::string_view label);
  RankGroup& group() { return group_; }

 private:
  RankGroup& group_;
  std::map<std::string, int64_t> counts_;
};

/// Shapes and types of a gather or reduce-scatter; SF_CHECKs. `may_be_wide`: the part may be float32 where the whole is bfloat16.
void check_parts(const at::Tensor& whole, const at::Tensor& part, int64_t ranks, const std::string& label, bool may_be_wide = false);

/// Runs of a whole of `whole` elements, in parts of `part`: each contiguous, of the type and of one part, with `rank` >= 0 that one's; SF_CHECKs.
void check_runs(const std::vector<PartRun>& runs, int64_t whole, int64_t part, int64_t rank, at::ScalarType type, const std::string& label);
/// memory of each run <- its elements of `whole`, and the other way. On the current stream.
void copy_to_runs(const std::vector<PartRun>& runs, const at::Tensor& whole);
void copy_from_runs(const at::Tensor& whole, const std::vector<PartRun>& runs);

/// Collectives on the CPU. Reductions are sums in rank order in float32 (float64 and int64 in their own type), rounded once: the same bits every run.
/// `library`: libsf_comm_gloo.so. Throws Error(kCommunication) when it can't be opened or the ranks do not reach each other.
std::unique_ptr<RankComm> open_gloo(RankGroup& group, const std::filesystem::path& library);

/// Whether, between GPUs of one machine, gathers and reductions of registered buffers go by their copy engines (core/dist/peer_copies.hpp).
enum class PeerCopying { off, if_possible, required };

/// Collectives on GPUs by NCCL, on a stream of their own. `engine_cuda`: handle of libsf_engine_cuda.so. Throws Error(kCommunication), also when copies are
/// required and some rank can't; if_possible leaves gathers and reductions to NCCL then, on all ranks, and says why.
std::unique_ptr<RankComm> open_nccl(RankGroup& group, at::Device device, void* engine_cuda, PeerCopying peers);

}  // namespace sf
