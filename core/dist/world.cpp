#include "core/dist/world.hpp"

#include <charconv>
#include <cstdlib>

#include "core/base/error.hpp"

namespace sf {
namespace {

constexpr int64_t kDefaultPort = 29500;  // torchrun's
constexpr int64_t kMostRanks = 1 << 20;  // far beyond any run: a larger number is a slip, and one more for each rank would be kept of it
constexpr int64_t kLargestNumber = 0xffff'ffff;  // Slurm's numbers of jobs and steps have 32 bits

[[noreturn]] void refuse(const std::string& what, const std::string& hint) { throw Error(ExitCode::kUsage, what, hint); }

// Reads variables and remembers which, for the plan.
class Reader {
 public:
  explicit Reader(const Environment& environment) : environment_(environment) {}

  std::optional<std::string> text(const char* name) {
    std::optional<std::string> value = environment_(name);
    if (value) {
      seen_ += format("{}{}={}", seen_.empty() ? "" : ", ", name, *value);
    }
    return value;
  }
  std::optional<int64_t> number(const char* name) {
    const std::optional<std::string> value = text(name);
    if (!value) {
      return std::nullopt;
    }
    int64_t number = 0;
    const auto [end, error] = std::from_chars(value->data(), value->data() + value->size(), number);
    if (error != std::errc() || end != value->data() + value->size() || number < 0 || number > kLargestNumber) {
      refuse(format("{}=\"{}\" in the environment is no number of ranks or ports", name, *value), format("unset {} to run one process, or start it through a launcher", name));
    }
    return number;
  }
  int64_t needed(const char* name, const char* because) {
    const std::optional<int64_t> value = number(name);
    if (!value) {
      refuse(format("{} is set, but {} is not: this process can't tell which of how many ranks it is", because, name),
             format("unset {} to run one process, or let a launcher set both", because));
    }
    return *value;
  }
  [[nodiscard]] const std::string& seen() const { return seen_; }

