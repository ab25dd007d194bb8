#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "core/data/feature_folder.hpp"
#include "core/data/feature_format.hpp"
#include "core/data/feature_store.hpp"
#include "scratch.hpp"

using namespace sf;
using sf::test::error_of;
using sf::test::Scratch;

namespace {

const std::filesystem::path kTorchFolder = std::filesystem::path(SF_TEST_DATA) / "data" / "features_eagle3";

const FeatureNeeds kEagleNeeds{.features = {{.key = "aux_hidden_state", .width = 192, .layer_ids = {1, 2, 3}},
                                            {.key = "hidden_state", .width = 64, .last_state = true}},
                               .vocab_size = 320};

constexpr int64_t kWidth = 6;

// Sample i has i + 2 tokens; its feature at token t, column c is 100 i + 10 t + c.
std::vector<TokenSample> make_samples(int64_t count) {
  std::vector<TokenSample> samples;
  for (int64_t i = 0; i < count; ++i) {
    TokenSample sample;
    for (int64_t t = 0; t < i + 2; ++t) {
      sample.input_ids.push_back(10 * i + t);
      sample.loss_mask.push_back(t > 0);
    }
    samples.push_back(sample);
  }
  return samples;
}

std::vector<float> make_features(int64_t sample, int64_t tokens) {
  std::vector<float> values;
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t c = 0; c < kWidth; ++c) values.push_back(static_cast<float>(100 * sample + 10 * t + c));
  }
  return values;
}

struct Options {
  int64_t samples = 5;
  int64_t samples_per_shard = 2;
  int64_t bad_sample = -1;      // gets a NaN that the writer does not see
  int64_t refused_sample = -1;  // marked by the writer
  int64_t mask_value = 1;       // of supervised tokens
};

FeatureManifest write_store(const std::filesystem::path& folder, const Options& options = {}) {
  FeatureManifest manifest;
  manifest.target.set("fingerprint", "0123456789abcdef");
  manifest.features = {{.key = "hidden_states", .dtype = Dtype::kF32, .width = kWidth, .layer_ids = {1, 4}}};
  auto samples = make_samples(options.samples);
  for (TokenSample& sample : samples) {
    for (uint8_t& value : sample.loss_mask) value = static_cast<uint8_t>(value * options.mask_value);
  }
  manifest.tokens_sha256 = tokens_fingerprint(samples);
  for (int64_t first = 0; first < options.samples; first += options.samples_per_shard) {
    const int64_t count = std::min(options.samples_per_shard, options.samples - first);
    ShardWriter writer(folder / format("shard-{}.safetensors", first), manifest.features,
                       std::span(samples).subspan(static_cast<size_t>(first), static_cast<size_t>(count)),
                       first, manifest.recipe_fingerprint());
    for (int64_t i = count - 1; i >= 0; --i) {  // any order will do
      auto values = make_features(first + i, first + i + 2);
      if (first + i == options.bad_sample) values[7] = std::numeric_limits<float>::infinity();
      if (first + i == options.refused_sample) {
        writer.refuse(i);
      } else {
        writer.put(i, 0, std::as_bytes(std::span(values)));
      }
    }
    manifest.shards.push_back(writer.finish());
  }
  atomic_write(folder / kManifestName, manifest.to_json().dump(2));
  return manifest;
}

FeatureNeeds our_needs() {
  return {.features = {{.key = "hidden_states", .width = kWidth, .layer_ids = {1, 4}}}, .vocab_size = 1000};
}

// From the tensor's first byte to the end of its file.
size_t bytes_after(const SafetensorsFile& file, const char* name) {
  const TensorView& last = file.tensors().back();
  return static_cast<size_t>(last.bytes.data() + last.bytes.size() - file.at(name).bytes.data());
}

// One number of a shard's I64 column.
void write_number(const Scratch& scratch, const char* shard, const char* name, size_t index, int64_t value) {
  std::string bytes = read_file(scratch.path() / shard);
  const SafetensorsFile file = SafetensorsFile::open(scratch.path() / shard);
  std::memcpy(bytes.data() + (bytes.size() - bytes_after(file, name)) + index * sizeof(value), &value, sizeof(value));
  scratch.write(shard, bytes);
}

