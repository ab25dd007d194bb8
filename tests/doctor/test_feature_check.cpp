// Features that are what they say pass; shifted, swapped, pre-norm, strange and damaged ones do not, each for its own reason.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "sf/json.hpp"

#include "core/base/file.hpp"
#include "core/data/feature_format.hpp"
#include "core/data/target_config.hpp"
#include "core/data/weight_folder.hpp"
#include "core/doctor/feature_check.hpp"

#include <unistd.h>

using namespace sf;
namespace fs = std::filesystem;

namespace {

constexpr int64_t kHidden = 32, kVocabulary = 120, kRecords = 12, kLength = 40;
using Row = std::vector<float>;

// A target of tables alone, and what it would store for random texts: layers that grow towards a last state which points to the next token.
class Made {
 public:
  Made() : path(fs::temp_directory_path() / ("sf-features-" + std::to_string(::getpid()))), random_(5) {
    fs::remove_all(path);
    fs::create_directories(path / "target");
    fs::create_directories(path / "features");
    std::ofstream(path / "target/config.json")
        << R"({"model_type":"llama","hidden_size":32,"num_hidden_layers":6,"num_attention_heads":4,"intermediate_size":64,"vocab_size":120,"rms_norm_eps":1e-6,"rope_theta":10000,"tie_word_embeddings":true,"max_position_embeddings":128})";
    for (int64_t i = 0; i < kVocabulary * kHidden; ++i) head_.push_back(draw());
    for (int64_t i = 0; i < kHidden; ++i) norm_.push_back(0.5F + std::abs(draw()));
    const std::vector<TensorView> tensors = {
        {.name = "model.embed_tokens.weight", .dtype = Dtype::kF32, .shape = {kVocabulary, kHidden}, .bytes = std::as_bytes(std::span(head_)), .owner = {}},
        {.name = "model.norm.weight", .dtype = Dtype::kF32, .shape = {kHidden}, .bytes = std::as_bytes(std::span(norm_)), .owner = {}}};
    write_safetensors(path / "target/model.safetensors", tensors);
    for (int64_t r = 0; r < kRecords; ++r) {
      TokenSample& sample = samples.emplace_back();
      sample.id = std::to_string(r);
      for (int64_t t = 0; t <= kLength; ++t) sample.input_ids.push_back(static_cast<int64_t>(random_() % kVocabulary));
      sample.loss_mask.assign(kLength + 1, 1);
      for (int64_t t = 0; t < kLength; ++t) {
        const float* next = head_.data() + sample.input_ids[static_cast<std::size_t>(t + 1)] * kHidden;
        Row wanted(kHidden), unit(kHidden);
        double square = 0;
        for (int64_t i = 0; i < kHidden; ++i) {
          wanted[i] = next[i] + 0.4F * draw();
          unit[i] = wanted[i] / norm_[i];
          square += unit[i] * unit[i];
        }
        const auto size = static_cast<float>(std::sqrt(square / kHidden));
        Row last(kHidden), before(kHidden);
        for (int64_t i = 0; i < kHidden; ++i) {
          before[i] = 12 * unit[i] / size;
          last[i] = unit[i] / size * norm_[i];
        }
        last_.push_back(last);
        before_norm_.push_back(before);
        for (int layer = 0; layer < 3; ++layer) {
          Row state(kHidden);
          for (int64_t i = 0; i < kHidden; ++i) state[i] = static_cast<float>(1 << layer) * draw() + 0.4F * static_cast<float>(layer * layer) * unit[i];
          layers_[layer].push_back(state);
        }
      }
      sample.input_ids.resize(kLength);
      sample.loss_mask.resize(kLength);
    }
  }
  ~Made() { fs::remove_all(path); }

  // Writes what `layer` and `last` give for the n-th stored state.
  void store(const std::function<Row(int layer, std::size_t n)>& layer, const std::function<Row(std::size_t n)>& last) {
    fs::remove_all(path / "features");
    fs::create_directories(path / "features");
    FeatureManifest manifest;
    const Json config = read_model_config(path / "target");
    manifest.target = Json::object({{"model_type", "llama"}, {"hidden_size", kHidden}, {"num_hidden_layers", 6}, {"vocab_size", kVocabulary}});
    manifest.target.set("fingerprint", target_fingerprint(config, WeightFolder::open(path / "target")));
    manifest.features = {{.key = "hidden_states", .dtype = Dtype::kF32, .width = 3 * kHidden, .layer_ids = {1, 3, 5}},
                         {.key = "target_last_hidden_states", .dtype = Dtype::kF32, .width = kHidden, .layer_ids = {}, .last_state = true}};
    manifest.tokens_sha256 = tokens_fingerprint(samples);
    ShardWriter writer(path / "features/shard-00000.safetensors", manifest.features, samples, 0, manifest.recipe_fingerprint());
    for (int64_t r = 0; r < kRecords; ++r) {
      Row states, lasts;
      for (int64_t t = 0; t < kLength; ++t) {
        const auto n = static_cast<std::size_t>(r * kLength + t);
        for (int k = 0; k < 3; ++k) {
          const Row row = layer(k, n);
          states.insert(states.end(), row.begin(), row.end());
        }
        const Row row = last(n);
        lasts.insert(lasts.end(), row.begin(), row.end());
      }
      writer.put(r, 0, std::as_bytes(std::span(states)));
      writer.put(r, 1, std::as_bytes(std::span(lasts)));
    }
    manifest.shards.push_back(writer.finish());
    atomic_write(path / "features/manifest.json", manifest.to_json().dump(2));
  }

