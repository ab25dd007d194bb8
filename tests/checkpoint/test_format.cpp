#include "core/base/error.hpp"
#include "core/base/file.hpp"
#include "core/base/text.hpp"
#include "tests/checkpoint/fixture.hpp"

#include <doctest/doctest.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <limits>
#include <utility>

namespace sf {
namespace {

using test::checkpoint_error;
using test::SmallRun;
using test::TempFolder;
namespace fs = std::filesystem;

fs::path save(const fs::path& run_folder, int64_t step, int64_t rows = 5) {
  SyncWriter writer;
  CheckpointSaver saver(run_folder, writer.writer());
  const SmallRun run(step, rows);
  saver.start(run.request());
  REQUIRE(saver.last_committed().has_value());
  return *saver.last_committed();
}

TEST_CASE("checkpoint: what was saved is what is read, state and texts included") {
  TempFolder folder;
  const fs::path step = save(folder.path(), 30);
  CHECK(step == folder.path() / "step-00000030");
  const CheckpointReader reader = CheckpointReader::open(step);
  CHECK(test::holds_its_step(reader));
  CHECK(reader.state().seed == 0xfedcba9876543210);
  CHECK(reader.text("recipe.toml") == "run_id = \"small\"\n");
  CHECK(reader.text("nothing.txt").empty());
  CHECK(test::names_in(step) == std::vector<std::string>{"COMMITTED", "index.json", "rank00000.safetensors",
                                                         "recipe.toml", "state.json"});
  CHECK(test::names_in(folder.path()) == std::vector<std::string>{"latest", "step-00000030"});
  CHECK(fs::canonical(folder.path() / "latest") == fs::canonical(step));
}

TEST_CASE("checkpoint: saving a step again replaces it") {
  TempFolder folder;
  save(folder.path(), 30, 5);
  const fs::path step = save(folder.path(), 30, 7);
  CHECK(test::holds_its_step(CheckpointReader::open(step), 7));
  CHECK(test::names_in(folder.path()) == std::vector<std::string>{"latest", "step-00000030"});
}

TEST_CASE("checkpoint: names of steps sort as the steps do and read back") {
  CHECK(step_folder_name(100) == "step-00000100");
  CHECK(step_of_folder_name("step-00000100") == 100);
  CHECK(step_of_folder_name(step_folder_name(1234567890)) == 1234567890);
  for (const char* other :
       {"step-100", "step-0000010x", "latest", "step-", "step--0000001", ".partial-step-00000100"}) {
    CAPTURE(other);
    CHECK_FALSE(step_of_folder_name(other).has_value());
  }
}

TEST_CASE("checkpoint: wide dtypes come first and the data starts aligned") {
  const SmallRun run(1);
  const std::vector<TensorSlice> tensors = run.tensors();
  const RankFileLayout layout = lay_out_rank_file(tensors);
  CHECK(layout.order == std::vector<size_t>{2, 1, 0});  // I64, F32, BF16
  CHECK(layout.header.size() % 64 == 0);
  CHECK(layout.offsets[2] == layout.header.size());
  CHECK(layout.offsets[1] == layout.header.size() + 8);
  CHECK(layout.offsets[0] == layout.header.size() + 8 + 60);
  CHECK(layout.bytes == layout.header.size() + 8 + 60 + 30);
}

TEST_CASE("checkpoint: slices that contradict themselves are our mistake") {
  const float values[4] = {};
  const TensorSlice good{.name = "a", .dtype = "F32", .global_shape = {4}, .data = values, .bytes = 16};
  CHECK_NOTHROW((void)lay_out_rank_file(std::vector{good}));
  TensorSlice short_one = good, odd_dtype = good, no_data = good;
  short_one.bytes = 12;
  odd_dtype.dtype = "float32";
  no_data.data = nullptr;
  for (const std::vector<TensorSlice>& bad :
       {std::vector{short_one}, std::vector{odd_dtype}, std::vector{no_data}, std::vector{good, good}}) {
    CHECK_THROWS_AS((void)lay_out_rank_file(bad), Error);
  }
}

// A [4, 6] matrix by two ranks: rows 0 and 1 by the first; or, flat, all before element 9.
fs::path save_by_two_ranks(const fs::path& run_folder, int ranks_that_write, bool flat = false, const std::function<void(const fs::path& partial)>& before_commit = {}) {
  const fs::path partial = make_partial_folder(run_folder, 7);
  CheckpointIndex index;
  index.step = 7;
  index.world_size = 2;
  for (int rank = 0; rank < ranks_that_write; ++rank) {
    const int cut = flat ? 9 : 12;
    std::vector<float> half;
    for (int i = rank == 0 ? 0 : cut; i < (rank == 0 ? cut : 24); ++i) {
      half.push_back(static_cast<float>(i));
    }
    const auto count = static_cast<int64_t>(half.size());
    SyncWriter writer;
    RankSave save({.writer = writer.writer(),
                   .folder = partial,
                   .step = 7,
                   .rank = rank,
                   .world_size = 2,
                   .tensors = {{.name = "m",
                                .dtype = "F32",
                                .global_shape = {4, 6},
                                .start = flat ? std::vector<int64_t>{rank * cut} : std::vector<int64_t>{rank * 2, 0},
                                .shape = flat ? std::vector<int64_t>{count} : std::vector<int64_t>{2, 6},
                                .data = half.data(),
                                .bytes = half.size() * sizeof(float)}},
                   .keep_alive = nullptr});
    save.wait();
    index.merge(save.index());
  }
  if (before_commit) {
    before_commit(partial);
  }
  return commit_checkpoint(run_folder, 7, index, SmallRun(7).state(), {});
}

TEST_CASE("checkpoint: any part of a tensor can be read, whichever ranks wrote it and however they cut it") {
  for (const bool flat : {false, true}) {
    CAPTURE(flat);
    TempFolder folder;
    const CheckpointReader reader = CheckpointReader::open(save_by_two_ranks(folder.path(), 2, flat));
    CHECK(reader.index().world_size == 2);
    CHECK(reader.tensor("m").slices.size() == 2);
    std::vector<float> whole(24);
    reader.read("m", std::as_writable_bytes(std::span(whole)));
    for (int i = 0; i < 24; ++i) {
      CHECK(whole[static_cast<size_t>(i)] == static_cast<float>(i));
    }
    std::vector<float> box(4);  // rows 1..2, columns 3..4: across both ranks
    reader.read("m", std::as_writable_bytes(std::span(box)), {1, 3}, {2, 2});
    CHECK(box == std::vector<float>{9, 10, 15, 16});
    std::vector<float> run(7);
    reader.read_range("m", std::as_writable_bytes(std::span(run)), 6, 13);
    CHECK(run == std::vector<float>{6, 7, 8, 9, 10, 11, 12});
    reader.read_range("m", {}, 24, 24);
  }
}

TEST_CASE("checkpoint: a run of elements is found in a slice that is a box with gaps") {
  TempFolder folder;
  const fs::path partial = make_partial_folder(folder.path(), 7);
  std::vector<float> left(8), right(16);  // columns 0, 1 and 2..5 of [4, 6]
  for (int row = 0; row < 4; ++row) {
    for (int column = 0; column < 6; ++column) {
      (column < 2 ? left[static_cast<size_t>(row * 2 + column)] : right[static_cast<size_t>(row * 4 + column - 2)]) = static_cast<float>(row * 6 + column);
    }
  }
  CheckpointIndex index;
  index.step = 7;
  for (int rank = 0; rank < 2; ++rank) {
    SyncWriter writer;
    const std::vector<float>& values = rank == 0 ? left : right;
    RankSave save({.writer = writer.writer(),
                   .folder = partial,
                   .step = 7,
                   .rank = rank,
                   .world_size = 2,
                   .tensors = {{.name = "m",
                                .dtype = "F32",
                                .global_shape = {4, 6},
                                .start = {0, rank == 0 ? 0 : 2},
                                .shape = {4, rank == 0 ? 2 : 4},
                                .data = values.data(),
                                .bytes = values.size() * sizeof(float)}},
                   .keep_alive = nullptr});
    save.wait();
    index.merge(save.index());
  }
  const CheckpointReader reader = CheckpointReader::open(commit_checkpoint(folder.path(), 7, index, SmallRun(7).state(), {}));
  std::vector<float> run(9);
  reader.read_range("m", std::as_writable_bytes(std::span(run)), 5, 14);
  CHECK(run == std::vector<float>{5, 6, 7, 8, 9, 10, 11, 12, 13});
}

TEST_CASE("checkpoint: a rank that did not write its part stops the commit") {
  TempFolder folder;
  CHECK(checkpoint_error([&] { save_by_two_ranks(folder.path(), 1); }).find("hold 12 of 24 elements") !=
        std::string::npos);
  CHECK_FALSE(fs::exists(folder.path() / "step-00000007"));
}

TEST_CASE("checkpoint: a rank that wrote its part to another disk, or whose file is cut, stops the commit") {
  TempFolder folder;
  const auto error_after = [&](const std::function<void(const fs::path&)>& change) {
    const std::string error = checkpoint_error([&] { save_by_two_ranks(folder.path(), 2, false, change); });
    CHECK_FALSE(fs::exists(folder.path() / "step-00000007"));
    return error;
  };
  CHECK(error_after([](const fs::path& partial) { fs::remove(partial / "rank00001.safetensors"); }).find("rank00001.safetensors is not there, and") != std::string::npos);
  CHECK(error_after([](const fs::path& partial) { fs::resize_file(partial / "rank00001.safetensors", 40); }).find("rank00001.safetensors has 40 bytes, and") != std::string::npos);
  (void)save_by_two_ranks(folder.path(), 2);
  CHECK(fs::exists(folder.path() / "step-00000007"));
}

TEST_CASE("checkpoint: overlapping slices are refused") {
  CheckpointIndex index;
  index.files["f"] = {.bytes = 1000, .header_bytes = 64, .sha256 = ""};
  index.tensors["m"] = {
      .dtype = "F32",
      .shape = {4},
      .slices = {{.file = "f", .offset = 64, .bytes = 8, .start = {0}, .shape = {2}, .sha256 = ""},
                 {.file = "f", .offset = 72, .bytes = 8, .start = {1}, .shape = {2}, .sha256 = ""}}};
  CHECK(checkpoint_error([&] { index.check_cover(); }).find("overlap") != std::string::npos);
  // A flat slice beside one of whole rows.
  index.tensors["m"] = {
      .dtype = "F32",
      .shape = {2, 3},
      .slices = {{.file = "f", .offset = 64, .bytes = 12, .start = {0, 0}, .shape = {1, 3}, .sha256 = ""},
                 {.file = "f", .offset = 76, .bytes = 12, .start = {2}, .shape = {3}, .sha256 = ""}}};
  CHECK(checkpoint_error([&] { index.check_cover(); }).find("overlap") != std::string::npos);
  index.tensors["m"].slices[1].start = {4};
  CHECK(checkpoint_error([&] { index.check_cover(); }).find("does not fit") != std::string::npos);
  index.tensors["m"].slices[1].start = {3};
  CHECK_NOTHROW(index.check_cover());
}

struct Damage {
  const char* name;
  const char* file;
  int change;            // 0 flip a byte at `at`, 1 cut to `at` bytes, 2 delete
  int at;                // negative: from the end
  const char* expected;  // in the message
};

TEST_CASE("checkpoint: every kind of damage is found and named") {
  const Damage cases[] = {
      {"last byte of a tensor", "rank00000.safetensors", 0, -1,
       "\"moments/fc\" in rank00000.safetensors has changed"},
      {"first byte of a tensor", "rank00000.safetensors", 0, -98,
       "\"counter\" in rank00000.safetensors has changed"},
      {"header", "rank00000.safetensors", 0, 20, "header of rank00000.safetensors has changed"},
      {"tensors cut", "rank00000.safetensors", 1, -1, "bytes, expected"},
      {"tensors gone", "rank00000.safetensors", 2, 0, "rank00000.safetensors is missing"},
      {"state", "state.json", 0, 30, "state.json has changed"},
      {"text gone", "recipe.toml", 2, 0, "recipe.toml is missing"},
      {"index", "index.json", 0, 30, "index.json is not the one that COMMITTED names"},
      {"index gone", "index.json", 2, 0, "index.json is missing"},
      {"marker gone", "COMMITTED", 2, 0, "has no COMMITTED"},
      {"marker empty", "COMMITTED", 1, 0, "index.json is not the one that COMMITTED names"},
  };
  for (const Damage& damage : cases) {
    CAPTURE(damage.name);
    TempFolder folder;
    const fs::path file = save(folder.path(), 3) / damage.file;
    const auto size = static_cast<int>(fs::file_size(file));
    const int at = damage.at < 0 ? size + damage.at : damage.at;
    if (damage.change == 0) {
      std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
      stream.seekg(at);
      const int byte = stream.get();
      stream.seekp(at);
      stream.put(static_cast<char>(byte ^ 1));
    } else if (damage.change == 1) {
      fs::resize_file(file, static_cast<uintmax_t>(at));
    } else {
      fs::remove(file);
    }
    const std::string message = checkpoint_error([&] { (void)CheckpointReader::open(file.parent_path()); });
    CHECK_MESSAGE(message.find(damage.expected) != std::string::npos, message);
  }
}

TEST_CASE("checkpoint: an index of a newer version, or one that leaves its folder, is refused") {
  Json json = CheckpointIndex{}.to_json();
  CHECK_NOTHROW((void)CheckpointIndex::from_json(json, "index"));
  json.set("version", kCheckpointVersion + 1);
  CHECK(checkpoint_error([&] {
          (void)CheckpointIndex::from_json(json, "index");
        }).find("this program reads up to") != std::string::npos);
  CheckpointIndex outside;
  outside.files["../secret"] = {.bytes = 1, .header_bytes = 0, .sha256 = ""};
  CHECK(checkpoint_error([&] {
          (void)CheckpointIndex::from_json(outside.to_json(), "index");
        }).find("leaves") != std::string::npos);
  CHECK(checkpoint_error([&] {
          (void)CheckpointIndex::from_json(Json::array(), "index");
        }).find("not a checkpoint's index") != std::string::npos);
}

TEST_CASE("checkpoint: an index whose numbers no place in a tensor could have is refused before anything is computed from them") {
  constexpr int64_t kHuge = int64_t{1} << 62;
  struct Row {
    const char* name;
    std::vector<int64_t> shape, start, slice_shape;
    const char* dtype;
    const char* expected;
  };
  const Row rows[] = {
      {"a product beyond 64 bits", {int64_t{1} << 32, int64_t{1} << 32}, {0, 0}, {int64_t{1} << 32, int64_t{1} << 32}, "F32", "impossible shape: extent 4294967296 at axis 1"},
      {"one behind an axis without elements", {0, kHuge, kHuge}, {0, 0, 0}, {0, kHuge, kHuge}, "F32", "impossible shape"},
      {"a negative extent", {-1, -1}, {0, 0}, {-1, -1}, "F32", "impossible shape: extent -1"},
      {"more axes than any tensor has", std::vector<int64_t>(65, 1), std::vector<int64_t>(65, 0), std::vector<int64_t>(65, 1), "F32", "impossible shape"},
      {"a start beyond 64 bits", {4}, {std::numeric_limits<int64_t>::max()}, {4}, "F32", "impossible place"},
      {"a start outside", {2, 2}, {3, 0}, {0, 2}, "F32", "begins at [3, 0], outside of its shape [2, 2]"},
      {"an unknown type", {4}, {0}, {4}, "X9", "unknown type \"X9\""},
  };
  for (const Row& row : rows) {
    CAPTURE(row.name);
    CheckpointIndex index;
    index.files["f"] = {.bytes = 1024, .header_bytes = 8, .sha256 = ""};
    index.tensors["w"] = {.dtype = row.dtype, .shape = row.shape, .slices = {{.file = "f", .offset = 8, .bytes = 0, .start = row.start, .shape = row.slice_shape, .sha256 = ""}}};
    const std::string message = checkpoint_error([&] { (void)CheckpointIndex::from_json(index.to_json(), "index"); });
    CHECK_MESSAGE(message.find(row.expected) != std::string::npos, message);
  }
  Json json = CheckpointIndex{}.to_json();
  json.set("world_size", int64_t{1} << 40);
  CHECK(checkpoint_error([&] { (void)CheckpointIndex::from_json(json, "index"); }).find("world_size is 1099511627776") != std::string::npos);
}

TEST_CASE("checkpoint: a state with a step or a place in the data that no run has is refused") {
  const SmallRun run(3);
  for (const auto& [key, value] : std::vector<std::pair<std::string, Json>>{{"position", int64_t{-1}}, {"position", std::numeric_limits<int64_t>::max()}, {"step", int64_t{-4}}, {"seed", "12a"}, {"seed", "-1"}}) {
    CAPTURE(key);
    Json json = run.state().to_json();
    CHECK_NOTHROW((void)RunState::from_json(json, "state"));
    json.set(key, value);
    CHECK(checkpoint_error([&] { (void)RunState::from_json(json, "state"); }).starts_with("state"));
  }
}

TEST_CASE("checkpoint: a tensor that is not there is an error that names it") {
  TempFolder folder;
  const CheckpointReader reader = CheckpointReader::open(save(folder.path(), 3));
  CHECK(checkpoint_error([&] {
          (void)reader.tensor("weights/missing");
        }).find("no tensor \"weights/missing\"") != std::string::npos);
}

TEST_CASE("checkpoint: a run that differs is not a continuation, and every difference is named at once") {
  const RunState saved = SmallRun(5).state();
  CHECK(compare_runs(saved, saved).errors.empty());
  CHECK(compare_runs(saved, saved).warnings.empty());
  RunState now = saved;
  now.seed = 1;
  now.features_fingerprint = "other";
  now.total_steps = 200;
  now.fixed["training.batch_size"] = "8";
  now.versions["sf"] = "0.2.0";
  now.plugins[0].sha256 = "bb";
  const Continuation result = compare_runs(saved, now);
  REQUIRE(result.errors.size() == 4);
  CHECK(result.errors[2].find("--set training.total_steps=100") != std::string::npos);
  CHECK(result.errors[3].find("training.batch_size: the checkpoint has 4, this run 8") != std::string::npos);
  CHECK(result.warnings.size() == 2);
  now = saved;
  now.fixed.clear();
  CHECK(compare_runs(saved, now).errors.size() == 1);
  CHECK(compare_runs(now, saved).errors.size() == 1);
}

TEST_CASE("checkpoint: a plugin that came or went on the way is a warning") {
  RunState saved = SmallRun(5).state(), now = saved;
  now.plugins.push_back({.name = "fp8", .version = "0.1.0", .sha256 = "cc"});
  const Continuation came = compare_runs(saved, now), went = compare_runs(now, saved);
  REQUIRE(came.warnings.size() == 1);
  CHECK(came.warnings[0] == "plugin 'fp8' was not part of the run that wrote the checkpoint");
  REQUIRE(went.warnings.size() == 1);
  CHECK(went.warnings[0] == "plugin 'fp8' was part of the run that wrote the checkpoint, and is not part of this one");
}

TEST_CASE("checkpoint: what changed on the way and may is a warning with both values: the learning rate, and options of a plugin that stayed") {
  RunState saved = SmallRun(5).state();
  for (const char* name : {"fp8", "odd"}) saved.plugins.push_back({.name = name, .version = "0.1.0", .sha256 = "cc"});
  saved.fixed["plugin.fp8.kept"] = "1";
  saved.recipe = "run_id = \"a = b\"  # a.toml:1\n\n[plugin.fp8]\nkept = 1  # default\nscaling = \"a # b\"  # default\n\n[plugin.gone]\nrate = 1  # default\n\n"
                 "[training]\nlearning_rate = 0.01  # a.toml:26\nweight_decay = 0.1  # a.toml:27\nlearning_rate_of = 3\nmax_steps = 5\n";
  RunState now = saved;
  now.recipe = "run_id = \"b\"  # a.toml:1\n\n[plugin.fp8]\nkept = 2  # default\nscaling = \"row\"  # --set\nskip = [\"down_proj\"]  # --set\n\n[plugin.new]\nrate = 1  # default\n\n"
               "[training]\nlearning_rate   = 0.5  # --set\nweight_decay = 0.1  # --set\nlearning_rate_of = 4\nmax_steps = 6\n";
  const Continuation result = compare_runs(saved, now);
  CHECK(result.errors.empty());
  REQUIRE(result.warnings.size() == 3);
  CHECK(result.warnings[0].find("plugin.fp8.scaling was \"a # b\" and is \"row\":") == 0);
  CHECK(result.warnings[1].find("plugin.fp8.skip was empty and is [\"down_proj\"]:") == 0);
  CHECK(result.warnings[2].find("training.learning_rate was 0.01 and is 0.5:") == 0);
  CHECK(compare_runs(now, saved).warnings[1].find("plugin.fp8.skip was [\"down_proj\"] and is empty:") == 0);
}

TEST_CASE("checkpoint: other ranks may share a window out in another way, as long as it is the same window") {
  RunState saved = SmallRun(5).state();
  saved.fixed["training.accumulation_steps"] = "3";
  saved.layout = {.sharding = "fsdp2", .ranks = 1, .window = "12 samples"};
  RunState now = saved;
  now.layout.ranks = 2;
  now.layout.sharding = "fsdp1";
  now.fixed["training.batch_size"] = "2";
  CHECK(compare_runs(saved, now).errors.empty());
  CHECK(compare_runs(saved, now).warnings.empty());
  now.layout.window = "6 samples";  // batch changed, and the window with it
  CHECK(compare_runs(saved, now).errors.size() == 1);
  now.fixed = saved.fixed;
  now.layout.window = "24 samples";  // only more ranks: goes on, as another training, and says so
  const Continuation grown = compare_runs(saved, now);
  CHECK(grown.errors.empty());
  REQUIRE(grown.warnings.size() == 1);
  CHECK(grown.warnings[0].find("took 12 samples on 1 ranks, and takes 24 samples on 2 now") != std::string::npos);
  now = saved;
  now.fixed["training.batch_size"] = "12";  // the same ranks: a run is its recipe
  CHECK(compare_runs(saved, now).errors.size() == 1);
}

TEST_CASE("rule A8: a checkpoint that does not say how it was laid out is read all the same") {
  Json json = SmallRun(5).state().to_json();
  REQUIRE(json.remove("layout"));
  const RunState old = RunState::from_json(json, "state.json");
  CHECK(old.layout.sharding.empty());
  RunState now = old;
  now.layout = {.sharding = "fsdp2", .ranks = 2, .window = "8 samples"};
  CHECK(compare_runs(old, now).errors.empty());
  CHECK(compare_runs(old, now).warnings.empty());
}

// Leaves a checkpoint behind for read_with_safetensors.py, which names the folder; nothing otherwise.
TEST_CASE("checkpoint: written for another reader") {
  if (const char* folder = std::getenv("SF_CHECKPOINT_OUT")) {
    save(folder, 1000);
  }
}

}  // namespace
}  // namespace sf