std::vector<float> floats(const TensorView& view) {
  std::vector<float> values(view.bytes.size() / 4);
  std::memcpy(values.data(), view.bytes.data(), view.bytes.size());
  return values;
}

}  // namespace

TEST_CASE("feature store: the reference's folder is read in string order of its paths") {
  const auto store = FeatureStore::open(kTorchFolder, kEagleNeeds);
  REQUIRE(store->size() == 6);
  for (int64_t i = 0; i < 6; ++i) {
    CAPTURE(i);
    CHECK(store->record_name(i).ends_with(format("data_{}.ckpt", i)));
    const auto record = store->record(i);
    REQUIRE(record.size() == 4);
    const int64_t tokens = record[0].shape[0];
    CHECK(record[0].name == "input_ids");
    CHECK(record[1].name == "loss_mask");
    CHECK(record[2].name == "aux_hidden_state");
    CHECK(record[2].shape == std::vector<int64_t>{tokens, 192});  // stored as [1, s, 192]
    CHECK(record[3].shape == std::vector<int64_t>{tokens, 64});
    CHECK(store->sample_tokens(i).input_ids.size() == static_cast<size_t>(tokens));
  }

  const Scratch scratch;
  for (const char* name : {"rows_2000-4000/data_2000.ckpt", "rows_10000-12000/data_10000.ckpt",
                           "rows_2000-4000/data_2001.ckpt"}) {
    scratch.write(name, read_file(kTorchFolder / "data_1.ckpt"));
  }
  const auto sorted = FeatureStore::open(scratch.path(), kEagleNeeds);
  CHECK(sorted->record_name(0).ends_with("rows_10000-12000/data_10000.ckpt"));
  CHECK(sorted->record_name(1).ends_with("rows_2000-4000/data_2000.ckpt"));
  CHECK(sorted->record_name(2).ends_with("rows_2000-4000/data_2001.ckpt"));
}

TEST_CASE("feature store: our format gives back what was written, over all shards") {
  const Scratch scratch;
  write_store(scratch.path());
  FeatureNeeds needs = our_needs();
  needs.verify_checksums = true;
  const auto store = FeatureStore::open(scratch.path(), needs);
  REQUIRE(store->size() == 5);
  CHECK(store->target_fingerprint() == "0123456789abcdef");
  for (int64_t i = 0; i < 5; ++i) {
    CAPTURE(i);
    const auto record = store->record(i);
    REQUIRE(record.size() == 3);
    CHECK(record[2].shape == std::vector<int64_t>{i + 2, kWidth});
    CHECK(floats(record[2]) == make_features(i, i + 2));
    CHECK(store->sample_tokens(i).input_ids == make_samples(5)[static_cast<size_t>(i)].input_ids);
    CHECK(store->sample_tokens(i).loss_mask == make_samples(5)[static_cast<size_t>(i)].loss_mask);
  }
  CHECK(store->record_name(3) == (scratch.path() / "shard-2.safetensors").string() + ": record 1");
}

