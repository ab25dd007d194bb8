// Batches and windows: what a step sees, whatever reads ahead of it.
#include "core/train/loader.hpp"

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include <set>

#include "core/train/batch.hpp"
#include "sf/error.hpp"

namespace {

// Reads one token feature and leaves one slot field with as many entries as the sample has supervised tokens.
struct FakeAlgorithm final : sf::Algorithm {
  sf::Description describe(const sf::ModelFacts&) override {
    sf::Description description;
    description.reads = {{.name = "input_ids"}, {.name = "hidden_states", .columns = 2}};
    description.fields = {{.name = "anchors", .axis = sf::Axis::slots, .pad_value = -1}, {.name = "weight", .axis = sf::Axis::none, .pad_value = 0}};
    description.slots = 6;
    return description;
  }
  sf::Unit& unit(int64_t) override { throw std::logic_error("no units"); }
  void bind(const sf::TargetTables&, sf::Ops&) override {}
  std::string prepare(sf::Sample& sample, const sf::SampleContext& context) override {
    if (sample.index % 5 == 4) {
      return "no two consecutive supervised tokens";
    }
    const int64_t count = sample.index % 3 + 1;
    std::vector<int64_t> draws;
    for (const uint64_t bits : context.draw("anchors", count)) {
      draws.push_back(static_cast<int64_t>(bits % 1000));
    }
    sample.tensors["anchors"] = at::tensor(draws, at::kLong);
    sample.tensors["weight"] = at::full({}, 1.0f);
    return "";
  }
  void finish(sf::Batch& batch) override { batch.tensors["rows"] = at::arange(batch.rows); }
  double weigh(const sf::Batch& batch) const override { return batch.at("weight").sum().item<double>(); }
  void micro_step(sf::Runner&, const sf::Batch&) override {}
  sf::ExportSpec export_spec() const override { return {}; }
};

sf::SampleSource source(int64_t size) {
  return {.size = size, .read = [](int64_t index) {
            sf::Sample sample;
            sample.index = index;
            sample.tokens = 3 + index % 4;
            sample.tensors["input_ids"] = at::full({sample.tokens}, index + 1, at::kLong);
            sample.tensors["hidden_states"] = at::full({sample.tokens, 2}, static_cast<double>(index));
            return sample;
          }};
}

sf::Batch batch_of(const std::vector<int64_t>& indices, const sf::BatchShape& shape) {
  static FakeAlgorithm algorithm;
  const sf::BatchFields fields(algorithm.describe({}), sf::find_prototype(source(20), algorithm, 1, false));
  std::vector<std::optional<sf::Sample>> rows;
  sf::Unusable unusable;
  for (const int64_t index : indices) {
    rows.push_back(index < 0 ? std::nullopt
                             : sf::read_prepared(source(20), algorithm, index, sf::sample_context(1, 0, index, false), unusable));
  }
  return fields.stack(rows, shape);
}

std::vector<sf::Window> windows(sf::WindowLoader::Options options, int64_t size = 7) {
  FakeAlgorithm algorithm;
  const sf::BatchFields fields(algorithm.describe({}), sf::find_prototype(source(size), algorithm, options.seed, false));
  const int64_t count = options.last_window - options.first_window;
  sf::WindowLoader loader(source(size), algorithm, fields, std::move(options));
  std::vector<sf::Window> all;
  for (int64_t i = 0; i < count; ++i) {
    all.push_back(loader.next());
  }
  return all;
}

}  // namespace

TEST_CASE("batch: rows are padded to the longest, dead rows are all padding") {
  const sf::Batch batch = batch_of({2, -1, 1}, {.max_tokens = 16});
  CHECK(batch.tokens == 5);
  CHECK(batch.slots == 3);
  CHECK(batch.sample_indices == std::vector<int64_t>{2, -1, 1});
  CHECK(batch.at("input_ids").sizes() == at::IntArrayRef({3, 5}));
  CHECK(batch.at("hidden_states").sizes() == at::IntArrayRef({3, 5, 2}));
  CHECK(batch.at("input_ids")[1].eq(0).all().item<bool>());
  CHECK(batch.at("anchors")[1].eq(-1).all().item<bool>());
  CHECK(batch.at("input_ids")[2][4].item<int64_t>() == 0);
  CHECK(batch.at("anchors")[2][2].item<int64_t>() == -1);
  CHECK(batch.at("weight").sizes() == at::IntArrayRef({3}));
}