 private:
  const Environment& environment_;
  std::string seen_;
};

void check_ranks(const World& world, const std::string& seen) {
  if (world.size > kMostRanks) {
    refuse(format("{} ranks ({}); at most {} are possible", world.size, seen, kMostRanks), "check what the launcher sets");
  }
  if (world.size < 1 || world.rank >= world.size) {
    refuse(format("rank {} of {} ranks ({})", world.rank, world.size, seen), "ranks count from 0; check what the launcher sets");
  }
  if (world.local_size < 1 || world.local_rank >= world.local_size || world.local_size > world.size) {
    refuse(format("local rank {} of {} on this machine, in a run of {} ranks ({})", world.local_rank, world.local_size, world.size, seen),
           "check what the launcher sets");
  }
}

// `default_port` 0: rank 0 takes a free one and tells it in our launcher's folder.
void find_rank_zero(World& world, Reader& reader, const std::string& default_host, int64_t default_port) {
  world.host = reader.text("MASTER_ADDR").value_or(default_host);
  world.port = reader.number("MASTER_PORT").value_or(default_port);
  if (world.host.empty() && world.size == world.local_size) {
    world.host = "127.0.0.1";
  }
  if (world.size > 1 && world.host.empty()) {
    refuse(format("rank {} of {} does not know where rank 0 is: MASTER_ADDR is not set ({})", world.rank, world.size, reader.seen()),
           "set MASTER_ADDR to rank 0's machine and MASTER_PORT to a free port there, the same for all ranks");
  }
  if (world.port > 65535 || (world.port == 0 && world.size > 1 && default_port != 0)) {
    refuse(format("MASTER_PORT={} is no port", world.port), "ports are 1 to 65535");
  }
}

}  // namespace

Environment process_environment() {
  return [](const char* name) -> std::optional<std::string> {
    const char* value = std::getenv(name);
    return value == nullptr || value[0] == 0 ? std::nullopt : std::optional<std::string>(value);
  };
}

std::string first_host(const std::string& node_list) {
  const size_t bracket = node_list.find_first_of("[,");
  if (bracket == std::string::npos || node_list[bracket] == ',') {
    return node_list.substr(0, bracket);
  }
  const size_t end = node_list.find_first_of("-,]", bracket);
  const size_t close = node_list.find(']', bracket);
  if (end == std::string::npos || close == std::string::npos) {
    return "";
  }
  const size_t after = std::min(node_list.find(',', close), node_list.size());
  return node_list.substr(0, bracket) + node_list.substr(bracket + 1, end - bracket - 1) + node_list.substr(close + 1, after - close - 1);
}

World world_from(const Environment& environment) {
  World world;
  Reader reader(environment);
  std::string who;
  if (environment("RANK") || environment("WORLD_SIZE")) {
    const bool is_ours = environment("SF_LAUNCHER").has_value();
    const bool is_torchrun = environment("TORCHELASTIC_RUN_ID").has_value();
    who = is_ours ? "sf-host --nproc" : is_torchrun ? "torchrun" : environment("KUBERNETES_SERVICE_HOST") ? "Kubernetes" : "a launcher";
    world.rank = reader.needed("RANK", "WORLD_SIZE");
    world.size = reader.needed("WORLD_SIZE", "RANK");
    const std::optional<int64_t> local = reader.number("LOCAL_RANK");  // absent in pods: one process in each
    world.local_rank = local.value_or(0);
    world.local_size = reader.number("LOCAL_WORLD_SIZE").value_or(local ? std::max<int64_t>(world.local_rank + 1, 1) : 1);
    if (is_ours) {
      world.folder = environment("SF_LAUNCHER").value();
    }
    find_rank_zero(world, reader, "", is_ours ? 0 : kDefaultPort);
    if (!is_ours) {  // torchrun may have started the launcher; the ranks are the launcher's, and so is their store
      world.store_is_running = environment("TORCHELASTIC_USE_AGENT_STORE") == "True";
      world.attempt = environment("TORCHELASTIC_RESTART_COUNT").value_or("");
    }
  } else if (environment("OMPI_COMM_WORLD_RANK")) {
    who = "mpirun";
    world.rank = reader.needed("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
    world.size = reader.needed("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK");
    world.local_rank = reader.needed("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_RANK");
    world.local_size = reader.number("OMPI_COMM_WORLD_LOCAL_SIZE").value_or(world.local_rank + 1);
    find_rank_zero(world, reader, "", kDefaultPort);
  } else if (environment("SLURM_PROCID") && environment("SLURM_STEP_NUM_TASKS")) {  // the second is srun's; a batch script has the first alone
    who = "srun";
    world.rank = reader.needed("SLURM_PROCID", "SLURM_STEP_NUM_TASKS");
    world.size = reader.needed("SLURM_STEP_NUM_TASKS", "SLURM_PROCID");
    world.local_rank = reader.needed("SLURM_LOCALID", "SLURM_PROCID");
    const std::string nodes = environment("SLURM_STEP_NODELIST").value_or(environment("SLURM_JOB_NODELIST").value_or(""));
    const bool one_node = environment("SLURM_STEP_NUM_NODES") == "1";
    world.local_size = one_node ? world.size : world.local_rank + 1;
    const int64_t job = reader.number("SLURM_JOB_ID").value_or(0);
    const int64_t step = reader.number("SLURM_STEP_ID").value_or(0);
    find_rank_zero(world, reader, one_node ? "127.0.0.1" : first_host(nodes), 20000 + (job * 31 + step) % 20000);  // two jobs on a node get different ports
  } else if (environment("PMI_RANK") && environment("PMI_SIZE")) {
    who = "mpirun";
    world.rank = reader.needed("PMI_RANK", "PMI_SIZE");
    world.size = reader.needed("PMI_SIZE", "PMI_RANK");
    world.local_rank = reader.number("MPI_LOCALRANKID").value_or(reader.number("PMI_LOCAL_RANK").value_or(world.size == 1 ? 0 : -1));
    if (world.local_rank < 0) {
      refuse(format("PMI_RANK={} of PMI_SIZE={}, but neither MPI_LOCALRANKID nor PMI_LOCAL_RANK says which rank of this machine that is",
                    world.rank, world.size),
             "set MPI_LOCALRANKID, or RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT");
    }
    world.local_size = reader.number("MPI_LOCALNRANKS").value_or(reader.number("PMI_LOCAL_SIZE").value_or(world.local_rank + 1));
    find_rank_zero(world, reader, "", kDefaultPort);
  } else {
    return world;
  }
  check_ranks(world, reader.seen());
  world.origin = format("{} ({})", who, reader.seen());
  return world;
}

std::vector<std::pair<std::string, std::string>> environment_of_rank(const LaunchFlags& flags, int64_t local_rank, const std::string& folder) {
  std::string host = "127.0.0.1", port = "0";
  if (!flags.rendezvous.empty()) {
    const size_t colon = flags.rendezvous.rfind(':');
    port = colon == std::string::npos ? "" : flags.rendezvous.substr(colon + 1);
    host = flags.rendezvous.substr(0, colon);
    if (host.size() > 2 && host.front() == '[' && host.back() == ']') {  // [::1]:29500
      host = host.substr(1, host.size() - 2);
    }
    int64_t number = 0;
    const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), number);
    if (host.empty() || port.empty() || error != std::errc() || end != port.data() + port.size() || number < 1 || number > 65535) {
      refuse(format("--rendezvous {}: expected HOST:PORT with a port from 1 to 65535", flags.rendezvous), "for example --rendezvous node0:29500");
    }
  } else if (flags.nnodes > 1) {
    refuse(format("--nnodes {} without --rendezvous", flags.nnodes), "--rendezvous HOST:PORT names the machine of node 0 and a free port there");
  }
  if (flags.nproc < 1 || flags.nnodes < 1 || flags.node_rank < 0 || flags.node_rank >= flags.nnodes) {
    refuse(format("--nproc {}, --nnodes {}, --node-rank {}", flags.nproc, flags.nnodes, flags.node_rank),
           "at least one rank and one node; nodes count from 0");
  }
  if (flags.nproc > kMostRanks || flags.nnodes > kMostRanks || flags.nproc * flags.nnodes > kMostRanks) {
    refuse(format("--nproc {}, --nnodes {}: at most {} ranks are possible", flags.nproc, flags.nnodes, kMostRanks), "--nproc is for each machine, --nnodes counts machines");
  }
  const auto text = [](int64_t number) { return std::to_string(number); };
  return {{"RANK", text(flags.node_rank * flags.nproc + local_rank)},
          {"WORLD_SIZE", text(flags.nnodes * flags.nproc)},
          {"LOCAL_RANK", text(local_rank)},
          {"LOCAL_WORLD_SIZE", text(flags.nproc)},
          {"MASTER_ADDR", host},
          {"MASTER_PORT", port},
          {"SF_LAUNCHER", folder}};
}

}  // namespace sf