TEST_CASE("feature store: layers are served from a tensor that has more of them, in the order wanted, and the last state under any name") {
  const Scratch scratch;
  FeatureManifest manifest;
  manifest.target.set("fingerprint", "0123456789abcdef");
  manifest.features = {{.key = "hidden_states", .dtype = Dtype::kF32, .width = 8, .layer_ids = {1, 4, 6, 9}},
                       {.key = "target_last_hidden_states", .dtype = Dtype::kF32, .width = 2, .last_state = true}};
  const auto samples = make_samples(2);
  manifest.tokens_sha256 = tokens_fingerprint(samples);
  ShardWriter writer(scratch.path() / "shard-0.safetensors", manifest.features, samples, 0, manifest.recipe_fingerprint());
  for (int64_t i = 0; i < 2; ++i) {
    const auto tokens = static_cast<int64_t>(samples[static_cast<size_t>(i)].input_ids.size());
    std::vector<float> states, last;
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t c = 0; c < 8; ++c) states.push_back(static_cast<float>(100 * i + 10 * t + c));
      for (int64_t c = 0; c < 2; ++c) last.push_back(static_cast<float>(-100 * i - 10 * t - c));
    }
    writer.put(i, 0, std::as_bytes(std::span(states)));
    writer.put(i, 1, std::as_bytes(std::span(last)));
  }
  manifest.shards.push_back(writer.finish());
  atomic_write(scratch.path() / kManifestName, manifest.to_json().dump(2));

  const auto store = FeatureStore::open(scratch.path(), {.features = {{.key = "aux_hidden_state", .width = 6, .layer_ids = {9, 4, 6}},
                                                                      {.key = "hidden_state", .width = 2, .last_state = true}}});
  const std::vector<TensorView> record = store->record(1);
  const auto view = [&](const char* key) {
    for (const TensorView& one : record) {
      if (one.name == key) return one;
    }
    FAIL("no " << key);
    return record[0];
  };
  const std::vector<float> aux = floats(view("aux_hidden_state")), last = floats(view("hidden_state"));
  CHECK(view("aux_hidden_state").shape[1] == 6);
  CHECK(std::vector<float>(aux.begin(), aux.begin() + 6) == std::vector<float>{106, 107, 102, 103, 104, 105});
  CHECK(std::vector<float>(aux.begin() + 6, aux.begin() + 12) == std::vector<float>{116, 117, 112, 113, 114, 115});
  CHECK(std::vector<float>(last.begin(), last.begin() + 2) == std::vector<float>{-100, -101});
  CHECK(record.size() == 4);  // ids and mask, too, and nothing that was not asked for
  CHECK_THROWS_WITH_AS((void)FeatureStore::open(scratch.path(), {.features = {{.key = "hidden_states", .width = 4, .layer_ids = {1, 2}}}}),
                       doctest::Contains("layers [2] were not captured"), Error);
}

TEST_CASE("feature store: max_length keeps the head of every tensor") {
  const Scratch scratch;
  write_store(scratch.path());
  FeatureNeeds needs = our_needs();
  needs.max_length = 3;
  const auto record = FeatureStore::open(scratch.path(), needs)->record(4);
  CHECK(record[0].shape == std::vector<int64_t>{3});
  CHECK(record[1].shape == std::vector<int64_t>{3});
  CHECK(record[2].shape == std::vector<int64_t>{3, kWidth});
  CHECK(floats(record[2]) == make_features(4, 3));
}

TEST_CASE("feature store: a record that the capture refused is not there") {
  const Scratch scratch;
  write_store(scratch.path(), {.refused_sample = 2});
  const auto store = FeatureStore::open(scratch.path(), our_needs());
  REQUIRE(store->size() == 4);
  CHECK(floats(store->record(2)[2]) == make_features(3, 5));
}

TEST_CASE("feature store: a shard without records is passed over") {
  const Scratch scratch;
  FeatureManifest manifest = write_store(scratch.path());
  ShardWriter writer(scratch.path() / "shard-9.safetensors", manifest.features, {}, 5, manifest.recipe_fingerprint());
  manifest.shards.push_back(writer.finish());
  scratch.write(kManifestName, manifest.to_json().dump(2));
  CHECK(FeatureStore::open(scratch.path(), our_needs())->size() == 5);
}

TEST_CASE("feature store: the fingerprint follows the content") {
  const Scratch a;
  const Scratch b;
  const Scratch c;
  write_store(a.path());
  write_store(b.path());
  write_store(c.path(), {.samples = 4});
  const auto print = [](const Scratch& scratch) {
    return FeatureStore::open(scratch.path(), our_needs())->fingerprint();
  };
  CHECK(print(a) == print(b));
  CHECK(print(a) != print(c));
  CHECK(FeatureStore::open(kTorchFolder, kEagleNeeds)->fingerprint().size() == 64);
}