  [[nodiscard]] std::string faults(const fs::path& tokens = {}) const {
    std::string out;
    for (const FeatureFinding& finding : check_features({.features = path / "features", .target = path / "target", .tokens = tokens})) {
      if (!finding.is_fine) out += finding.what + ": " + finding.text + "\n";
    }
    return out;
  }

  [[nodiscard]] Row layer(int k, std::size_t n) const { return layers_[k][n]; }
  [[nodiscard]] Row last(std::size_t n) const { return last_[n]; }
  [[nodiscard]] Row before_norm(std::size_t n) const { return before_norm_[n]; }
  float draw() { return normal_(random_); }

  fs::path path;
  std::vector<TokenSample> samples;

 private:
  std::mt19937_64 random_;
  std::normal_distribution<float> normal_;
  Row head_, norm_;
  std::vector<Row> last_, before_norm_, layers_[3];
};

bool has(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("features: a folder without any is told with the key that names it") {
  Made made;
  fs::create_directories(made.path / "empty");
  const std::vector<FeatureFinding> findings = check_features({.features = made.path / "empty", .target = made.path / "target", .named_by = "data.eval_hidden_states_path"});
  REQUIRE(findings.size() == 1);
  CHECK_FALSE(findings[0].is_fine);
  CHECK_MESSAGE(has(findings[0].text, "let data.eval_hidden_states_path name a folder"), findings[0].text);
}

TEST_CASE("features: right ones pass every check") {
  Made made;
  made.store([&](int k, std::size_t n) { return made.layer(k, n); }, [&](std::size_t n) { return made.last(n); });
  CHECK(made.faults() == "");
}

TEST_CASE("features: a last state that is shifted by one is found, with the direction") {
  Made made;
  const auto count = static_cast<std::size_t>(kRecords * kLength);
  made.store([&](int k, std::size_t n) { return made.layer(k, n); }, [&](std::size_t n) { return made.last((n + 1) % count); });
  CHECK(has(made.faults(), "shifted: the state stored at t is the one of t+1"));
  made.store([&](int k, std::size_t n) { return made.layer(k, n); }, [&](std::size_t n) { return made.last((n + count - 1) % count); });
  CHECK(has(made.faults(), "shifted: the state stored at t is the one of t-1"));
}

TEST_CASE("features: states before the final norm are found, though the head still predicts with them") {
  Made made;
  made.store([&](int k, std::size_t n) { return made.layer(k, n); }, [&](std::size_t n) { return made.before_norm(n); });
  const std::string faults = made.faults();
  CHECK(has(faults, "the last state is behind the final norm"));
  CHECK(has(faults, "states before the norm"));
}

TEST_CASE("features: states of another model are found by the head") {
  Made made;
  Made other;
  std::vector<Row> strange;
  for (int64_t n = 0; n < kRecords * kLength; ++n) {
    Row row;
    for (int64_t i = 0; i < kHidden; ++i) row.push_back(made.draw());
    strange.push_back(row);
  }
  made.store([&](int k, std::size_t n) { return made.layer(k, n); }, [&](std::size_t n) { return strange[n]; });
  CHECK(has(made.faults(), "near chance"));
}

TEST_CASE("features: layers that stand in another order than their ids say are found") {
  Made made;
  const int swapped[] = {2, 1, 0};
  made.store([&](int k, std::size_t n) { return made.layer(swapped[k], n); }, [&](std::size_t n) { return made.last(n); });
  CHECK(has(made.faults(), "layers stand in another order"));
  const int neighbours[] = {0, 2, 1};
  made.store([&](int k, std::size_t n) { return made.layer(neighbours[k], n); }, [&](std::size_t n) { return made.last(n); });
  CHECK(has(made.faults(), "layers stand in another order"));
  made.store([&](int k, std::size_t n) { return k == 1 ? Row(kHidden, 0.0F) : made.layer(k, n); }, [&](std::size_t n) { return made.last(n); });
  CHECK(has(made.faults(), "all zero"));
}

TEST_CASE("features: a damaged shard and tokens of another file are found") {
  Made made;
  made.store([&](int k, std::size_t n) { return made.layer(k, n); }, [&](std::size_t n) { return made.last(n); });
  const auto write_tokens = [&](int64_t first) {
    std::ofstream file(made.path / "tokens.jsonl");
    for (const TokenSample& sample : made.samples) {
      Json ids = Json::array_of(sample.input_ids);
      ids.items()[0] = Json(first < 0 ? sample.input_ids[0] : first);
      file << Json::object({{"input_ids", ids}, {"loss_mask", Json::array_of(std::vector<int>(sample.loss_mask.begin(), sample.loss_mask.end()))}}).dump() << "\n";
    }
  };
  write_tokens(-1);
  CHECK(made.faults(made.path / "tokens.jsonl") == "");
  write_tokens(3);
  CHECK(has(made.faults(made.path / "tokens.jsonl"), "has other ids or masks"));
  {
    std::fstream shard(made.path / "features/shard-00000.safetensors", std::ios::in | std::ios::out | std::ios::binary);
    shard.seekp(-5, std::ios::end);
    shard.put('\x7f');
  }
  CHECK(has(made.faults(), "its SHA-256 is not the manifest's"));
}
