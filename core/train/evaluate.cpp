#include "core/train/evaluate.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "core/base/error.hpp"
#include "core/plan/plan.hpp"
#include "core/train/soundness.hpp"

namespace sf {
namespace {

/// Adds a metric's ratio, or a count as it is, under its name; a vector metric becomes position_1/NAME, position_2/NAME ...
void report(const std::string& name, const MetricSum& sum, std::map<std::string, double>& out) {
  const at::Tensor ratio = (sum.denominator.defined() ? sum.numerator / sum.denominator.clamp_min(1e-12) : sum.numerator).cpu();
  if (ratio.dim() == 0) {
    out[name] = ratio.item<double>();
    return;
  }
  for (int64_t position = 0; position < ratio.size(0); ++position) {
    out["position_" + std::to_string(position + 1) + "/" + name] = ratio[position].item<double>();
  }
}

// Ranks stop together: now and then they ask each other.
bool wants_to_stop(const Session& session, int64_t round) {
  constexpr int64_t kRounds = 8;
  const bool here = session.context->stop_requested && session.context->stop_requested();
  if (session.placement.comm == nullptr) {
    return here;
  }
  if (round % kRounds != 0) {
    return false;
  }
  const at::Tensor anywhere = at::full({1}, here ? 1 : 0, at::TensorOptions().dtype(at::kLong).device(session.placement.device));
  session.placement.comm->all_reduce(anywhere, Reduction::max, "stop")->wait();
  return anywhere.item<int64_t>() > 0;
}

}  // namespace

bool are_weights_sound(const Session& session) {
  constexpr double kMostNorm = 1e18;  // float32 holds the square
  std::vector<at::Tensor> norms;
  for (const Shard& shard : session.sharding->shards()) {
    if (shard.local.defined() && shard.local.numel() > 0) {
      norms.push_back(at::linalg_vector_norm(shard.local.detach(), 2, at::OptionalIntArrayRef(), false, at::kFloat));
    }
  }
  // No NaN is below anything. One read, however many shards there are.
  const at::Tensor unsound = norms.empty() ? at::zeros({1}, at::TensorOptions().dtype(at::kLong).device(session.placement.device))
                                           : at::stack(norms).lt(kMostNorm).all().logical_not().to(at::kLong).view({1});
  if (session.placement.comm != nullptr) {
    session.placement.comm->all_reduce(unsound, Reduction::max, "weights that are not finite")->wait();
  }
  return unsound.item<int64_t>() == 0;
}

std::map<std::string, double> ratios(const std::map<std::string, MetricSum>& metrics) {
  std::map<std::string, double> out;
  for (const auto& [name, sum] : metrics) {
    report(name, sum, out);
  }
  return out;
}

Json Evaluation::to_json() const {
  Json json = Json::object();
  json.set("loss", loss);
  json.set("acceptance_length", acceptance_length);
  json.set("samples", samples);
  json.set("unusable_samples", unusable);
  json.set("seconds", seconds);
  Json all = Json::object();
  for (const auto& [name, value] : metrics) {
    all.set(name, value);
  }
  json.set("metrics", std::move(all));
  return json;
}

std::optional<Evaluation> evaluate(Session& session, const SampleSource& source, const StepInfo& step, int64_t max_samples) {
  const auto start = std::chrono::steady_clock::now();
  const int64_t count = max_samples > 0 ? std::min(max_samples, source.size) : source.size;
  const int64_t rows = session.plan->get<int64_t>("training.batch_size");
  const BatchFields fields(session.description, find_prototype(source, *session.algorithm, session.seed, /*evaluating=*/true));
  BatchShape shape = session.batch_shape;
  shape.is_static = false;  // every position that may start a block is wanted, more than the static slots hold

  Evaluation result;
  Unusable unusable;
  double denominator = 0;
  StepInfo info = step;
  info.wants_details = true;
  session.runner->begin_evaluation(info);
  Comm* comm = session.placement.comm;
  const int64_t round_rows = rows * session.rank_count();  // every rank runs every round, the last ones perhaps with dead batches
  int64_t round = 0;
  for (int64_t first = 0; first < count; first += round_rows, ++round) {
    if (wants_to_stop(session, round)) {
      session.runner->end_evaluation();
      return std::nullopt;
    }
    const int64_t begin = first + session.rank() * rows;
    std::vector<std::optional<Sample>> batch_rows;
    for (int64_t index = begin; index < begin + rows; ++index) {
      std::optional<Sample> sample;
      if (index < count) {
        sample = read_prepared(source, *session.algorithm, index, sample_context(session.seed, 0, index, true), unusable);
      }
      result.samples += sample ? 1 : 0;
      batch_rows.push_back(std::move(sample));
    }
    Batch batch = fields.stack(batch_rows, shape);
    session.algorithm->finish(batch);
    denominator += session.algorithm->weigh(batch);
    session.runner->begin_micro_step();
    session.algorithm->micro_step(*session.runner, to_device(batch, session.description, session.placement.device, session.placement.dtype));
  }
  session.runner->end_evaluation();
  if (comm != nullptr) {
    session.runner->pool_sums(*comm);
    const at::Tensor counts = at::tensor({denominator, static_cast<double>(result.samples), static_cast<double>(unusable.count)},
                                         at::TensorOptions().dtype(at::kDouble)).to(session.placement.device);
    comm->all_reduce(counts, Reduction::sum, "evaluation")->wait();
    const at::Tensor pooled = counts.cpu();
    denominator = pooled[0].item<double>();
    result.samples = pooled[1].item<int64_t>();
    unusable.count = pooled[2].item<int64_t>();
  }
  if (denominator == 0) {  // 0 / 0 would read like a loss of nothing
    throw Error(ExitCode::kData, format("none of the {} held-out samples that are looked at can be used{}", count,
                                        unusable.reasons.empty() ? "" : "; the first: " + unusable.reasons.begin()->second),
                max_samples > 0 ? "raise training.eval_max_samples, or check the loss masks of the first samples: supervised tokens have to lie within data.max_length"
                                : "check the loss masks: supervised tokens have to lie within data.max_length");
  }
  result.unusable = unusable.count;
  result.loss = session.runner->loss_sum().item<double>() / std::max(denominator, 1e-12);
  if (!std::isfinite(result.loss)) {
    if (!are_weights_sound(session)) {
      throw LossNotFinite(ExitCode::kUsage, format("the held-out loss is {}, and the draft's weights are not finite or far too large: the run that made them has diverged", result.loss),
                          "take an earlier checkpoint, or train anew with a lower training.learning_rate or a longer training.warmup_ratio");
    }
    throw LossNotFinite(ExitCode::kData, format("the held-out loss is {}, with weights that are finite: the target's tables or the features hold numbers that are not, or the draft's states grow beyond their type", result.loss),
                        "sf-host doctor looks through target and features; if they are right, the run has diverged: take an earlier checkpoint, or a lower training.learning_rate");
  }
  result.metrics = ratios(session.runner->metrics());
  session.algorithm->derive_metrics(result.metrics);
  const auto found = result.metrics.find("acceptance_length");
  SF_CHECK(found != result.metrics.end(), "the algorithm reports no acceptance_length");
  result.acceptance_length = found->second;
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

BigramBaseline::BigramBaseline(const FeatureStore& training) {
  std::unordered_map<int64_t, std::unordered_map<int64_t, int64_t>> counts;
  for (int64_t i = 0; i < training.size(); ++i) {
    const auto tokens = training.sample_tokens(i);
    for (size_t t = 0; t + 1 < tokens.input_ids.size(); ++t) {
      ++counts[tokens.input_ids[t]][tokens.input_ids[t + 1]];
    }
  }
  for (const auto& [token, followers] : counts) {
    int64_t best = -1, best_count = 0;
    for (const auto& [follower, count] : followers) {
      if (count > best_count || (count == best_count && follower < best)) {
        best = follower;
        best_count = count;
      }
    }
    next_.emplace(token, best);
  }
}

double BigramBaseline::acceptance_length(const FeatureStore& held_out, int64_t block_size, int64_t max_tokens, int64_t max_samples) const {
  int64_t starts = 0, hits = 0;
  const int64_t samples = max_samples > 0 ? std::min(max_samples, held_out.size()) : held_out.size();
  for (int64_t i = 0; i < samples; ++i) {
    const auto tokens = held_out.sample_tokens(i);
    const int64_t length = std::min<int64_t>(max_tokens, static_cast<int64_t>(tokens.input_ids.size()));
    const auto supervised = [&](int64_t t) { return t < length && tokens.loss_mask[static_cast<size_t>(t)] > 0; };
    for (int64_t anchor = 0; anchor + 1 < length; ++anchor) {
      if (!supervised(anchor) || !supervised(anchor + 1)) {
        continue;
      }
      ++starts;
      for (int64_t t = anchor + 1; t < anchor + block_size && supervised(t); ++t) {
        const auto guess = next_.find(tokens.input_ids[static_cast<size_t>(t - 1)]);
        if (guess == next_.end() || guess->second != tokens.input_ids[static_cast<size_t>(t)]) {
          break;
        }
        ++hits;
      }
    }
  }
  return starts == 0 ? 0.0 : 1.0 + static_cast<double>(hits) / static_cast<double>(starts);
}

}  // namespace sf
