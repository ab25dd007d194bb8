#include "core/base/error.hpp"
#include "core/base/file.hpp"
#include "core/base/log.hpp"
#include "core/checkpoint/resume.hpp"
#include "core/checkpoint/retention.hpp"
#include "tests/checkpoint/fixture.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <fstream>
#include <limits>

namespace sf {
namespace {

using test::checkpoint_error;
using test::SmallRun;
using test::TempFolder;
namespace fs = std::filesystem;

void save_steps(const fs::path& run_folder, const std::vector<int64_t>& steps) {
  SyncWriter writer;
  CheckpointSaver saver(run_folder, writer.writer());
  for (const int64_t step : steps) {
    const SmallRun run(step);
    saver.start(run.request());
  }
}

std::vector<int64_t> steps_in(const fs::path& run_folder) {
  std::vector<int64_t> steps;
  for (const FoundCheckpoint& found : list_checkpoints(run_folder)) {
    if (found.state == FoundCheckpoint::State::complete) {
      steps.push_back(found.step);
    }
  }
  return steps;
}

BestRecord scored(int64_t step, double score) {
  BestRecord record;
  record.step = step;
  record.score = score;
  record.metric = "acceptance_length";
  return record;
}

void spoil(const fs::path& run_folder, int64_t step) {
  std::fstream file(run_folder / step_folder_name(step) / "rank00000.safetensors",
                    std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-1, std::ios::end);
  file.put('\x55');
}

TEST_CASE("retention: the newest stay, and the best one whatever its age") {
  TempFolder folder;
  save_steps(folder.path(), {10, 20, 30, 40, 50});
  REQUIRE(offer_best(folder.path(), scored(20, 2.5)));
  CHECK(rotate_checkpoints(folder.path(), {}, 50).empty());
  CHECK(rotate_checkpoints(folder.path(), {.newest = 2}, 50) == std::vector<int64_t>{30, 10});
  CHECK(steps_in(folder.path()) == std::vector<int64_t>{50, 40, 20});
  CHECK(test::names_in(folder.path()) ==
        std::vector<std::string>{"best.json", "latest", "step-00000020", "step-00000040", "step-00000050"});
}

TEST_CASE("retention: what was just saved stays even when its number is low") {
  TempFolder folder;
  save_steps(folder.path(), {30, 40, 10});
  CHECK(rotate_checkpoints(folder.path(), {.newest = 1}, 10) == std::vector<int64_t>{30});
  CHECK(steps_in(folder.path()) == std::vector<int64_t>{40, 10});
}

TEST_CASE("retention: every k-th stays besides the newest") {
  TempFolder folder;
  save_steps(folder.path(), {10, 20, 30, 40, 50});
  CHECK(rotate_checkpoints(folder.path(), {.newest = 1, .every = 20}, 50) == std::vector<int64_t>{30, 10});
  CHECK(steps_in(folder.path()) == std::vector<int64_t>{50, 40, 20});
  CHECK(superfluous_steps({50, 40, 20}, {.newest = 0, .every = 7}, std::nullopt, std::nullopt).empty());
}

TEST_CASE("retention: the only whole checkpoint stays, and damaged ones count neither as whole nor for deletion") {
  TempFolder folder;
  save_steps(folder.path(), {10, 20, 30});
  for (const int64_t step : {20, 30}) {
    fs::remove(folder.path() / step_folder_name(step) / "rank00000.safetensors");
  }
  CHECK(rotate_checkpoints(folder.path(), {.newest = 1}, 30).empty());
  CHECK(steps_in(folder.path()) == std::vector<int64_t>{10});
  CHECK(fs::exists(folder.path() / "step-00000020"));
  CHECK(superfluous_steps({10}, {.newest = 1}, std::nullopt, std::nullopt).empty());
}

TEST_CASE("retention: best is the highest finite score of a step that exists") {
  TempFolder folder;
  save_steps(folder.path(), {10, 20});
  CHECK_FALSE(read_best(folder.path()).has_value());
  CHECK_FALSE(offer_best(folder.path(), scored(10, std::numeric_limits<double>::quiet_NaN())));
  CHECK(offer_best(folder.path(), scored(10, 1.5)));
  CHECK_FALSE(offer_best(folder.path(), scored(20, 1.5)));
  CHECK(read_best(folder.path())->step == 10);
  BestRecord better = scored(20, 1.75);
  better.metrics.set("loss", 3.5);
  CHECK(offer_best(folder.path(), better));
  CHECK(read_best(folder.path())->metrics.at("loss").as_double() == 3.5);
  remove_folder(folder.path() / step_folder_name(20));
  CHECK_FALSE(read_best(folder.path()).has_value());
  CHECK(offer_best(folder.path(), scored(10, 1.25)));  // the better one is gone
}

TEST_CASE("retention: a run that went on from an older step drops the future that it left") {
  TempFolder folder;
  save_steps(folder.path(), {10, 20, 30});
  REQUIRE(offer_best(folder.path(), scored(30, 9)));
  save_steps(folder.path(), {15});
  CHECK(discard_newer_than(folder.path(), 10, 15) == std::vector<int64_t>{30, 20});
  CHECK(steps_in(folder.path()) == std::vector<int64_t>{15, 10});
  CHECK_FALSE(fs::exists(folder.path() / "best.json"));
}

TEST_CASE("retention: of an abandoned future nothing stays, neither behind the first save nor before it, nor a score of what had its number") {
  for (const int64_t best : {20, 30}) {
    CAPTURE(best);
    TempFolder folder;
    save_steps(folder.path(), {10, 20, 30, 40});
    REQUIRE(offer_best(folder.path(), scored(best, 9)));
    save_steps(folder.path(), {30});  // gone on from 10; another 30 than the one before
    CHECK(discard_newer_than(folder.path(), 10, 30) == std::vector<int64_t>{40, 20});
    CHECK(steps_in(folder.path()) == std::vector<int64_t>{30, 10});
    CHECK_FALSE(read_best(folder.path()).has_value());
    CHECK(offer_best(folder.path(), scored(30, 2)));
  }
  TempFolder folder;
  save_steps(folder.path(), {10, 20});
  REQUIRE(offer_best(folder.path(), scored(10, 9)));
  save_steps(folder.path(), {15});
  CHECK(discard_newer_than(folder.path(), 10, 15) == std::vector<int64_t>{20});
  CHECK(read_best(folder.path())->step == 10);  // of the part that both have
}

TEST_CASE("retention: scores on other samples do not compare") {
  TempFolder folder;
  save_steps(folder.path(), {10, 20, 30});
  BestRecord easy = scored(10, 9), hard = scored(20, 2), harder = scored(30, 1);
  easy.measured_on = "a";
  hard.measured_on = harder.measured_on = "b";
  REQUIRE(offer_best(folder.path(), easy));
  CHECK(read_best(folder.path())->measured_on == "a");
  CHECK(offer_best(folder.path(), hard));
  CHECK_FALSE(offer_best(folder.path(), harder));
  CHECK(read_best(folder.path())->step == 20);
  CHECK(are_comparable(scored(10, 9), hard));  // a record of an earlier version does not say
}

TEST_CASE("resume: auto takes the newest complete one and passes over a save that was cut short") {
  TempFolder folder;
  CHECK_FALSE(open_checkpoint(folder.path(), "auto").has_value());
  CHECK_FALSE(open_checkpoint(folder.path() / "absent", "auto").has_value());
  save_steps(folder.path(), {10, 20});
  fs::create_directory(folder.path() / ".partial-step-00000030");
  fs::create_directory(folder.path() / "step-00000040");  // no marker
  const std::vector<FoundCheckpoint> found = list_checkpoints(folder.path());
  REQUIRE(found.size() == 4);
  CHECK(found[0].state == FoundCheckpoint::State::damaged);
  CHECK(found[1].state == FoundCheckpoint::State::unfinished);
  CHECK(found[2].state == FoundCheckpoint::State::complete);
  std::string log;
  redirect_log([&](Level level, std::string_view line) { log += level == Level::kWarn ? std::string(line) + "\n" : ""; });
  CHECK(open_checkpoint(folder.path(), "auto")->index().step == 20);
  redirect_log({});
  CHECK(log == (folder.path() / "step-00000040").string() + " is damaged: it has no COMMITTED; it is passed over for step-00000020\n");
}

TEST_CASE("resume: a run with nothing but step folders that lost their marker is refused and not started afresh") {
  TempFolder folder;
  save_steps(folder.path(), {10, 20});
  for (const int64_t step : {10, 20}) {
    fs::remove(folder.path() / step_folder_name(step) / "COMMITTED");
  }
  for (const std::string& which : {std::string("auto"), std::string("best"), folder.path().string()}) {
    const std::string message = checkpoint_error([&] { (void)open_checkpoint(folder.path(), which); });
    CHECK(message.find("holds damaged checkpoints only") != std::string::npos);
    CHECK(message.find("step-00000020, ") != std::string::npos);
    CHECK(message.find("another run_id") != std::string::npos);
  }
  TempFolder cut_short;  // a first save that did not get so far is no checkpoint at all
  fs::create_directory(cut_short.path() / ".partial-step-00000030");
  CHECK_FALSE(open_checkpoint(cut_short.path(), "auto").has_value());
}

TEST_CASE("resume: a misspelt word is told from a folder that is missing") {
  TempFolder folder;
  save_steps(folder.path(), {10});
  CHECK(checkpoint_error([&] { (void)open_checkpoint(folder.path(), "atuo"); }) ==
        "there is no checkpoint \"atuo\": no folder is called so\ndid you mean \"auto\"?");
  CHECK(checkpoint_error([&] { (void)open_checkpoint(folder.path(), "untrained"); }).find("auto (the newest), best, or the folder") !=
        std::string::npos);
}

TEST_CASE("retention: a best.json that is damaged counts as none, and the next best step replaces it") {
  for (const char* text : {"{", "[]", "{\"step\": \"ten\"}", "{\"step\": -1, \"score\": 1, \"metric\": \"m\", \"metrics\": {}}", ""}) {
    CAPTURE(text);
    TempFolder folder;
    save_steps(folder.path(), {10, 20, 30});
    atomic_write(folder.path() / "best.json", text);
    CHECK_FALSE(read_best(folder.path()).has_value());
    CHECK(open_checkpoint(folder.path(), "best")->index().step == 30);
    CHECK(rotate_checkpoints(folder.path(), {.newest = 2}, 30) == std::vector<int64_t>{10});
    CHECK(offer_best(folder.path(), scored(20, 1.5)));
    CHECK(read_best(folder.path())->step == 20);
  }
}

TEST_CASE("resume: best, a step's folder and a run's folder can be named") {
  TempFolder folder;
  save_steps(folder.path(), {10, 20});
  CHECK(open_checkpoint(folder.path(), "best")->index().step == 20);  // no record yet: the newest
  REQUIRE(offer_best(folder.path(), scored(10, 3)));
  CHECK(open_checkpoint(folder.path(), "best")->index().step == 10);
  CHECK(open_checkpoint("elsewhere", folder.path() / "step-00000010")->index().step == 10);
  CHECK(open_checkpoint("elsewhere", folder.path().string() + "/step-00000010/")->index().step == 10);
  CHECK(open_checkpoint("elsewhere", folder.path() / "latest")->index().step == 20);
  CHECK(open_checkpoint("elsewhere", folder.path())->index().step == 20);
}

TEST_CASE("resume: a damaged newest one is an error that names the good one before it") {
  TempFolder folder;
  save_steps(folder.path(), {10, 20, 30});
  spoil(folder.path(), 30);
  spoil(folder.path(), 20);
  const std::string message = checkpoint_error([&] { (void)open_checkpoint(folder.path(), "auto"); });
  CHECK(message.find("step-00000030") != std::string::npos);
  CHECK(message.find("name the newest good one instead: " + (folder.path() / "step-00000010").string()) != std::string::npos);
  CHECK(open_checkpoint(folder.path(), folder.path() / "step-00000010")->index().step == 10);
}

TEST_CASE("resume: naming an unfinished or missing one is an error that names a good one") {
  TempFolder folder;
  save_steps(folder.path(), {10});
  fs::create_directory(folder.path() / "step-00000040");
  const std::string unfinished =
      checkpoint_error([&] { (void)open_checkpoint(folder.path(), folder.path() / "step-00000040"); });
  CHECK(unfinished.find("cut short") != std::string::npos);
  CHECK(unfinished.find("step-00000010") != std::string::npos);
  const std::string missing =
      checkpoint_error([&] { (void)open_checkpoint(folder.path(), folder.path() / "step-00000077"); });
  CHECK(missing.find("does not exist") != std::string::npos);
  CHECK(missing.find("step-00000010") != std::string::npos);
}

TEST_CASE("retention: what killed runs left is swept when the next one starts") {
  TempFolder folder;
  save_steps(folder.path(), {10});
  for (const char* name : {".partial-step-00000020", ".removed-step-00000005"}) {
    fs::create_directory(folder.path() / name);
    atomic_write(folder.path() / name / "rank00000.safetensors", "half");
  }
  save_steps(folder.path(), {});
  CHECK(test::names_in(folder.path()) == std::vector<std::string>{"latest", "step-00000010"});
}

TEST_CASE("retention: something else called latest costs a warning and no step") {
  TempFolder folder;
  fs::create_directories(folder.path() / "latest" / "mine");
  CHECK_NOTHROW(save_steps(folder.path(), {10, 20}));
  CHECK(open_checkpoint(folder.path(), "auto")->index().step == 20);
  CHECK(fs::is_directory(folder.path() / "latest" / "mine"));
  CHECK(test::names_in(folder.path()) == std::vector<std::string>{"latest", "step-00000010", "step-00000020"});
}

TEST_CASE("retention: links to themselves are as if nothing was there") {
  TempFolder folder;
  save_steps(folder.path(), {10});
  fs::create_symlink("best.json", folder.path() / "best.json");
  CHECK_FALSE(read_best(folder.path()).has_value());
  CHECK(open_checkpoint(folder.path(), "best")->index().step == 10);
  fs::create_directory(folder.path() / "step-00000020");
  fs::create_symlink(kMarkerFile, folder.path() / "step-00000020" / kMarkerFile);
  CHECK(open_checkpoint(folder.path(), "auto")->index().step == 10);
  fs::create_symlink("step-00000030", folder.path() / "step-00000030");
  CHECK(list_checkpoints(folder.path()).size() == 2);
  CHECK(checkpoint_error([&] { (void)open_checkpoint(folder.path(), folder.path() / "step-00000030"); }).find("does not exist") != std::string::npos);
}

}  // namespace
}  // namespace sf
