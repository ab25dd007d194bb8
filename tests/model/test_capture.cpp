#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "core/data/feature_folder.hpp"
#include "core/data/feature_store.hpp"
#include "core/data/weight_folder.hpp"
#include "core/model/capture.hpp"
#include "core/model/target.hpp"
#include "core/model/tensor_view.hpp"
#include "tests/data/scratch.hpp"

using namespace sf;
using sf::test::error_of;
using sf::test::Scratch;

namespace {

const std::filesystem::path kTargets = std::filesystem::path(SF_TEST_DATA) / "parity" / "golden";
constexpr int64_t kHidden = 64;

// Samples of 3 to 40 tokens; every seventh has no supervised pair.
std::string make_tokens(int64_t count, int64_t first_id = 3) {
  std::string text;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t length = 3 + (i * 13) % 38;
    Json ids = Json::array();
    Json mask = Json::array();
    for (int64_t t = 0; t < length; ++t) {
      ids.push_back(first_id + (i * 31 + t * 7) % 300);
      mask.push_back(i % 7 == 6 ? t % 2 : static_cast<int64_t>(t > 0));
    }
    text += Json::object({{"id", format("s{}", i)}, {"input_ids", ids}, {"loss_mask", mask}}).dump() + "\n";
  }
  return text;
}

CaptureOptions options_for(const Scratch& scratch, const std::string& output = "features") {
  return {.target_folder = kTargets / "target_qwen3",
          .tokens_path = scratch.path() / "tokens.jsonl",
          .output = scratch.path() / output,
          .features = {{.key = "hidden_states", .layer_ids = {3, 1}},
                       {.key = "target_last_hidden_states", .last_state = true}},
          .batch_size = 3,
          .max_length = 32,
          .shard_bytes = 100'000,
          .dtype = Dtype::kF32};
}

FeatureNeeds needs_for() {
  return {.features = {{.key = "hidden_states", .width = 2 * kHidden, .layer_ids = {3, 1}},
                       {.key = "target_last_hidden_states", .width = kHidden, .last_state = true}},
          .vocab_size = 320,
          .verify_checksums = true};
}

std::set<std::string> names_in(const std::filesystem::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    names.insert(entry.path().filename().string());
  return names;
}

}  // namespace

TEST_CASE("capture: every record holds the states that its sample has alone") {
  const Scratch scratch;
  scratch.write("tokens.jsonl", make_tokens(20));
  const CaptureResult result = capture_features(options_for(scratch));
  CHECK_FALSE(result.was_finished);
  CHECK(result.manifest.samples_unsupervised == 2);
  CHECK(result.manifest.shards.size() > 2);
  const auto store = FeatureStore::open(scratch.path() / "features", needs_for());
  const auto samples = read_tokens(scratch.path() / "tokens.jsonl", {.max_length = 32});
  REQUIRE(store->size() == 18);
  const Target target = Target::load({.folder = kTargets / "target_qwen3"});
  int64_t record_number = 0;
  for (const TokenSample& sample : samples) {
    if (!has_supervised_pair(sample.loss_mask)) continue;
    CAPTURE(sample.id);
    const auto record = store->record(record_number);
    CHECK(store->sample_tokens(record_number).input_ids == sample.input_ids);
    CHECK(store->sample_tokens(record_number).loss_mask == sample.loss_mask);
    const TargetStates alone = target.forward(
        {.input_ids_bt = at::tensor(sample.input_ids).unsqueeze(0), .layer_ids = {3, 1}, .last_state = true});
    // Float32 sums in another order: the batch is padded and has other rows.
    CHECK(at::allclose(as_tensor(record[2]), at::cat({alone.layers_bth[0][0], alone.layers_bth[1][0]}, -1),
                       1e-4, 1e-5));
    CHECK(at::allclose(as_tensor(record[3]), alone.last_state_bth[0], 1e-4, 1e-5));
    ++record_number;
  }
}

TEST_CASE("capture: bfloat16 features are the float32 ones, rounded once") {
  const Scratch scratch;
  scratch.write("tokens.jsonl", make_tokens(4));
  (void)capture_features(options_for(scratch, "wide"));
  CaptureOptions options = options_for(scratch, "narrow");
  options.dtype = Dtype::kBF16;
  (void)capture_features(options);
  const auto wide = FeatureStore::open(scratch.path() / "wide", needs_for());
  const auto narrow = FeatureStore::open(scratch.path() / "narrow", needs_for());
  CHECK(at::equal(as_tensor(wide->record(1)[2]).to(at::kBFloat16), as_tensor(narrow->record(1)[2])));
}