TEST_CASE("feature store: what is wrong with a folder is said when it is opened") {
  struct Row {
    const char* name;
    void (*spoil)(const Scratch&, FeatureNeeds&);
    const char* message;
  };
  const Row rows[] = {
      {"nothing there", [](const Scratch& s, FeatureNeeds&) { std::filesystem::remove_all(s.path()); },
       "there is no such folder of features"},
      {"empty folder",
       [](const Scratch& s, FeatureNeeds&) {
         std::filesystem::remove_all(s.path());
         std::filesystem::create_directory(s.path());
       },
       "there are no features in this folder: no manifest.json, no *.ckpt, no *.ckpt.gz"},
      {"not finished",
       [](const Scratch& s, FeatureNeeds&) {
         std::filesystem::rename(s.path() / "manifest.json", s.path() / "capture.json");
       },
       "the capture of these features was not finished"},
      {"shard missing",
       [](const Scratch& s, FeatureNeeds&) { std::filesystem::remove(s.path() / "shard-2.safetensors"); },
       "shard-2.safetensors: the manifest names it, but it is missing"},
      {"shard truncated",
       [](const Scratch& s, FeatureNeeds&) {
         std::filesystem::resize_file(s.path() / "shard-2.safetensors",
                                      std::filesystem::file_size(s.path() / "shard-2.safetensors") - 4);
       },
       "shard-2.safetensors: truncated: tensor 'hidden_states' ends at byte"},
      {"shard damaged",
       [](const Scratch& s, FeatureNeeds& needs) {
         std::string bytes = read_file(s.path() / "shard-2.safetensors");
         bytes[bytes.size() - 3] ^= 1;
         s.write("shard-2.safetensors", bytes);
         needs.verify_checksums = true;
       },
       "shard-2.safetensors: damaged: its SHA-256 is not the manifest's"},
      {"manifest edited",
       [](const Scratch& s, FeatureNeeds&) {
         std::string text = read_file(s.path() / "manifest.json");
         text.replace(text.find("0123456789abcdef"), 16, "ffffffffffffffff");
         s.write("manifest.json", text);
       },
       "manifest.json: damaged: its content does not have its fingerprint"},
      {"manifest cut",
       [](const Scratch& s, FeatureNeeds&) { s.write("manifest.json", "{\"format\": \"sf-fea"); },
       "manifest.json:1:"},
      {"manifest of something else",
       [](const Scratch& s, FeatureNeeds&) { s.write("manifest.json", "{}"); },
       "manifest.json: not a manifest of features: there is no \"format\": \"sf-features\" in it"},
      {"header of another type",
       [](const Scratch& s, FeatureNeeds&) {
         std::string bytes = read_file(s.path() / "shard-2.safetensors");
         bytes.replace(bytes.find("\"F32\""), 5, "\"I32\"");
         s.write("shard-2.safetensors", bytes);
       },
       "shard-2.safetensors: 'hidden_states' is I32, the manifest says F32"},
      {"header too large",
       [](const Scratch& s, FeatureNeeds&) {
         std::string bytes = read_file(s.path() / "shard-2.safetensors");
         bytes[6] = 1;
         s.write("shard-2.safetensors", bytes);
       },
       "shard-2.safetensors: not a safetensors file: its header would have"},
      {"record outside",
       [](const Scratch& s, FeatureNeeds&) {
         std::string bytes = read_file(s.path() / "shard-2.safetensors");
         const SafetensorsFile file = SafetensorsFile::open(s.path() / "shard-2.safetensors");
         const int64_t start = 1000;
         std::memcpy(bytes.data() + (bytes.size() - bytes_after(file, "record.start")), &start, sizeof(start));
         s.write("shard-2.safetensors", bytes);
       },
       "shard-2.safetensors: record 0 lies outside its 9 tokens"},
      {"sample twice in a shard",
       [](const Scratch& s, FeatureNeeds&) { write_number(s, "shard-2.safetensors", "record.sample", 1, 2); },
       "shard-2.safetensors: record 1 is sample 2, which record 0 of shard-2.safetensors is already"},
      {"sample in two shards",
       [](const Scratch& s, FeatureNeeds&) { write_number(s, "shard-2.safetensors", "record.sample", 0, 1); },
       "shard-2.safetensors: record 0 is sample 1, which record 1 of shard-0.safetensors is already"},
      {"fewer records than the manifest says",
       [](const Scratch& s, FeatureNeeds&) {
         FeatureManifest manifest = FeatureManifest::read(s.path() / kManifestName);
         manifest.shards[1].records += 1;  // with a fingerprint that is right
         s.write(kManifestName, manifest.to_json().dump(2));
       },
       "shard-2.safetensors: has 2 records, the manifest says 3"},
      {"a number of records that no sum of them holds",
       [](const Scratch& s, FeatureNeeds&) {
         Json manifest = Json::parse(read_file(s.path() / kManifestName));
         manifest.find("shards")->items()[1].set("records", std::numeric_limits<int64_t>::max());
         s.write(kManifestName, manifest.dump(2));
       },
       "manifest.json: \"records\" is 9223372036854775807, a number from 0 to 2^48 expected"},
      {"another target",
       [](const Scratch&, FeatureNeeds& needs) { needs.target_fingerprint = "fedcba98765432"; },
       "these features are of another target: its fingerprint is 0123456789ab, model.target_model_path has "
       "fedcba987654"},
      {"other layers",
       [](const Scratch&, FeatureNeeds& needs) {
         needs.features[0].layer_ids = {1, 5};
       },
       "the draft reads layers [1, 5] as 'hidden_states', and layers [5] were not captured; there are: 'hidden_states' (layers [1, 4])"},
      {"no last state",
       [](const Scratch&, FeatureNeeds& needs) {
         needs.features.push_back({.key = "hidden_state", .width = 3, .last_state = true});
       },
       "the target's last state, which the draft reads as 'hidden_state', was not captured; there are: 'hidden_states' (layers [1, 4])"},
      {"another key",
       [](const Scratch&, FeatureNeeds& needs) {
         needs.features[0].key = "aux_hidden_state";
         needs.features[0].layer_ids.clear();
       },
       "there is no feature 'aux_hidden_state'; there are: 'hidden_states' (layers [1, 4])"},
      {"wrong width", [](const Scratch&, FeatureNeeds& needs) { needs.features[0].width = 8; },
       "shard-0.safetensors: record 0: 'hidden_states' has shape [2, 6], [2, 8] expected (tokens, 2 layers x "
       "hidden_size 4)"},
      {"ids out of range", [](const Scratch&, FeatureNeeds& needs) { needs.vocab_size = 1; },
       "shard-0.safetensors: record 0: 'input_ids' has the token 1, but the target has the tokens 0 to 0"},
  };
  for (const Row& row : rows) {
    CAPTURE(row.name);
    const Scratch scratch;
    write_store(scratch.path());
    FeatureNeeds needs = our_needs();
    row.spoil(scratch, needs);
    std::string message = "no error";
    std::string hint;
    try {
      (void)FeatureStore::open(scratch.path(), needs);
    } catch (const Error& error) {
      CHECK(error.code() == ExitCode::kData);
      message = error.what();
      hint = error.hint();
    }
    CAPTURE(message);
    CHECK(message.find(row.message) != std::string::npos);
    CHECK_FALSE(hint.empty());
    CHECK(message.find("manifest.json") == message.rfind("manifest.json"));  // the place is named once
  }
}

