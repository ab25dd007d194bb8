// The forward pass with a key-value cache against the whole one, and what is generated with it. Targets: tests/parity/golden/target_*. About 3 s.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <doctest/doctest.h>

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>

#include "core/base/error.hpp"
#include "core/data/safetensors.hpp"
#include "core/model/generate.hpp"
#include "core/model/memory_bandwidth.hpp"
#include "core/model/skinny_product.hpp"
#include "core/model/tensor_view.hpp"

using namespace sf;
namespace fs = std::filesystem;

namespace {

fs::path golden() { return fs::path(SF_TEST_DATA) / "parity" / "golden"; }

std::vector<fs::path> target_folders() {
  std::vector<fs::path> folders;
  for (const auto& entry : fs::directory_iterator(golden())) {
    if (entry.is_directory() && entry.path().filename().string().starts_with("target_")) folders.push_back(entry.path());
  }
  std::sort(folders.begin(), folders.end());
  return folders;
}

const Target& tiny() {
  static const Target* target = new Target(Target::load({.folder = golden() / "target_llama_tied", .head_needed = true}));
  return *target;
}

double apart(const at::Tensor& found, const at::Tensor& expected) {
  REQUIRE(found.sizes() == expected.sizes());
  return (found - expected).abs().max().item<double>();
}

std::vector<Prompt> some_prompts(int64_t count) {
  std::vector<Prompt> prompts;
  for (int64_t i = 0; i < count; ++i) {
    Prompt prompt{.id = std::to_string(i), .category = "all", .ids = {1}};
    for (int64_t j = 0; j < 3 + i % 5; ++j) prompt.ids.push_back(3 + (i * 37 + j * 11) % 300);
    prompts.push_back(std::move(prompt));
  }
  return prompts;
}

std::map<int64_t, Answer> answers(const std::vector<Prompt>& prompts, GenerationOptions options, GenerationTimes* times = nullptr) {
  std::vector<int64_t> which;
  for (size_t i = 0; i < prompts.size(); ++i) which.push_back(static_cast<int64_t>(i));
  std::map<int64_t, Answer> found;
  options.finished = [&](const Answer& answer) { found[answer.prompt] = answer; };
  const GenerationTimes taken = generate(tiny(), prompts, which, options);
  if (times != nullptr) *times = taken;
  return found;
}

// Written to a file of its own, gone at the end.
struct PromptFile {
  fs::path path = fs::temp_directory_path() / ("sf-prompts-" + std::to_string(getpid()) + ".jsonl");
  explicit PromptFile(const std::string& text) { std::ofstream(path) << text; }
  ~PromptFile() { fs::remove(path); }
};

std::string refusal(const std::string& text, int64_t context = 0) {
  const PromptFile file(text);
  try {
    (void)read_prompts(file.path, 320, context);
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::kData);
    return std::string(error.what()) + "\n  fix:  " + error.hint();
  }
  return "";
}

}  // namespace

TEST_CASE("generate: tokens in pieces through a cache have the logits and states of one whole pass, in every family") {
  const auto folders = target_folders();
  REQUIRE(folders.size() >= 5);
  for (const fs::path& folder : folders) {
    CAPTURE(folder.filename().string());
    const Target target = Target::load({.folder = folder, .head_needed = true});
    const SafetensorsFile file = SafetensorsFile::open(folder / "golden.safetensors");
    const at::Tensor ids = as_tensor(file.at("input_ids")).narrow(0, 0, 1);
    const int64_t t = ids.size(1), layer = target.config().num_hidden_layers / 2;
    const TargetStates whole = target.forward({.input_ids_bt = ids, .layer_ids = {layer}, .last_state = true, .logits = true});
    KeyValueCache cache = target.new_cache(1, 4);
    std::vector<at::Tensor> logits, states;
    for (int64_t at = 0; at < t;) {
      const int64_t count = std::min<int64_t>(at == 0 ? 3 : at % 3 + 1, t - at);
      target.extend_cache(cache, at + count);
      const TargetStates piece = target.forward({.input_ids_bt = ids.narrow(1, at, count), .layer_ids = {layer}, .logits = true, .cache = &cache, .starts = {at}});
      logits.push_back(piece.logits_btv);
      states.push_back(piece.layers_bth[0]);
      at += count;
    }
    CHECK(apart(at::cat(logits, 1), whole.logits_btv) < 1e-4);  // the tolerance that the forward pass itself is held to
    CHECK(apart(at::cat(states, 1), whole.layers_bth[0]) < 1e-4);
  }
}