TEST_CASE("capture: a finished one is recognised by its content and not made again") {
  const Scratch scratch;
  scratch.write("tokens.jsonl", make_tokens(12));
  const CaptureResult first = capture_features(options_for(scratch));
  CaptureOptions options = options_for(scratch);
  options.shard_bytes = 1 << 30;  // another shard size does not make other features
  const CaptureResult second = capture_features(options);
  CHECK(second.was_finished);
  CHECK(second.tokens_captured == 0);
  CHECK(second.manifest.fingerprint() == first.manifest.fingerprint());

  // A damaged shard is noticed and alone made again.
  const std::filesystem::path shard = scratch.path() / "features" / first.manifest.shards[1].file;
  std::string bytes = read_file(shard);
  bytes[bytes.size() - 5] ^= 1;
  scratch.write("features/" + first.manifest.shards[1].file, bytes);
  const CaptureResult third = capture_features(options_for(scratch));
  CHECK_FALSE(third.was_finished);
  CHECK(third.tokens_captured == first.manifest.shards[1].tokens);
  CHECK(third.manifest.fingerprint() == first.manifest.fingerprint());
}

TEST_CASE("capture: shards of a finished one are kept wherever they were cut; a stopped one is gone on with only as it was cut") {
  const Scratch scratch;
  scratch.write("tokens.jsonl", make_tokens(12));
  CaptureOptions options = options_for(scratch);
  const auto cut_at = [&](int64_t bytes) {
    options.shard_bytes = bytes;
    return capture_features(options);
  };
  const CaptureResult whole = cut_at(1 << 30);
  REQUIRE(whole.manifest.shards.size() == 1);
  const int64_t all = whole.manifest.shards[0].bytes;
  options.output = scratch.path() / "two";
  const CaptureResult first = cut_at(all * 3 / 4);
  REQUIRE(first.manifest.shards.size() == 2);
  options.output = scratch.path() / "other-two";
  const CaptureResult other = cut_at(all * 5 / 8);
  REQUIRE(other.manifest.shards.size() == 2);
  REQUIRE(other.manifest.shards[1].first_sample != first.manifest.shards[1].first_sample);
  options.output = scratch.path() / "two";
  const CaptureResult again = cut_at(all * 5 / 8);  // as many shards, with the border elsewhere
  CHECK(again.was_finished);
  CHECK(again.manifest.fingerprint() == first.manifest.fingerprint());

  options.output = scratch.path() / "stopped";
  options.batch_size = 1;
  options.shard_bytes = all / 4;
  std::string log;
  options.log = [&](Level, std::string_view line) { log += std::string(line) + "\n"; };
  int batches = 0;
  options.stop_requested = [&] { return batches++ == 9; };
  const CaptureResult stopped = capture_features(options);
  REQUIRE(stopped.interrupted);
  options.stop_requested = {};
  const std::set<std::string> there = names_in(options.output);
  const size_t finished = there.size() - 1;  // and capture.json
  REQUIRE(finished > 1);
  CHECK(stopped.manifest.shards.size() == finished);
  CHECK(stopped.manifest.records() > 0);
  CHECK(log.find(format("to go on from its {} finished shards", finished)) != std::string::npos);
  const std::string refused = error_of([&] { (void)cut_at(all / 3); }, &scratch);
  CHECK_MESSAGE(refused.find("stopped: the capture that was stopped here cut its shards in other places") == 0, refused);
  CHECK(names_in(options.output) == there);
  const CaptureResult rest = cut_at(all / 4);
  CHECK(rest.tokens_captured < rest.manifest.tokens());

  // The first one is damaged, the second fine: what is told after another stop is how many are whole.
  batches = 0;
  options.output = scratch.path() / "stopped-again";
  options.stop_requested = [&] { return batches++ == 9; };
  REQUIRE(capture_features(options).interrupted);
  scratch.write("stopped-again/shard-00000.safetensors", "x");
  log.clear();
  batches = 9;
  REQUIRE(capture_features(options).interrupted);
  CHECK_MESSAGE(log.find(format("to go on from its {} finished shards", finished - 1)) != std::string::npos, log);
}

TEST_CASE("capture: shards that nothing says whose they are stay where they are") {
  const Scratch scratch;
  scratch.write("tokens.jsonl", make_tokens(12));
  const CaptureOptions options = options_for(scratch);
  (void)capture_features(options);
  std::filesystem::rename(options.output / "manifest.json", scratch.path() / "elsewhere.json");
  const std::set<std::string> there = names_in(options.output);
  const std::string refused = error_of([&] { (void)capture_features(options); }, &scratch);
  CHECK_MESSAGE(refused.find("features: there is 'shard-0000") == 0, refused);
  CHECK(names_in(options.output) == there);
  std::filesystem::rename(scratch.path() / "elsewhere.json", options.output / "manifest.json");
  CHECK(capture_features(options).was_finished);
}