TEST_CASE("feature store: a value that is not finite is named by file, record, key, token and column") {
  const Scratch scratch;
  write_store(scratch.path(), {.bad_sample = 3});
  const auto store = FeatureStore::open(scratch.path(), our_needs());
  CHECK(error_of([&] { (void)store->record(3); }, &scratch) ==
        "shard-2.safetensors: record 1: 'hidden_states' has a value that is not finite (NaN or infinity) at "
        "token 1, column 1");
  CHECK_NOTHROW((void)store->sample_tokens(3));  // tokens alone are fine
}

TEST_CASE("feature store: a loss mask of anything but 0 and 1 is refused by record and token") {
  const Scratch scratch;
  write_store(scratch.path(), {.mask_value = 7});
  CHECK(error_of([&] { (void)FeatureStore::open(scratch.path(), our_needs()); }, &scratch) ==
        "shard-0.safetensors: record 0: 'loss_mask' has the value 7 at token 1, 0 or 1 expected");
}

TEST_CASE("feature store: a folder that is not there, or empty, is explained with the very key that names it") {
  const Scratch empty;
  for (const char* key : {"data.hidden_states_path", "data.eval_hidden_states_path", "--features"}) {
    for (const std::filesystem::path& folder : {std::filesystem::path("/nowhere/features"), std::filesystem::path(empty.path())}) {
      FeatureNeeds needs = our_needs();
      needs.named_by = key;
      try {
        (void)FeatureStore::open(folder, needs);
        FAIL("opened");
      } catch (const Error& error) {
        CHECK(error.hint() == "let " + std::string(key) + " name a folder that sf-host capture made, or one with .ckpt files");
      }
    }
  }
}

