// Checkpoints across backends and numbers of ranks: weights and optimizer state by element, and a run that goes on exactly.
#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include <unistd.h>

#include <filesystem>

#include "core/checkpoint/reader.hpp"
#include "core/checkpoint/save.hpp"
#include "core/checkpoint/writer_sync.hpp"
#include "core/train/saved_run.hpp"
#include "plugins/sharding/fsdp1/fsdp1.hpp"
#include "plugins/sharding/fsdp2/fsdp2.hpp"
#include "plugins/sharding/single/single.hpp"
#include "sf/error.hpp"
#include "sdk/testing/small_draft.hpp"

using namespace sf;
using namespace sf::testing;
namespace fs = std::filesystem;

namespace {

using Made = std::unique_ptr<Sharding, void (*)(Sharding*)>;

struct Layout {
  const char* backend;
  const char* mode;
  int64_t ranks;
};

Made make(const Layout& layout) {
  if (std::string(layout.backend) == "single") {
    return Made(new SingleSharding(), [](Sharding* sharding) { delete static_cast<SingleSharding*>(sharding); });
  }
  fsdp::Settings settings = std::string(layout.backend) == "fsdp1"
                                ? fsdp::fsdp1_settings(layout.mode)
                                : fsdp::fsdp2_settings({.fsdp_sharding = layout.mode, .reduce_dtype = "float32"});
  return Made(new fsdp::GroupedSharding(std::move(settings)), [](Sharding* sharding) { delete static_cast<fsdp::GroupedSharding*>(sharding); });
}

Outcome train(const DraftRun& run, const Layout& layout) { return train_ranks(run, layout.ranks, [&] { return make(layout); }); }

struct Scratch {
  fs::path path = fs::temp_directory_path() / ("sf-resharding-" + std::to_string(::getpid()) + "-" + std::to_string(counter()++));
  Scratch() { fs::create_directories(path); }
  ~Scratch() { fs::remove_all(path); }
  static int& counter() {
    static int count = 0;
    return count;
  }
};

SavePeers peers_of(Comm& comm) {
  return {.rank = static_cast<int>(comm.rank()), .world_size = static_cast<int>(comm.size()),
          .gather = [&comm](const std::string& text, std::string_view label) { return comm.gather_texts(text, label); }};
}

// Saves this rank's part of step 1 together with the others.
void save(AdamW& optimizer, Sharding& sharding, Comm& comm, const fs::path& folder, CheckpointWriter writer) {
  CheckpointSaver saver(folder, writer, peers_of(comm));
  SavedTensors tensors = copy_to_host(sharding.shards(), optimizer);
  CheckpointSaver::Request request{.state = {.run_id = "r", .step = 1}, .tensors = std::move(tensors.slices), .keep_alive = std::move(tensors.keep_alive)};
  request.state.progress.set("update_counts", std::move(tensors.update_counts));
  saver.start(std::move(request));
  saver.wait();
  CHECK(saver.last_committed() == folder / "step-00000001");
}

void save(AdamW& optimizer, Sharding& sharding, Comm& comm, const fs::path& folder) {
  SyncWriter writer;
  save(optimizer, sharding, comm, folder, writer.writer());
}

// Everything that a checkpoint holds, whole.
std::map<std::string, at::Tensor> contents(const fs::path& folder) {
  const CheckpointReader reader = CheckpointReader::open(folder / "step-00000001");
  std::map<std::string, at::Tensor> found;
  for (const auto& [name, saved] : reader.index().tensors) {
    at::Tensor tensor = at::empty(saved.shape, saved.dtype == "BF16" ? at::kBFloat16 : at::kFloat);
    reader.read(name, {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()});
    found[name] = tensor;
  }
  return found;
}

const std::vector<Layout> kLayouts = {{"single", "", 1},           {"fsdp1", "SHARD_GRAD_OP", 2}, {"fsdp1", "FULL_SHARD", 3},
                                      {"fsdp2", "SHARD_GRAD_OP", 2}, {"fsdp2", "FULL_SHARD", 4},    {"fsdp2", "NO_SHARD", 2},
                                      {"fsdp1", "NO_SHARD", 3},      {"fsdp2", "SHARD_GRAD_OP", 1}};

}  // namespace

