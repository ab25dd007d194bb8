// Where the time of a micro-step goes: a random DFlash2 draft in a given shape, a few windows, seconds for each. Built on demand:
//   ninja -C build measure_dflash_step && build/bin/measure_dflash_step [hidden vocabulary layers batch tokens anchors block rank candidates steps]
// The shape of tools/quickstart is the default.
#include <ATen/ATen.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "tests/dflash2/draft_run.hpp"

int main(int argc, char** argv) {
  int64_t value[] = {576, 49152, 1, 4, 150, 8, 4, 32, 8, 10};
  for (int i = 1; i < argc && i <= 10; ++i) {
    value[i - 1] = std::atoll(argv[i]);
  }
  const auto [h, v, layers, b, s, w, block, rank, candidates, steps] = value;
  sf::ModelFacts facts;
  const auto text = [](int64_t n) { return std::to_string(n); };
  facts.draft_config_json = sf::testing::tiny_config({{"hidden_size", text(h)}, {"intermediate_size", text(h * 8 / 3 / 64 * 64)}, {"num_hidden_layers", text(layers)},
                                                      {"num_attention_heads", text(h / 64)}, {"num_key_value_heads", text(h / 64 % 3 == 0 ? h / 192 : h / 64)}, {"head_dim", "64"},
                                                      {"vocab_size", text(v)}, {"layer_types", ""}, {"block_size", text(block)},
                                                      {"dflash_config.conv_group_size", "16"}, {"dflash_config.selector_rank", text(rank)}, {"dflash_config.selector_top_k", text(candidates)},
                                                      {"dflash_config.target_layer_ids", "[1, 3, 5, 7, 9]"}});
  facts.bfloat16 = false;
  sf::DflashOptions options;
  sf::testing::DraftRun run(options, facts, {at::randn({v, h}).mul_(0.05), at::randn({v, h}).mul_(0.05)}, {});
  const int64_t begin = std::min<int64_t>(s / 4, s - w - 1);
  const sf::Batch batch = run.batch({{"input_ids", at::randint(v, {b, s}, at::kLong)},
                                     {"loss_mask", at::ge(at::arange(s), begin).to(at::kLong).expand({b, s}).contiguous()},
                                     {"hidden_states", at::randn({b, s, 5 * h})},
                                     {"anchors", at::arange(begin, begin + w).expand({b, w}).contiguous()},
                                     {"keep", at::ones({b, w}, at::kBool)}});
  const int64_t rows = batch.at("row_index").size(0);
  const double head_flop = 4.0 * static_cast<double>(rows) * static_cast<double>(v) * static_cast<double>(h);
  std::printf("%lld rows for the head, %.1f GFLOP in it\n", static_cast<long long>(rows), head_flop * 1e-9);
  for (int64_t i = 0; i < steps; ++i) {
    sf::StepInfo step;
    step.wants_details = i + 1 == steps;
    const auto start = std::chrono::steady_clock::now();
    const double loss = run.train({batch}, step).loss;
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    std::printf("step %lld: %.3f s, loss %.4f%s\n", static_cast<long long>(i), seconds.count(), loss, step.wants_details ? ", with detailed metrics" : "");
  }
  return 0;
}