TEST_CASE("batch: static shapes take the smallest bucket that holds the longest sample, and all slots") {
  const sf::BatchShape shape{.max_tokens = 12, .is_static = true, .buckets = {4, 8}};
  CHECK(batch_of({0, 1}, shape).tokens == 4);
  CHECK(batch_of({0, 2}, shape).tokens == 8);
  CHECK(batch_of({0, 2}, shape).slots == 6);
  CHECK_THROWS_AS((void)shape.padded_tokens(13), sf::Error);
  CHECK(sf::BatchShape{.max_tokens = 12, .is_static = true}.padded_tokens(3) == 12);
  CHECK(shape.padded_tokens(4) == 4);
  CHECK(shape.padded_tokens(9) == 12);
}

TEST_CASE("batch: the lengths that a static batch can have are the buckets and the maximal length, once") {
  using Lengths = std::vector<int64_t>;
  CHECK(sf::BatchShape{.max_tokens = 12, .is_static = true, .buckets = {4, 8}}.lengths() == Lengths{4, 8, 12});
  CHECK(sf::BatchShape{.max_tokens = 12, .is_static = true, .buckets = {4, 12}}.lengths() == Lengths{4, 12});
  CHECK(sf::BatchShape{.max_tokens = 12, .is_static = true}.lengths() == Lengths{12});
  CHECK(sf::BatchShape{.max_tokens = 12}.lengths().empty());
  CHECK(sf::BatchShape{.max_tokens = 12}.padded_tokens(7) == 7);
}

TEST_CASE("batch: a sample longer than the largest static length is refused with both lengths") {
  const sf::BatchShape shape{.max_tokens = 4, .is_static = true};
  CHECK_THROWS_WITH_AS((void)batch_of({2}, shape), "a sample of 5 tokens is longer than the largest static length, 4", sf::Error);
}

TEST_CASE("batch: an optional feature is in all samples or in none") {
  static FakeAlgorithm algorithm;
  sf::Description description = algorithm.describe({});
  description.reads.push_back({.name = "last_state", .columns = 1, .optional = true, .last_state = true});
  const auto sample = [&](int64_t index, bool has) {
    sf::Sample made = source(20).read(index);
    (void)algorithm.prepare(made, sf::sample_context(1, 0, index, false));
    if (has) {
      made.tensors["last_state"] = at::ones({made.tokens, 1});
    }
    return made;
  };
  const sf::BatchShape shape{.max_tokens = 16};
  const sf::BatchFields with(description, sample(0, true)), without(description, sample(0, false));
  CHECK(with.stack({sample(1, true), std::nullopt}, shape).at("last_state").sizes() == at::IntArrayRef({2, 4, 1}));
  CHECK(without.stack({sample(1, false)}, shape).tensors.count("last_state") == 0);
  CHECK_THROWS_WITH_AS((void)with.stack({sample(1, false)}, shape), "sample 1 lacks the optional feature 'last_state', but sample 0 has it", sf::Error);
  CHECK_THROWS_WITH_AS((void)without.stack({sample(1, true)}, shape), "sample 1 has the optional feature 'last_state', but sample 0 does not",
                       sf::Error);
}

TEST_CASE("batch: an all-dead batch has a usual shape") {
  const sf::Batch batch = batch_of({-1, -1}, {.max_tokens = 16});
  CHECK(batch.tokens >= 1);
  CHECK(batch.slots >= 1);
  CHECK(batch.at("hidden_states").abs().sum().item<double>() == 0);
}

