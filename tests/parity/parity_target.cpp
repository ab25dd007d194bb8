// Target forward against numbers of a reference implementation: every hidden state and the logits of tiny
// models of each family. Cases: tests/parity/golden/target_*, or those of SF_GOLDEN_DIR.
#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "core/data/safetensors.hpp"
#include "core/model/target.hpp"
#include "core/model/target_tables.hpp"
#include "core/model/tensor_view.hpp"

using namespace sf;

namespace {

std::filesystem::path golden_folder() {
  const char* given = std::getenv("SF_GOLDEN_DIR");
  return given != nullptr && *given != '\0' ? std::filesystem::path(given)
                                            : std::filesystem::path(SF_TEST_DATA) / "parity" / "golden";
}

std::vector<std::filesystem::path> target_cases() {
  std::vector<std::filesystem::path> cases;
  for (const auto& entry : std::filesystem::directory_iterator(golden_folder())) {
    if (entry.is_directory() && entry.path().filename().string().starts_with("target_"))
      cases.push_back(entry.path());
  }
  std::sort(cases.begin(), cases.end());
  return cases;
}

// Largest error over 1e-5 relative plus 1e-5 absolute: 1 or less passes. Float32 sums of 64 to 320 terms in
// another order.
double error_over_tolerance(const at::Tensor& found, const at::Tensor& expected) {
  REQUIRE(found.sizes() == expected.sizes());
  const at::Tensor a = found.to(at::kDouble);
  const at::Tensor e = expected.to(at::kDouble);
  return ((a - e).abs() / (e.abs() * 1e-5 + 1e-5)).max().item<double>();
}

}  // namespace

TEST_CASE("target parity: logits and every hidden state of each family agree with the reference") {
  const auto cases = target_cases();
  REQUIRE_MESSAGE(!cases.empty(), "no target_* folder in " << golden_folder());
  for (const auto& folder : cases) {
    CAPTURE(folder.filename().string());
    const SafetensorsFile golden = SafetensorsFile::open(folder / "golden.safetensors");
    const Target target = Target::load({.folder = folder, .head_needed = true});
    const int64_t layers = target.config().num_hidden_layers;
    std::vector<int64_t> ids;
    for (int64_t i = 0; i < layers; ++i) ids.push_back(i);
    const TargetStates states = target.forward({.input_ids_bt = as_tensor(golden.at("input_ids")),
                                                .layer_ids = ids,
                                                .last_state = true,
                                                .logits = true});
    // hidden.i is the input of layer i, so the output of layer i - 1; hidden.N is after the final norm.
    for (int64_t i = 1; i < layers; ++i) {
      CAPTURE(i);
      CHECK(error_over_tolerance(states.layers_bth[static_cast<size_t>(i - 1)],
                                 as_tensor(golden.at("hidden." + std::to_string(i)))) <= 1);
    }
    CHECK(error_over_tolerance(states.last_state_bth,
                               as_tensor(golden.at("hidden." + std::to_string(layers)))) <= 1);
    CHECK(error_over_tolerance(states.logits_btv, as_tensor(golden.at("logits"))) <= 1);
  }
}

TEST_CASE("target parity: embedding and head from the tables give the reference's first state and logits") {
  for (const auto& folder : target_cases()) {
    CAPTURE(folder.filename().string());
    const SafetensorsFile golden = SafetensorsFile::open(folder / "golden.safetensors");
    const TargetTables tables = load_target_tables({.folder = folder, .dtype = at::kFloat});
    CHECK(at::equal(at::embedding(tables.embedding_vh, as_tensor(golden.at("input_ids"))),
                    as_tensor(golden.at("hidden.0"))));
    std::string last = "hidden.0";
    for (int64_t i = 0; golden.find("hidden." + std::to_string(i)) != nullptr; ++i)
      last = "hidden." + std::to_string(i);
    CHECK(error_over_tolerance(at::linear(as_tensor(golden.at(last)), tables.head_vh),
                               as_tensor(golden.at("logits"))) <= 1);
  }
}

TEST_CASE("target parity: right padding and an early stop change nothing at real positions") {
  const auto cases = target_cases();
  for (const auto& folder : cases) {
    CAPTURE(folder.filename().string());
    const SafetensorsFile golden = SafetensorsFile::open(folder / "golden.safetensors");
    const Target target = Target::load({.folder = folder, .layers_needed = 3});
    const at::Tensor ids = as_tensor(golden.at("input_ids"));
    const int64_t kept = ids.size(1) - 11;
    at::Tensor padded = ids.clone();
    padded[0].narrow(0, kept, 11).zero_();
    const at::Tensor state = target.forward({.input_ids_bt = padded, .layer_ids = {2}}).layers_bth[0];
    const at::Tensor expected = as_tensor(golden.at("hidden.3"));
    CHECK(error_over_tolerance(state[0].narrow(0, 0, kept), expected[0].narrow(0, 0, kept)) <= 1);
    CHECK(error_over_tolerance(state[1], expected[1]) <= 1);
  }
}