TEST_CASE("capture: a folder with other features or other files is not touched") {
  const Scratch scratch;
  scratch.write("tokens.jsonl", make_tokens(12));
  (void)capture_features(options_for(scratch));
  const auto error = [&](const auto& change) {
    CaptureOptions options = options_for(scratch);
    change(options);
    return error_of([&] { (void)capture_features(options); }, &scratch);
  };
  CHECK(error([](CaptureOptions& o) {
          o.features[0].layer_ids = {1, 3};
        }) == "features: this folder holds another capture; different: layers, type or keys of the features");
  CHECK(error([](CaptureOptions& o) { o.target_folder = kTargets / "target_llama_tied"; }) ==
        "features: this folder holds another capture; different: target");
  scratch.write("tokens.jsonl", make_tokens(11));
  CHECK(error([](CaptureOptions& o) { o.max_length = 30; }) ==
        "features: this folder holds another capture; different: tokens, max_length");
  scratch.write("notes/thesis.txt", "important");
  CHECK(error([&](CaptureOptions& o) { o.output = scratch.path() / "notes"; }) ==
        "notes: the folder has something else in it: 'thesis.txt'");
  CHECK(read_file(scratch.path() / "notes" / "thesis.txt") == "important");
  CHECK(names_in(scratch.path() / "notes").size() == 1);
}

TEST_CASE("capture: stopped at any batch and run again it gives the same bytes as in one go") {
  const Scratch scratch;
  scratch.write("tokens.jsonl", make_tokens(20));
  const std::string whole = capture_features(options_for(scratch, "whole")).manifest.fingerprint();
  for (int stop_at = 0; stop_at < 7; stop_at += 3) {
    CAPTURE(stop_at);
    const std::string name = format("stopped-{}", stop_at);
    CaptureOptions options = options_for(scratch, name);
    int batches = 0;
    options.stop_requested = [&] { return batches++ == stop_at; };
    const CaptureResult stopped = capture_features(options);
    REQUIRE(stopped.interrupted);
    CHECK(error_of([&] { (void)FeatureStore::open(options.output, needs_for()); }, &scratch) ==
          name + ": the capture of these features was not finished");
    for (const std::string& file : names_in(options.output)) CHECK_FALSE(file.ends_with(".part"));
    options.stop_requested = {};
    const CaptureResult rest = capture_features(options);
    CHECK(rest.manifest.fingerprint() == whole);
    CHECK(names_in(options.output) == names_in(scratch.path() / "whole"));
    if (stop_at == 6) CHECK(rest.tokens_captured < rest.manifest.tokens());  // finished shards were kept
  }
}

// The child of the next test; skipped unless that one runs it.
TEST_CASE("capture: child" * doctest::skip(std::getenv("SF_TEST_CAPTURE_FOLDER") == nullptr)) {
  CaptureOptions options;
  const std::filesystem::path folder = std::getenv("SF_TEST_CAPTURE_FOLDER");
  options = {.target_folder = kTargets / "target_qwen3",
             .tokens_path = folder / "tokens.jsonl",
             .output = folder / "features",
             .features = {{.key = "hidden_states", .layer_ids = {3, 1}},
                          {.key = "target_last_hidden_states", .last_state = true}},
             .batch_size = 1,
             .max_length = 32,
             .shard_bytes = 60'000,
             .dtype = Dtype::kF32};
  // Slow enough that a kill hits the middle: a millisecond or two for each batch.
  options.stop_requested = [] {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    return false;
  };
  (void)capture_features(options);
}