TEST_CASE("checkpoint: weights and optimizer state of any backend and number of ranks load into any other, to the last bit") {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (size_t i = 0; i < kLayouts.size(); ++i) {
      CAPTURE(i);
      const Layout& from = kLayouts[i];
      Scratch first;
      DraftRun run{.windows = 2, .samples = 12, .dtype = dtype};
      run.at_end = [&](AdamW& optimizer, Sharding& sharding, Comm* comm) { save(optimizer, sharding, *comm, first.path); };
      (void)train(run, from);
      const auto saved = contents(first.path);
      CHECK(saved.size() == (dtype == at::kFloat ? 24u + 2 * 22 : 24u + 3 * 22));  // 24 parameters, 2 of them frozen
      for (const size_t step : {1, 3, 4}) {  // other layouts, each of which writes what it has read
        const Layout& to = kLayouts[(i + step) % kLayouts.size()];
        Scratch second;
        DraftRun reading{.windows = 0, .dtype = dtype};
        reading.before_start = [&](AdamW& optimizer, Sharding& sharding, Comm* comm) {
          const CheckpointReader reader = CheckpointReader::open(first.path / "step-00000001");
          read_tensors(reader, sharding.shards(), optimizer);
          save(optimizer, sharding, *comm, second.path);
        };
        FakeHub(to.ranks).run([&](FakeComm& comm) {
          Outcome ignored;
          const Made sharding = make(to);
          reading.train(*sharding, &comm, ignored);
        });
        const auto again = contents(second.path);
        REQUIRE(again.size() == saved.size());
        for (const auto& [name, tensor] : saved) {
          CAPTURE(name);
          CHECK(at::equal(again.at(name), tensor));
        }
        CHECK(CheckpointReader::open(second.path / "step-00000001").state().progress.dump() ==
              CheckpointReader::open(first.path / "step-00000001").state().progress.dump());
      }
    }
  }
}

TEST_CASE("checkpoint: a run that goes on on as many ranks has the bits of one that never stopped") {
  for (const Layout& layout : kLayouts) {
    CAPTURE(layout.backend);
    CAPTURE(layout.mode);
    Scratch scratch;
    DraftRun whole{.windows = 4, .samples = 12, .dtype = at::kBFloat16};
    const Outcome expected = train(whole, layout);
    DraftRun half = whole;
    half.windows = 2;
    half.at_end = [&](AdamW& optimizer, Sharding& sharding, Comm* comm) { save(optimizer, sharding, *comm, scratch.path); };
    (void)train(half, layout);
    DraftRun rest = whole;
    rest.first_window = 2;
    rest.before_start = [&](AdamW& optimizer, Sharding& sharding, Comm*) {
      read_tensors(CheckpointReader::open(scratch.path / "step-00000001"), sharding.shards(), optimizer);
    };
    const Outcome found = train(rest, layout);
    CHECK(largest_difference(found.weights, expected.weights) == 0);
    CHECK(found.norms == std::vector<double>(expected.norms.begin() + 2, expected.norms.end()));
  }
}

TEST_CASE("checkpoint: parts that are not whole rows are flat in the files, others keep their shape") {
  Scratch scratch;
  DraftRun run{.windows = 1};
  run.at_end = [&](AdamW& optimizer, Sharding& sharding, Comm* comm) { save(optimizer, sharding, *comm, scratch.path); };
  const auto slices = [&](const std::string& name) {
    return CheckpointReader::open(scratch.path / "step-00000001").tensor(name).slices;
  };
  (void)train(run, {"fsdp2", "SHARD_GRAD_OP", 2});
  REQUIRE(slices("weights/layers.0.up.weight").size() == 2);
  CHECK(slices("weights/layers.0.up.weight")[1].start == std::vector<int64_t>{6, 0});
  CHECK(slices("weights/layers.0.up.weight")[1].shape == std::vector<int64_t>{5, 6});
  CHECK(slices("weights/scale").size() == 1);  // [1]: rank 0 holds it
  (void)train(run, {"fsdp1", "SHARD_GRAD_OP", 2});
  bool some_flat = false;
  const CheckpointReader reader = CheckpointReader::open(scratch.path / "step-00000001");
  for (const auto& [name, tensor] : reader.index().tensors) {
    for (const SavedSlice& slice : tensor.slices) {
      some_flat = some_flat || slice.shape.size() < tensor.shape.size();
    }
  }
  CHECK(some_flat);
}

TEST_CASE("checkpoint: a file that one rank can't write ends the save on every rank, and no step appears") {
  Scratch scratch;
  FakeHub(3).run([&](FakeComm& comm) {
    SyncWriter good;
    sf_checkpoint_writer functions = *good.writer().functions;
    if (comm.rank() == 1) {
      functions.finish = [](sf_instance*, sf_status* status) {
        std::snprintf(status->what, sizeof status->what, "the disk is on fire");
        return static_cast<int32_t>(SF_IO);
      };
    }
    Outcome ignored;
    DraftRun run{.windows = 0};
    bool threw = false;
    run.before_start = [&](AdamW& optimizer, Sharding& sharding, Comm*) {
      try {
        save(optimizer, sharding, comm, scratch.path, {&functions, good.writer().instance});
      } catch (const Error& error) {
        threw = error.code() == ExitCode::kCheckpoint && std::string(error.what()).find("rank 1") != std::string::npos &&
                std::string(error.what()).find("the disk is on fire") != std::string::npos;
      }
      // The next save is a clean one.
      save(optimizer, sharding, comm, scratch.path);
    };
    const Made sharding = make({"fsdp2", "SHARD_GRAD_OP", 3});
    run.train(*sharding, &comm, ignored);
    CHECK(threw);
  });
  CHECK(fs::exists(scratch.path / "step-00000001" / "COMMITTED"));
}
