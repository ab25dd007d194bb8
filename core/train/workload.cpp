#include "core/train/workload.hpp"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <span>

#include "core/base/log.hpp"
#include "core/data/feature_format.hpp"
#include "core/data/feature_folder.hpp"

namespace sf {
namespace {

at::Generator generator_for(uint64_t seed, uint64_t index) {
  return at::detail::createCPUGenerator(seed * 1000003 + index + 1);
}

int64_t draw(at::Generator& generator, int64_t low, int64_t high) {
  return at::randint(low, high, {}, generator, at::kLong).item<int64_t>();
}

TokenSample random_tokens(const Workload& workload, int64_t index) {
  at::Generator generator = generator_for(workload.seed, static_cast<uint64_t>(2 * index));
  const int64_t shortest = std::min(workload.tokens, std::max<int64_t>(32, workload.tokens / 4));
  const int64_t length = workload.variable_length ? draw(generator, shortest, workload.tokens + 1) : workload.tokens;
  const int64_t prompt = workload.variable_mask ? draw(generator, length / 5, length * 4 / 5) : 0;
  const at::Tensor ids = at::randint(0, workload.vocab, {length}, generator, at::kLong);
  TokenSample sample;
  sample.input_ids.assign(ids.const_data_ptr<int64_t>(), ids.const_data_ptr<int64_t>() + length);
  sample.loss_mask.assign(static_cast<size_t>(length), 1);
  std::fill(sample.loss_mask.begin(), sample.loss_mask.begin() + prompt, 0);
  return sample;
}

/// [rows, columns] normal values in `dtype` on the CPU. Every stretch of 2^18 values has a generator of its own, so that all threads draw and the
/// values do not depend on how many there are.
at::Tensor random_matrix(int64_t rows, int64_t columns, double deviation, at::ScalarType dtype, uint64_t seed, uint64_t index) {
  constexpr int64_t kStretch = 1 << 18;
  const at::Tensor matrix_rc = at::empty({rows, columns}, dtype);
  const at::Tensor flat_n = matrix_rc.view({-1});
  const int64_t stretches = (flat_n.numel() + kStretch - 1) / kStretch;
  const uint64_t own = seed * 1000003 + index + 1;
  at::parallel_for(0, stretches, 1, [&](int64_t begin, int64_t end) {
    for (int64_t stretch = begin; stretch < end; ++stretch) {
      at::Generator generator = generator_for(own, static_cast<uint64_t>(stretch));
      const int64_t first = stretch * kStretch;
      flat_n.narrow(0, first, std::min(kStretch, flat_n.numel() - first)).normal_(0.0, deviation, generator);
    }
  });
  return matrix_rc;
}

at::Tensor random_feature(const Workload& workload, int64_t index, size_t feature, int64_t length, int64_t columns) {
  return random_matrix(length, columns, 1.0, at::kBFloat16, workload.seed + 1 + feature, static_cast<uint64_t>(2 * index + 1));
}

}  // namespace

std::string Workload::text() const {
  return format("{} samples of {} tokens, length {}, mask {}, vocabulary {}, hidden {}, seed {}", samples, tokens,
                variable_length ? "variable" : "fixed", variable_mask ? "variable" : "fixed", vocab, hidden, seed);
}

TargetTables random_tables(const Description& description, const Workload& workload, at::ScalarType dtype, at::Device device) {
  const auto table = [&](uint64_t index) {
    return random_matrix(workload.vocab, workload.hidden, 0.02, dtype, workload.seed, 1'000'000 + index).to(device);
  };
  TargetTables tables;
  if (description.needs_embedding) {
    tables.embedding_vh = table(0);
  }
  if (description.needs_head) {
    tables.head_vh = table(1);
  }
  return tables;
}

SampleSource random_samples(const Description& description, const Workload& workload) {
  return {.size = workload.samples, .read = [&description, workload](int64_t index) {
            const TokenSample tokens = random_tokens(workload, index);
            Sample sample;
            sample.index = index;
            sample.tokens = static_cast<int64_t>(tokens.input_ids.size());
            sample.tensors["input_ids"] = at::tensor(tokens.input_ids, at::kLong);
            sample.tensors["loss_mask"] = at::tensor(std::vector<int64_t>(tokens.loss_mask.begin(), tokens.loss_mask.end()), at::kLong);
            for (size_t i = 0; i < description.reads.size(); ++i) {
              const FeatureRead& read = description.reads[i];
              if (read.columns > 0 && !read.optional) {
                sample.tensors[read.name] = random_feature(workload, index, i, sample.tokens, read.columns);
              }
            }
            return sample;
          }};
}

void write_random_features(const std::filesystem::path& folder, const Description& description, const Workload& workload) {
  FeatureManifest wanted;
  wanted.target.set("fingerprint", kRandomTarget).set("vocab_size", workload.vocab).set("hidden_size", workload.hidden);
  wanted.target.set("workload", workload.text());
  std::vector<size_t> reads;
  for (size_t i = 0; i < description.reads.size(); ++i) {
    const FeatureRead& read = description.reads[i];
    if (read.columns > 0 && !read.optional) {
      wanted.features.push_back({.key = read.name, .width = read.columns, .layer_ids = read.layer_ids, .last_state = read.last_state});
      reads.push_back(i);
    }
  }
  std::vector<TokenSample> tokens;
  for (int64_t index = 0; index < workload.samples; ++index) {
    tokens.push_back(random_tokens(workload, index));
  }
  wanted.tokens_sha256 = tokens_fingerprint(tokens);
  wanted.max_length = workload.tokens;
  const std::vector<FeatureTensor> features = wanted.features;
  const std::string recipe = wanted.recipe_fingerprint();
  FeatureFolder files(folder, std::move(wanted), plan_shards(features, tokens, 512ll << 20));
  files.require_room();
  for (size_t shard = 0; shard < files.plan().size(); ++shard) {
    if (files.has(shard)) {
      continue;
    }
    const ShardPlan& plan = files.plan()[shard];
    ShardWriter writer(files.shard_path(shard), features,
                       std::span(tokens).subspan(static_cast<size_t>(plan.first_sample), static_cast<size_t>(plan.samples)),
                       plan.first_sample, recipe);
    for (int64_t record = 0; record < plan.samples; ++record) {
      const int64_t index = plan.first_sample + record;
      const auto length = static_cast<int64_t>(tokens[static_cast<size_t>(index)].input_ids.size());
      for (size_t k = 0; k < reads.size(); ++k) {
        const at::Tensor feature = random_feature(workload, index, reads[k], length, features[k].width);
        writer.put(record, k, {static_cast<const std::byte*>(feature.const_data_ptr()), feature.nbytes()});
      }
    }
    files.add(shard, writer.finish());
    log_info("random features: {} of {} samples", plan.first_sample + plan.samples, workload.samples);
  }
  if (!files.was_finished()) {
    (void)files.finish();
  }
}

}  // namespace sf
