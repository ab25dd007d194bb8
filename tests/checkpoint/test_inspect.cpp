#include "core/base/error.hpp"
#include "core/checkpoint/inspect.hpp"
#include "tests/checkpoint/fixture.hpp"

#include <doctest/doctest.h>

#include <algorithm>

namespace sf {
namespace {

using test::checkpoint_error;
using test::SmallRun;
using test::TempFolder;
namespace fs = std::filesystem;

void save_steps(const fs::path& run_folder, const std::vector<int64_t>& steps, int64_t rows = 5) {
  SyncWriter writer;
  CheckpointSaver saver(run_folder, writer.writer());
  for (const int64_t step : steps) {
    const SmallRun run(step, rows);
    saver.start(run.request());
  }
}

TEST_CASE("inspect: a run's list says what is whole, damaged, unfinished, latest and best") {
  TempFolder folder;
  save_steps(folder.path(), {10, 20, 30});
  REQUIRE(offer_best(folder.path(), {.step = 10, .score = 2, .metric = "acceptance_length"}));
  fs::remove(folder.path() / "step-00000020" / "rank00000.safetensors");
  fs::create_directories(folder.path() / ".partial-step-00000040");
  const auto all = list_run(folder.path(), CheckpointReader::Verify::sizes);
  REQUIRE(all.size() == 4);
  CHECK(to_json(all[0]).at("state").as_string() == "unfinished");
  CHECK(all[1].is_latest);
  CHECK(all[1].bytes > 98);
  CHECK(to_json(all[2]).at("state").as_string() == "damaged");
  CHECK(to_json(all[2]).at("why").as_string().find("rank00000.safetensors is missing") != std::string::npos);
  CHECK(all[3].is_best);
  CHECK(to_json(all[3]).at("position").as_int() == 40);
  CHECK(checkpoint_error([&] { (void)list_run(folder.path() / "nothing", CheckpointReader::Verify::sizes); }).find("is not a folder") != std::string::npos);
}

TEST_CASE("inspect: one checkpoint in detail counts tensors by kind") {
  TempFolder folder;
  save_steps(folder.path(), {10});
  const Json json = describe_checkpoint(CheckpointReader::open(folder.path() / "step-00000010"));
  CHECK(json.at("step").as_int() == 10);
  CHECK(json.at("ranks").as_int() == 1);
  CHECK(json.at("tensors").at("weights").at("elements").as_int() == 15);
  CHECK(json.at("tensors").at("moments").at("dtype").as_string() == "BF16");
  CHECK(json.at("tensors").at("counter").at("tensors").as_int() == 1);
  CHECK(json.at("fixed").at("training.batch_size").as_string() == "4");
}

TEST_CASE("inspect: two checkpoints differ in what differs, value by value and number by number") {
  TempFolder folder;
  save_steps(folder.path() / "a", {10});
  save_steps(folder.path() / "b", {10, 11});
  const auto open = [&](const char* run, int64_t step) { return CheckpointReader::open(folder.path() / run / step_folder_name(step)); };
  const CheckpointDifference same = compare_checkpoints(open("a", 10), open("b", 10));
  CHECK(same.is_none());
  CHECK(same.equal_tensors == 3);
  const CheckpointDifference other = compare_checkpoints(open("a", 10), open("b", 11));
  CHECK(std::find(other.values.begin(), other.values.end(), "step: 10 and 11") != other.values.end());
  REQUIRE(other.tensors.size() == 3);
  CHECK(other.tensors[2].name == "weights/fc");
  CHECK(other.tensors[2].differing == 15);
  CHECK(other.tensors[2].largest == 1.0);
  save_steps(folder.path() / "c", {10}, 6);
  CHECK(compare_checkpoints(open("a", 10), open("c", 10)).tensors[1].what == "F32 [5, 3] and F32 [6, 3]");
}

TEST_CASE("inspect: prune keeps the newest, the best and the last whole one, and takes damaged ones only when asked") {
  TempFolder folder;
  save_steps(folder.path(), {10, 20, 30, 40});
  REQUIRE(offer_best(folder.path(), {.step = 20, .score = 2, .metric = "acceptance_length"}));
  const auto steps = [&](const RetentionPolicy& policy, bool damaged) {
    std::vector<int64_t> out;
    for (const FoundCheckpoint& found : prunable(folder.path(), policy, damaged)) {
      out.push_back(found.step);
    }
    return out;
  };
  CHECK(steps({.newest = 1}, false) == std::vector<int64_t>{30, 10});
  CHECK(steps({.newest = 1, .every = 10}, false).empty());
  fs::remove(folder.path() / "step-00000040" / "COMMITTED");
  CHECK(steps({.newest = 1}, false) == std::vector<int64_t>{10});
  CHECK(steps({.newest = 0}, true) == std::vector<int64_t>{40});
  for (const int64_t step : {10, 20, 30}) {
    fs::remove(folder.path() / step_folder_name(step) / "index.json");
  }
  CHECK(steps({.newest = 1}, true).empty());  // nothing is whole: a person should look
}

}  // namespace
}  // namespace sf
