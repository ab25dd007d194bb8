// core/dist: the ranks of a run. What comes in: launcher's variables, a recipe that all ranks must share. What goes out: a World, the run's store,
// collectives (sf/comm.hpp) over gloo or NCCL, and a watchdog that never lets a run hang.
//
// world.hpp: which rank this process is, as the program that started it says. No LibTorch.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace sf {

struct World {
  int64_t rank = 0, size = 1;
  int64_t local_rank = 0, local_size = 1;   // on this machine
  std::string host;                          // where rank 0 keeps the store; empty with one rank
  int64_t port = 0;                          // 0: rank 0 takes a free one and writes it to `folder`
  std::string folder;                        // of sf-host's launcher, on this machine: "port" and notes about ranks that died; may be empty
  bool store_is_running = false;             // torchrun's agent keeps a store at host:port; rank 0 joins it like the others
  std::string attempt;                       // restarts of one job must not see each other's keys; may be empty
  std::string origin;                        // "torchrun (RANK=1, WORLD_SIZE=2 ...)"; empty when nothing was found

  [[nodiscard]] bool is_lead() const { return rank == 0; }
};

/// A variable of the environment; nothing when it is not set or empty.
using Environment = std::function<std::optional<std::string>(const char* name)>;
[[nodiscard]] Environment process_environment();

/// The first of these that is there:
///   RANK, WORLD_SIZE [LOCAL_RANK, LOCAL_WORLD_SIZE], MASTER_ADDR, MASTER_PORT    sf-host --nproc, torchrun, Kubernetes
///   OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE                        mpirun (Open MPI)
///   SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID                            srun
///   PMI_RANK, PMI_SIZE [MPI_LOCALRANKID, MPI_LOCALNRANKS]                        mpirun (MPICH, Intel)
/// The last three take MASTER_ADDR and MASTER_PORT when they are set; else srun's first node, or this machine when all ranks are on it.
/// Nothing found: one rank. Throws Error(kUsage) when a set is incomplete, contradicts itself or holds no number.
[[nodiscard]] World world_from(const Environment& environment);

/// First name of Slurm's "node[03-05,9],login1": "node03".
[[nodiscard]] std::string first_host(const std::string& node_list);

/// What --nproc, --nnodes, --node-rank and --rendezvous say.
struct LaunchFlags {
  int64_t nproc = 0;                         // 0: not given
  int64_t nnodes = 1, node_rank = 0;
  std::string rendezvous;                    // host:port; empty: this machine, any free port

  [[nodiscard]] bool starts_ranks() const { return nproc > 0; }
};

/// Variables for rank `local_rank` of this node, as a launcher sets them. Throws Error(kUsage) when the flags contradict each other.
[[nodiscard]] std::vector<std::pair<std::string, std::string>> environment_of_rank(const LaunchFlags& flags, int64_t local_rank,
                                                                                   const std::string& folder);

}  // namespace sf
