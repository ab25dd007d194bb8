// Which rank a process is, as launchers say it.
#include <doctest/doctest.h>

#include <map>

#include "core/base/error.hpp"
#include "core/dist/world.hpp"

using namespace sf;

namespace {

Environment from(std::map<std::string, std::string> variables) {
  return [variables = std::move(variables)](const char* name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional<std::string>(found->second);
  };
}

std::string refusal(std::map<std::string, std::string> variables) {
  try {
    (void)world_from(from(std::move(variables)));
    return "";
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::kUsage);
    return error.what();
  }
}

bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("world: an empty environment is one rank") {
  const World world = world_from(from({}));
  CHECK(world.size == 1);
  CHECK(world.origin.empty());
}

TEST_CASE("world: every launcher's variables are read and named") {
  struct Row {
    const char* name;
    std::map<std::string, std::string> variables;
    int64_t rank, size, local_rank, local_size;
    const char* host;
    int64_t port;
  };
  const std::vector<Row> rows = {
      {"torchrun", {{"RANK", "9"}, {"WORLD_SIZE", "16"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "8"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "1234"},
                    {"TORCHELASTIC_RUN_ID", "x"}}, 9, 16, 1, 8, "a", 1234},
      {"Kubernetes", {{"RANK", "3"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "job-0"}, {"MASTER_PORT", "23456"}, {"KUBERNETES_SERVICE_HOST", "10.0.0.1"}},
       3, 4, 0, 1, "job-0", 23456},
      {"mpirun", {{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}},
       1, 2, 1, 2, "127.0.0.1", 29500},
      {"srun", {{"SLURM_PROCID", "5"}, {"SLURM_STEP_NUM_TASKS", "8"}, {"SLURM_LOCALID", "1"}, {"SLURM_STEP_NODELIST", "gpu[07-08]"}, {"SLURM_STEP_NUM_NODES", "2"},
                {"SLURM_JOB_ID", "100"}, {"SLURM_STEP_ID", "0"}}, 5, 8, 1, 2, "gpu07", 20000 + 3100},
      {"srun", {{"SLURM_PROCID", "1"}, {"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_LOCALID", "1"}, {"SLURM_STEP_NUM_NODES", "1"}, {"MASTER_PORT", "7000"}},
       1, 2, 1, 2, "127.0.0.1", 7000},
      {"mpirun", {{"PMI_RANK", "2"}, {"PMI_SIZE", "4"}, {"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "2"}, {"MASTER_ADDR", "b"}, {"MASTER_PORT", "9"}},
       2, 4, 0, 2, "b", 9}};
  for (const Row& row : rows) {
    CAPTURE(row.name);
    const World world = world_from(from(row.variables));
    CHECK(world.rank == row.rank);
    CHECK(world.size == row.size);
    CHECK(world.local_rank == row.local_rank);
    CHECK(world.local_size == row.local_size);
    CHECK(world.host == row.host);
    CHECK(world.port == row.port);
    CHECK_MESSAGE(world.origin.starts_with(row.name), world.origin);
    CHECK_MESSAGE(has(world.origin, "="), world.origin);
  }
}

TEST_CASE("world: a batch script under Slurm, which srun did not start, is one process") {
  CHECK(world_from(from({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}, {"SLURM_LOCALID", "0"}})).size == 1);
}

TEST_CASE("world: torchrun's agent keeps the store, and a restart has keys of its own") {
  const World world = world_from(from({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "2"}, {"MASTER_ADDR", "h"},
                                       {"MASTER_PORT", "5"}, {"TORCHELASTIC_USE_AGENT_STORE", "True"}, {"TORCHELASTIC_RESTART_COUNT", "3"}}));
  CHECK(world.store_is_running);
  CHECK(world.attempt == "3");
}

TEST_CASE("world: ranks of sf-host that torchrun has started itself keep a store of their own") {
  std::map<std::string, std::string> variables = {{"TORCHELASTIC_USE_AGENT_STORE", "True"}, {"TORCHELASTIC_RESTART_COUNT", "3"}, {"TORCHELASTIC_RUN_ID", "x"}};
  for (const auto& [name, value] : environment_of_rank({.nproc = 2}, 0, "/tmp/x")) {
    variables[name] = value;
  }
  const World world = world_from(from(variables));
  CHECK_FALSE(world.store_is_running);
  CHECK(world.attempt.empty());
  CHECK_MESSAGE(world.origin.starts_with("sf-host --nproc"), world.origin);
}