TEST_CASE("windows: a run that starts later sees the same windows") {
  const sf::WindowLoader::Options all{.seed = 9, .window = {.ranks = 1, .accumulation_steps = 2, .batch_size = 2}, .epochs = 3, .batch = {.max_tokens = 16}, .first_window = 0, .last_window = 5};
  sf::WindowLoader::Options late = all;
  late.first_window = 3;
  late.first_position = 3 * late.window.entries();
  const auto whole = windows(all);
  const auto rest = windows(late);
  for (size_t i = 0; i < rest.size(); ++i) {
    for (size_t m = 0; m < 2; ++m) {
      CHECK(rest[i].batches[m].sample_indices == whole[i + 3].batches[m].sample_indices);
      CHECK(at::equal(rest[i].batches[m].at("anchors"), whole[i + 3].batches[m].at("anchors")));
    }
  }
}

TEST_CASE("windows: what a sample draws does not depend on batch size, accumulation or its neighbours") {
  const auto draws = [](int64_t accumulation, int64_t batch) {
    std::map<std::pair<int64_t, int64_t>, std::string> found;  // (epoch by count of sightings, sample) -> draws
    std::map<int64_t, int64_t> seen;
    const int64_t count = 14 / (accumulation * batch);
    for (const sf::Window& window : windows({.seed = 3, .window = {.ranks = 1, .accumulation_steps = accumulation, .batch_size = batch}, .epochs = 2, .batch = {.max_tokens = 16}, .first_window = 0, .last_window = count})) {
      for (const sf::Batch& one : window.batches) {
        for (int64_t row = 0; row < one.rows; ++row) {
          const int64_t sample = one.sample_indices[static_cast<size_t>(row)];
          if (sample >= 0) {
            std::string text;
            for (int64_t slot = 0; slot < sample % 3 + 1; ++slot) {
              text += std::to_string(one.at("anchors")[row][slot].item<int64_t>()) + " ";
            }
            found[{seen[sample]++, sample}] = text;
          }
        }
      }
    }
    return found;
  };
  const auto one = draws(1, 1);
  CHECK(one.size() == 12);  // 7 samples, one unusable, two epochs
  CHECK(draws(1, 7) == one);
  CHECK(draws(7, 1) == one);
}

TEST_CASE("windows: the last window of the stream is short, and an unusable sample is a dead row") {
  const auto all = windows({.seed = 3, .window = {.ranks = 1, .accumulation_steps = 1, .batch_size = 5}, .epochs = 1, .batch = {.max_tokens = 16}, .first_window = 0, .last_window = 2});
  std::multiset<int64_t> seen;
  for (const sf::Window& window : all) {
    for (const int64_t sample : window.batches[0].sample_indices) {
      seen.insert(sample);
    }
    CHECK(window.denominators[0] == static_cast<double>(window.samples));
  }
  CHECK(seen.count(-1) == 4);  // 3 places past the end, and sample 4
  for (const int64_t sample : {0, 1, 2, 3, 5, 6}) {
    CHECK(seen.count(sample) == 1);
  }
}

TEST_CASE("windows: when no sample can be used the error gives the reason") {
  FakeAlgorithm algorithm;
  sf::SampleSource bad = source(3);
  const auto read = bad.read;
  bad.read = [read](int64_t) { return read(4); };
  CHECK_THROWS_WITH_AS((void)sf::find_prototype(bad, algorithm, 1, false), doctest::Contains("none of the 3 samples"), sf::Error);
}

TEST_CASE("windows: an error while reading reaches the training thread") {
  FakeAlgorithm algorithm;
  sf::SampleSource bad = source(7);
  const auto read = bad.read;
  bad.read = [read](int64_t index) -> sf::Sample {
    if (index == 5) {
      throw sf::Error(sf::ExitCode::kData, "data_5.ckpt is truncated");
    }
    return read(index);
  };
  const sf::BatchFields fields(algorithm.describe({}), sf::find_prototype(bad, algorithm, 1, false));
  sf::WindowLoader loader(bad, algorithm, fields, {.seed = 1, .window = {}, .epochs = 1, .batch = {.max_tokens = 16}, .first_window = 0, .last_window = 7});
  CHECK_THROWS_WITH_AS(
      [&] {
        for (int i = 0; i < 7; ++i) {
          (void)loader.next();
        }
      }(),
      "data_5.ckpt is truncated", sf::Error);
}