TEST_CASE("generate: sequences of different lengths in any rows of a cache see only themselves") {
  const std::vector<Prompt> prompts = some_prompts(3);
  KeyValueCache cache = tiny().new_cache(5, 16);
  const std::vector<int64_t> rows = {4, 0, 2};
  int64_t t = 0;
  for (const Prompt& prompt : prompts) t = std::max(t, static_cast<int64_t>(prompt.ids.size()));
  at::Tensor ids = at::zeros({3, t}, at::kLong);
  std::vector<int64_t> lengths;
  for (int64_t j = 0; j < 3; ++j) {
    const auto& prompt = prompts[static_cast<size_t>(j)].ids;
    lengths.push_back(static_cast<int64_t>(prompt.size()));
    ids[j].narrow(0, 0, lengths.back()).copy_(at::tensor(prompt, at::kLong));
  }
  (void)tiny().forward({.input_ids_bt = ids, .layer_ids = {}, .logits = true, .cache = &cache, .rows = rows, .starts = {0, 0, 0}});
  const at::Tensor next = at::tensor(std::vector<int64_t>{7, 8, 9}, at::kLong).unsqueeze(1);
  const at::Tensor found =
      tiny().forward({.input_ids_bt = next, .layer_ids = {}, .logits = true, .cache = &cache, .rows = rows, .starts = lengths}).logits_btv;
  const KeyValueCache fewer = cache.select({2, 4});
  CHECK(at::equal(fewer.keys_bmtd[1][0], cache.keys_bmtd[1][2]));
  for (int64_t j = 0; j < 3; ++j) {
    CAPTURE(j);
    const at::Tensor alone = at::cat({at::tensor(prompts[static_cast<size_t>(j)].ids, at::kLong), next[j]}).unsqueeze(0);
    const at::Tensor expected = tiny().forward({.input_ids_bt = alone, .layer_ids = {}, .logits = true}).logits_btv;
    CHECK(apart(found[j][0], expected[0][alone.size(1) - 1]) < 1e-4);
  }
}

TEST_CASE("generate: a step that could be recorded has the logits of the whole pass, in every family") {
  for (const fs::path& folder : target_folders()) {
    CAPTURE(folder.filename().string());
    const Target target = Target::load({.folder = folder, .head_needed = true});
    const SafetensorsFile file = SafetensorsFile::open(folder / "golden.safetensors");
    const at::Tensor ids = as_tensor(file.at("input_ids")).narrow(0, 0, 1);
    const int64_t t = ids.size(1), known = 3;
    const at::Tensor whole = target.forward({.input_ids_bt = ids, .layer_ids = {}, .logits = true}).logits_btv;
    KeyValueCache cache = target.new_cache(2, t + 2);  // the second sequence is one token behind
    (void)target.forward({.input_ids_bt = ids.narrow(1, 0, known).expand({2, known}), .layer_ids = {}, .logits = true, .cache = &cache, .starts = {0, 0}});
    at::Tensor ids_b = at::empty({2}, at::kLong), positions_b = at::tensor(std::vector<int64_t>{known, known - 1}, at::kLong);
    for (int64_t at = known; at < t; ++at) {
      ids_b[0] = ids[0][at];
      ids_b[1] = ids[0][at - 1];
      const at::Tensor logits = target.decode_step(ids_b, positions_b, cache);
      CHECK(apart(logits[0], whole[0][at]) < 1e-4);
      CHECK(apart(logits[1], whole[0][at - 1]) < 1e-4);
      positions_b.add_(1);
    }
  }
}