TEST_CASE("world: sets that are incomplete, contradict themselves or hold no number are refused with their names") {
  CHECK(has(refusal({{"RANK", "1"}}), "WORLD_SIZE"));
  CHECK(has(refusal({{"WORLD_SIZE", "2"}}), "RANK"));
  CHECK(has(refusal({{"RANK", "two"}, {"WORLD_SIZE", "2"}}), "RANK=\"two\""));
  CHECK(has(refusal({{"RANK", "-1"}, {"WORLD_SIZE", "2"}}), "RANK=\"-1\""));
  CHECK(has(refusal({{"RANK", "2"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}}), "rank 2 of 2"));
  CHECK(has(refusal({{"RANK", "0"}, {"WORLD_SIZE", "2"}}), "MASTER_ADDR"));
  CHECK(has(refusal({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "70000"}}), "70000"));
  CHECK(has(refusal({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "2"}, {"LOCAL_WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}}), "local rank 2"));
  CHECK(has(refusal({{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}}), "MPI_LOCALRANKID"));
  CHECK(has(refusal({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "0"}}), "MASTER_PORT=0 is no port"));
  CHECK(has(refusal({{"RANK", "0"}, {"WORLD_SIZE", "2000000"}, {"MASTER_ADDR", "a"}}), "2000000 ranks"));
  CHECK(has(refusal({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "9223372036854775807"}}),
            "OMPI_COMM_WORLD_LOCAL_RANK=\"9223372036854775807\""));
}

TEST_CASE("world: the first node of Slurm's lists") {
  CHECK(first_host("node3") == "node3");
  CHECK(first_host("node3,node4") == "node3");
  CHECK(first_host("node[03-05,9],login1") == "node03");
  CHECK(first_host("a[7]") == "a7");
  CHECK(first_host("rack[1-2]gpu,x") == "rack1gpu");
}

TEST_CASE("world: sf-host's own ranks get the variables that it reads again") {
  const LaunchFlags flags{.nproc = 4, .nnodes = 2, .node_rank = 1, .rendezvous = "[::1]:29501"};
  std::map<std::string, std::string> variables;
  for (const auto& [name, value] : environment_of_rank(flags, 2, "/tmp/x")) {
    variables[name] = value;
  }
  const World world = world_from(from(variables));
  CHECK(world.rank == 6);
  CHECK(world.size == 8);
  CHECK(world.local_rank == 2);
  CHECK(world.local_size == 4);
  CHECK(world.host == "::1");
  CHECK(world.port == 29501);
  CHECK(world.folder == "/tmp/x");
  CHECK_MESSAGE(world.origin.starts_with("sf-host --nproc"), world.origin);
  // On one machine rank 0 takes a free port; and what is only planned has no folder yet.
  for (const std::string folder : {"/tmp/x", ""}) {
    variables.clear();
    for (const auto& [name, value] : environment_of_rank({.nproc = 2}, 1, folder)) {
      variables[name] = value;
    }
    CHECK(world_from(from(variables)).port == 0);
    CHECK(world_from(from(variables)).size == 2);
  }
  for (const LaunchFlags& bad : {LaunchFlags{.nproc = 2, .nnodes = 2}, LaunchFlags{.nproc = 2, .rendezvous = "host"}, LaunchFlags{.nproc = 2, .rendezvous = "host:0"},
                                 LaunchFlags{.nproc = 2, .rendezvous = ":1"}, LaunchFlags{.nproc = int64_t{1} << 40, .nnodes = int64_t{1} << 40, .rendezvous = "h:1"}, LaunchFlags{.nproc = 2, .nnodes = 2, .node_rank = 2, .rendezvous = "h:1"}}) {
    CHECK_THROWS_AS((void)environment_of_rank(bad, 0, "/tmp/x"), Error);
  }
}