TEST_CASE("capture: killed at any moment and run again it gives the same bytes as in one go") {
  const Scratch scratch;
  scratch.write("tokens.jsonl", make_tokens(60));
  CaptureOptions options = options_for(scratch, "whole");
  options.batch_size = 1;
  options.shard_bytes = 60'000;
  const std::string whole = capture_features(options).manifest.fingerprint();
  const std::string variable = "SF_TEST_CAPTURE_FOLDER=" + scratch.path().string();
  int killed = 0;
  for (const int milliseconds : {0, 15, 40, 90}) {  // after the first shard in work appears
    std::vector<char*> environment;
    for (char** entry = environ; *entry != nullptr; ++entry) environment.push_back(*entry);
    environment.push_back(const_cast<char*>(variable.c_str()));
    environment.push_back(nullptr);
    const char* arguments[] = {"test_model", "--test-case=capture: child", nullptr};
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
    pid_t child = 0;
    REQUIRE(posix_spawn(&child, "/proc/self/exe", &actions, nullptr, const_cast<char**>(arguments),
                        environment.data()) == 0);
    posix_spawn_file_actions_destroy(&actions);
    const auto in_work = [&] {
      const std::filesystem::path output = scratch.path() / "features";
      if (!std::filesystem::exists(output)) return false;
      const std::set<std::string> names = names_in(output);
      return std::any_of(names.begin(), names.end(),
                         [](const std::string& name) { return name.ends_with(".part"); });
    };
    for (int i = 0; i < 5000 && !in_work() && waitpid(child, nullptr, WNOHANG) == 0; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
    kill(child, SIGKILL);
    int status = 0;
    // A child that ended before the kill has been waited for already.
    if (waitpid(child, &status, 0) == child) killed += WIFSIGNALED(status) ? 1 : 0;
    // Whatever is there is either recognised as unfinished or whole.
    const std::filesystem::path output = scratch.path() / "features";
    if (std::filesystem::exists(output / "capture.json")) {
      const FeatureManifest so_far = FeatureManifest::read(output / "capture.json");
      for (const FeatureShard& shard : so_far.shards) CHECK(sha256_file(output / shard.file) == shard.sha256);
    }
  }
  CHECK(killed > 0);
  options.output = scratch.path() / "features";
  CHECK(capture_features(options).manifest.fingerprint() == whole);
  CHECK(names_in(options.output) == names_in(scratch.path() / "whole"));
}

TEST_CASE("capture: samples whose states are not finite are refused by name, the others stay") {
  const Scratch scratch;
  // Token 5 gets a NaN embedding; it is in some samples and not in others.
  const WeightFolder weights = WeightFolder::open(kTargets / "target_qwen3");
  std::vector<TensorView> tensors;
  at::Tensor poisoned;
  for (const std::string& name : weights.names()) {
    tensors.push_back(*weights.find(name));
    if (name != "model.embed_tokens.weight") continue;
    poisoned = as_tensor(tensors.back()).clone();
    poisoned[5][7] = std::numeric_limits<float>::quiet_NaN();
    tensors.back() = as_view(name, poisoned);
  }
  std::filesystem::create_directory(scratch.path() / "target");
  write_safetensors(scratch.path() / "target" / "model.safetensors", tensors);
  std::filesystem::copy(kTargets / "target_qwen3" / "config.json", scratch.path() / "target" / "config.json");
  scratch.write("tokens.jsonl",
                "{\"id\": \"good\", \"input_ids\": [1, 2, 3], \"loss_mask\": [0, 1, 1]}\n"
                "{\"id\": \"bad\", \"input_ids\": [1, 5, 3], \"loss_mask\": [0, 1, 1]}\n"
                "{\"id\": \"fine\", \"input_ids\": [4, 6], \"loss_mask\": [1, 1]}\n");
  CaptureOptions options = options_for(scratch);
  options.target_folder = scratch.path() / "target";
  std::string log;
  options.log = [&](Level, std::string_view line) { log += std::string(line) + "\n"; };
  const CaptureResult result = capture_features(options);
  CHECK(result.manifest.records() == 2);
  CHECK(result.manifest.shards[0].refused == std::vector<int64_t>{1});
  CHECK(log.find("sample 'bad' is refused: 'hidden_states' is not finite (NaN or infinity) at token ") !=
        std::string::npos);
  const auto store = FeatureStore::open(options.output, needs_for());
  CHECK(store->size() == 2);
  CHECK(store->sample_tokens(1).input_ids == std::vector<int64_t>{4, 6});

  scratch.write("tokens.jsonl", "{\"input_ids\": [5, 5], \"loss_mask\": [1, 1]}\n");
  options.output = scratch.path() / "none";
  CHECK(error_of([&] { (void)capture_features(options); }, &scratch) ==
        "none: not one sample gave finite features");
  CHECK(error_of([&] { (void)capture_features(options); }, &scratch) ==
        "none: not one sample gave finite features");
}

TEST_CASE("capture: what can't be captured is said before any work") {
  const Scratch scratch;
  scratch.write("tokens.jsonl", make_tokens(3));
  CaptureOptions options = options_for(scratch);
  options.features[0].layer_ids = {1, 6};
  CHECK(error_of([&] { (void)capture_features(options); })
            .ends_with(
                "config.json: layer 6 of 'hidden_states' does not exist, the target has the layers 0 to 5"));
  options = options_for(scratch);
  scratch.write("tokens.jsonl", make_tokens(3, 100));
  CHECK(error_of([&] { (void)capture_features(options); }).find(", but the target has the tokens 0 to 319") !=
        std::string::npos);
  scratch.write("tokens.jsonl", "{\"input_ids\": [1, 2, 3], \"loss_mask\": [1, 0, 1]}\n");
  CHECK(error_of([&] { (void)capture_features(options); }, &scratch) ==
        "tokens.jsonl: none of its 1 samples has two neighbouring supervised tokens within max_length 32");
  CHECK_FALSE(std::filesystem::exists(options.output));
}