TEST_CASE("generate: several steps at a time give the answers, stops and counts of single steps") {
  const std::vector<Prompt> prompts = some_prompts(23);
  for (const Sampling& sampling : {Sampling{}, Sampling{.temperature = 1.0, .seed = 5}, Sampling{.temperature = 0.8, .top_p = 0.9, .top_k = 40, .seed = 6}}) {
    for (const int64_t batch : {1, 4, 32}) {
      CAPTURE(batch);
      GenerationOptions options{.sampling = sampling, .batch_size = batch, .max_new_tokens = 19, .context_tokens = 24, .stop_tokens = {2, 17, 44, 101, 203}};
      GenerationTimes single, several;
      const auto expected = answers(prompts, options, &single);
      options.on_device = true;
      int64_t recorded = 0, replayed = 0;
      options.record = [&](const std::function<void()>& work) -> std::function<void()> {
        ++recorded;
        work();
        return [&replayed, work] {
          ++replayed;
          work();
        };
      };
      const auto found = answers(prompts, options, &several);
      REQUIRE(found.size() == prompts.size());
      for (const auto& [index, answer] : expected) {
        CHECK(found.at(index).ids == answer.ids);
        CHECK(found.at(index).reason == answer.reason);
      }
      CHECK(several.tokens == single.tokens);
      CHECK(several.decode_tokens == single.decode_tokens);
      CHECK(several.cache_bytes == single.cache_bytes);
      CHECK((recorded > 0) == (sampling.top_k == 0));
      if (batch == 1 && sampling.top_k == 0) CHECK(replayed > 2 * recorded);
    }
  }
}

TEST_CASE("generate: memory is read at a speed that a machine can have") {
  const double bandwidth = memory_bandwidth(at::Device(at::kCPU));
  CHECK(bandwidth > 1e8);
  CHECK(bandwidth < 1e13);
}