TEST_CASE("feature store: faults of single records of the reference's files are named") {
  const auto store_with = [](FeatureNeeds needs) {
    return error_of([&] { (void)FeatureStore::open(kTorchFolder, needs); });
  };
  FeatureNeeds needs = kEagleNeeds;
  needs.features[0].key = "hidden_states";
  CHECK(
      store_with(needs).ends_with("data_0.ckpt: there is no key 'hidden_states'; there are: input_ids, "
                                  "loss_mask, hidden_state, aux_hidden_state"));
  needs = kEagleNeeds;
  needs.features[1].width = 32;
  CHECK(store_with(needs).ends_with(
      "data_0.ckpt: 'hidden_state' has shape [52, 64], [52, 32] expected (tokens, hidden_size)"));
  needs = kEagleNeeds;
  needs.vocab_size = 5;
  CHECK(store_with(needs).find("data_0.ckpt: 'input_ids' has the token ") != std::string::npos);
}

TEST_CASE("feature store: an optional feature is left out of records that do not have it") {
  const Scratch scratch;
  write_store(scratch.path());
  FeatureNeeds needs = our_needs();
  needs.features.push_back(
      {.key = "target_last_hidden_states", .width = 3, .optional = true, .last_state = true});
  CHECK(FeatureStore::open(scratch.path(), needs)->record(0).size() == 3);
}

TEST_CASE("feature shard: one that is not finished leaves nothing behind") {
  const Scratch scratch;
  const auto samples = make_samples(2);
  {
    ShardWriter writer(scratch.path() / "s.safetensors", {}, samples, 0, "x");
    CHECK(std::filesystem::exists(scratch.path() / "s.safetensors.part"));
  }
  CHECK(std::filesystem::is_empty(scratch.path()));
}

TEST_CASE("feature store: the first value that is not finite is found in every type") {
  const float values[] = {1, -std::numeric_limits<float>::max(), std::nanf(""), 2};
  CHECK(first_not_finite(Dtype::kF32, std::as_bytes(std::span(values))) == 2);
  CHECK(first_not_finite(Dtype::kF32, std::as_bytes(std::span(values)).first(8)) == -1);
  std::vector<uint16_t> halves(5000, 0x7f7f);  // the largest finite bfloat16
  CHECK(first_not_finite(Dtype::kBF16, std::as_bytes(std::span(halves))) == -1);
  halves[4321] = 0xff80;  // -infinity
  CHECK(first_not_finite(Dtype::kBF16, std::as_bytes(std::span(halves))) == 4321);
  const uint16_t f16[] = {0x7bff, 0xfc00};
  CHECK(first_not_finite(Dtype::kF16, std::as_bytes(std::span(f16))) == 1);
  const double doubles[] = {1e300, std::numeric_limits<double>::infinity()};
  CHECK(first_not_finite(Dtype::kF64, std::as_bytes(std::span(doubles))) == 1);
  const uint8_t e4m3[] = {0x7e, 0xff};
  CHECK(first_not_finite(Dtype::kF8E4M3, std::as_bytes(std::span(e4m3))) == 1);
  const uint8_t e5m2[] = {0x7b, 0x7c};
  CHECK(first_not_finite(Dtype::kF8E5M2, std::as_bytes(std::span(e5m2))) == 1);
}