TEST_CASE("generate: no product that decoding is made of reads weights faster than the memory is said to be") {
  at::set_num_threads(1);
  const at::Tensor weight_oi = at::ones({32 << 10, 2 << 10}), x = at::ones({1, 2 << 10});  // 256 MiB
  double best = 0, said = 0;
  for (int trial = 0; trial < 6; ++trial) {  // in turn, as neighbours come and go
    said = std::max(said, memory_bandwidth(at::Device(at::kCPU)));
    const auto start = std::chrono::steady_clock::now();
    (void)skinny_linear(x, weight_oi, {});
    best = std::max(best, static_cast<double>(weight_oi.nbytes()) / std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  CHECK(best < 1.15 * said);
}

TEST_CASE("generate: greedy answers are the whole pass's best tokens, whatever the batch") {
  const std::vector<Prompt> prompts = some_prompts(11);
  const auto one = answers(prompts, {.sampling = {}, .batch_size = 1, .max_new_tokens = 24, .stop_tokens = {2}});
  REQUIRE(one.size() == prompts.size());
  for (const int64_t batch : {3, 16}) {
    const auto many = answers(prompts, {.sampling = {}, .batch_size = batch, .max_new_tokens = 24, .stop_tokens = {2}});
    for (const auto& [index, answer] : one) CHECK(many.at(index).ids == answer.ids);
  }
  for (const int64_t index : {0, 7}) {
    std::vector<int64_t> ids = prompts[static_cast<size_t>(index)].ids;
    for (const int64_t token : one.at(index).ids) {
      const at::Tensor logits = tiny().forward({.input_ids_bt = at::tensor(ids, at::kLong).unsqueeze(0), .layer_ids = {}, .logits = true}).logits_btv;
      CHECK(logits[0][static_cast<int64_t>(ids.size()) - 1].argmax().item<int64_t>() == token);
      ids.push_back(token);
    }
  }
}

TEST_CASE("generate: samples depend on seed, prompt and token, not on the batch or on which prompts there are") {
  const std::vector<Prompt> prompts = some_prompts(9);
  GenerationOptions options{.sampling = {.temperature = 0.8, .top_p = 0.9, .top_k = 50, .seed = 5}, .batch_size = 1, .max_new_tokens = 12};
  const auto one = answers(prompts, options);
  options.batch_size = 4;
  const auto many = answers(prompts, options);
  for (const auto& [index, answer] : one) CHECK(many.at(index).ids == answer.ids);
  std::map<int64_t, Answer> some;
  options.finished = [&](const Answer& answer) { some[answer.prompt] = answer; };
  (void)generate(tiny(), prompts, {7, 2}, options);
  CHECK(some.size() == 2);
  CHECK(some.at(7).ids == one.at(7).ids);
  // A file of other prompts: what it shares with the first keeps its answers. Asked again, a question gets another one.
  const auto rest = answers({prompts[8], prompts[3], prompts[3], prompts[0]}, options);
  CHECK(rest.at(0).ids == one.at(8).ids);
  CHECK(rest.at(1).ids == one.at(3).ids);
  CHECK(rest.at(2).ids != one.at(3).ids);
  CHECK(rest.at(3).ids == one.at(0).ids);
  options.sampling.seed = 6;
  int64_t different = 0;
  for (const auto& [index, answer] : answers(prompts, options)) different += answer.ids != one.at(index).ids ? 1 : 0;
  CHECK(different >= 8);
}

TEST_CASE("generate: drawn tokens have the probabilities of the distribution that is left after temperature, top-k and top-p") {
  const at::Tensor logits = at::log(at::tensor(std::vector<double>{0.1, 0.4, 0.2, 0.3}, at::kDouble)).to(at::kFloat).unsqueeze(0);
  const auto shares = [&](const Sampling& sampling) {
    std::vector<double> counts(4, 0);
    constexpr int64_t kDraws = 4000;
    for (int64_t i = 0; i < kDraws; ++i) counts[static_cast<size_t>(choose_tokens(logits, sampling, {i}, {3})[0])] += 1.0 / kDraws;
    return counts;
  };
  struct Case {
    const char* name;
    Sampling sampling;
    std::vector<double> expected;
  };
  // Standard error of a share over 4000 draws: at most 0.008.
  for (const Case& one : {Case{"all", {.temperature = 1}, {0.1, 0.4, 0.2, 0.3}},
                          Case{"the two best", {.temperature = 1, .top_k = 2}, {0, 4.0 / 7, 0, 3.0 / 7}},
                          Case{"the fewest that have 0.75 together", {.temperature = 1, .top_p = 0.75}, {0, 4.0 / 9, 2.0 / 9, 3.0 / 9}},
                          Case{"the best alone", {.temperature = 1, .top_p = 0.3}, {0, 1, 0, 0}},
                          Case{"colder", {.temperature = 0.5}, {0.01 / 0.3, 0.16 / 0.3, 0.04 / 0.3, 0.09 / 0.3}}}) {
    CAPTURE(one.name);
    const std::vector<double> found = shares(one.sampling);
    for (size_t i = 0; i < 4; ++i) CHECK(std::abs(found[i] - one.expected[i]) < 0.035);
  }
  CHECK(choose_tokens(logits, {}, {0}, {0}) == std::vector<int64_t>{1});
}

TEST_CASE("generate: an answer ends at a stop token, at its length or at the end of the context, and says which") {
  const std::vector<Prompt> prompts = some_prompts(4);
  const auto free = answers(prompts, {.sampling = {}, .max_new_tokens = 6});
  for (const auto& [index, answer] : free) {
    CHECK(answer.reason == StopReason::kLength);
    CHECK(answer.ids.size() == 6);
  }
  const int64_t third = free.at(0).ids[2];
  const auto first = std::find(free.at(0).ids.begin(), free.at(0).ids.end(), third) - free.at(0).ids.begin();
  const auto stopped = answers(prompts, {.sampling = {}, .max_new_tokens = 6, .stop_tokens = {third}});
  CHECK(stopped.at(0).reason == StopReason::kStopToken);
  CHECK(stopped.at(0).ids == std::vector<int64_t>(free.at(0).ids.begin(), free.at(0).ids.begin() + first + 1));
  GenerationTimes times;
  const auto full = answers(prompts, {.sampling = {}, .max_new_tokens = 100, .context_tokens = 10}, &times);
  int64_t tokens = 0;
  for (const auto& [index, answer] : full) {
    CHECK(answer.reason == StopReason::kContext);
    CHECK(answer.ids.size() + prompts[static_cast<size_t>(index)].ids.size() == 10);
    tokens += static_cast<int64_t>(answer.ids.size());
  }
  CHECK(times.tokens == tokens);
  CHECK(times.decode_tokens == tokens - 4);
}

TEST_CASE("generate: prompts end before the answer of a record, and broken lines are all told") {
  const PromptFile file(R"({"id": "poem/1", "input_ids": [1, 5, 6, 7], "loss_mask": [0, 0, 1, 1]}
{"input_ids": [4, 5], "category": "short"}

{"id": 3, "input_ids": [9, 9], "loss_mask": [0, 0]})");
  const std::vector<Prompt> prompts = read_prompts(file.path, 320, 512);
  REQUIRE(prompts.size() == 3);
  CHECK(prompts[0].ids == std::vector<int64_t>{1, 5});
  CHECK(prompts[0].category == "poem");
  CHECK(prompts[1].id == "line 2");
  CHECK(prompts[1].category == "short");
  CHECK(prompts[2].ids == std::vector<int64_t>{9, 9});
  CHECK(prompts[2].category == "all");
  CHECK(read_prompts(file.path, 320, 512, 2).size() == 2);

  CHECK(refusal("").find("no prompt") != std::string::npos);
  CHECK(refusal("{\"input_ids\": [1, 320]}").find("0 to 319") != std::string::npos);
  CHECK(refusal("{\"input_ids\": [1], \"loss_mask\": [1]}").find("no token before the answer") != std::string::npos);
  CHECK(refusal("{\"input_ids\": [1, 2], \"loss_mask\": [0]}").find("same number") != std::string::npos);
  CHECK(refusal("{\"input_ids\": [1, 2, 3, 4]}", 4).find("context ends at 4") != std::string::npos);
  CHECK(refusal("{\"input_ids\": [1, 2, 3, 4]}", 4).find("fix:  leave them out") != std::string::npos);
  CHECK(refusal("{\"input_ids\": [1, 2, 3, 4]}\n{\"text\": \"hello\"}", 4).find("fix:  each line is an object with input_ids") != std::string::npos);
  const std::string both = refusal("{\"input_ids\": [1]\n{\"text\": \"hello\"}\n{\"input_ids\": [1]}");
  CHECK(both.find("2 of 3 prompts") != std::string::npos);
  CHECK(both.find(":2:") != std::string::npos);
}

TEST_CASE("generate: stop tokens come from the target's own files") {
  CHECK(stop_tokens_of(golden() / "target_llama_tied") == std::vector<int64_t>{2});
  const fs::path folder = fs::temp_directory_path() / ("sf-stop-" + std::to_string(getpid()));
  fs::create_directories(folder);
  std::ofstream(folder / "config.json") << R"({"text_config": {"eos_token_id": [7, 5]}})";
  CHECK(stop_tokens_of(folder) == std::vector<int64_t>{5, 7});
  std::ofstream(folder / "generation_config.json") << R"({"eos_token_id": 9})";
  CHECK(stop_tokens_of(folder) == std::vector<int64_t>{9});
  std::ofstream(folder / "generation_config.json") << "{}";
  std::ofstream(folder / "config.json") << "{}";
  CHECK_THROWS_AS(stop_tokens_of(folder), const Error&);
  fs::remove_all(folder);
}