TEST_CASE("feature folder: shards fill up to their limit and keep the order of samples") {
  const std::vector<FeatureTensor> features{
      {.key = "x", .dtype = Dtype::kBF16, .width = 8, .layer_ids = {0}}};
  const auto samples = make_samples(10);  // 2 to 11 tokens of 32 bytes, and 24 bytes for each record
  const auto plan = plan_shards(features, samples, 400);
  int64_t next = 0;
  for (const ShardPlan& shard : plan) {
    CHECK(shard.first_sample == next);
    next += shard.samples;
    CHECK((shard.bytes <= 400 || shard.samples == 1));
    CHECK(shard.bytes == shard_bytes(features, shard.samples, shard.tokens));
  }
  CHECK(next == 10);
  CHECK(plan.size() > 4);
  CHECK(plan[1].file == "shard-00001.safetensors");
  CHECK(plan_shards(features, samples, 1).size() == 10);
}

TEST_CASE("feature folder: a disk without room is refused before any work, with both numbers") {
  const Scratch scratch;
  FeatureManifest wanted;
  FeatureFolder folder(scratch.path() / "f", wanted,
                       {{"shard-00000.safetensors", 0, 1, 1, int64_t{1} << 60}});
  const std::string message = error_of([&] { folder.require_room(); }, &scratch);
  CHECK(message.starts_with("f: the features need "));
  CHECK(message.ends_with(" free"));
}

TEST_CASE("feature folder: two captures do not write to one folder") {
  const Scratch scratch;
  FeatureFolder first(scratch.path(), {}, {});
  CHECK(error_of([&] {
          FeatureFolder second(scratch.path(), {}, {});
        }).ends_with(": another capture is writing to this folder"));
}

TEST_CASE("feature shard: a disk that fills up ends with exit code 4, and what was finished stays whole") {
  // A child with a limit on the size of files stands for a full disk: writing beyond it fails in the same
  // calls.
  const Scratch scratch;
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGXFSZ, SIG_IGN);
    int code = 0;
    try {
      const auto samples = make_samples(40);
      FeatureManifest wanted;
      wanted.features = {{.key = "x", .dtype = Dtype::kF32, .width = kWidth, .layer_ids = {0}}};
      FeatureFolder folder(scratch.path() / "f", wanted, plan_shards(wanted.features, samples, 4000));
      for (size_t i = 0; i < folder.plan().size(); ++i) {
        if (i == 2) {
          const rlimit limit{1000, RLIM_INFINITY};
          setrlimit(RLIMIT_FSIZE, &limit);
        }
        const ShardPlan& shard = folder.plan()[i];
        ShardWriter writer(folder.shard_path(i), wanted.features,
                           std::span(samples).subspan(static_cast<size_t>(shard.first_sample),
                                                      static_cast<size_t>(shard.samples)),
                           shard.first_sample, "x");
        folder.add(i, writer.finish());
      }
    } catch (const Error& error) {
      code = static_cast<int>(error.code());
    } catch (...) {
      code = 99;
    }
    _exit(code);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WEXITSTATUS(status) == 4);
  const FeatureManifest left = FeatureManifest::read(scratch.path() / "f" / "capture.json");
  CHECK(left.shards.size() == 2);
  for (const FeatureShard& shard : left.shards)
    CHECK(sha256_file(scratch.path() / "f" / shard.file) == shard.sha256);
  CHECK_FALSE(std::filesystem::exists(scratch.path() / "f" / "shard-00002.safetensors"));
  CHECK_FALSE(std::filesystem::exists(scratch.path() / "f" / "shard-00002.safetensors.part"));
}
