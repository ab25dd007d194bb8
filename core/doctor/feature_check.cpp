#include "core/doctor/feature_check.hpp"

#include "core/base/error.hpp"
#include "core/data/feature_format.hpp"
#include "core/data/feature_store.hpp"
#include "core/data/inspect.hpp"
#include "core/data/target_config.hpp"
#include "core/data/tokens.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>

namespace sf {

namespace {

constexpr int kOffsets[] = {-1, 0, 1, 2, 3};  // of the token that a state is compared with; 1 is right
constexpr double kWins = 0.75;                // measured: 0.96 for right features, at most 0.76 for shifted ones, 0.5 for strange ones
constexpr double kMargin = 0.05;              // by which the right offset must lead
constexpr std::size_t kRivals = 48;           // other tokens of the same text that each state is asked about
constexpr double kNormTolerance = 0.1;        // mean square behind an RMS norm is 1 by definition; bfloat16 costs 0.001

// A row of a stored matrix as float.
void read_row(const TensorView& view, int64_t row, std::vector<float>& out) {
  const auto width = static_cast<std::size_t>(view.shape.at(1));
  const auto size = static_cast<std::size_t>(bytes_of(view.dtype));
  const std::byte* from = view.bytes.data() + static_cast<std::size_t>(row) * width * size;
  out.resize(width);
  for (std::size_t i = 0; i < width; ++i) {
    std::uint32_t bits = 0;
    switch (view.dtype) {
      case Dtype::kF32:
        std::memcpy(&out[i], from + 4 * i, 4);
        break;
      case Dtype::kBF16: {
        std::uint16_t half;
        std::memcpy(&half, from + 2 * i, 2);
        bits = static_cast<std::uint32_t>(half) << 16;
        std::memcpy(&out[i], &bits, 4);
        break;
      }
      case Dtype::kF16: {
        std::uint16_t half;
        std::memcpy(&half, from + 2 * i, 2);
        const int exponent = (half >> 10) & 31;
        const double fraction = half & 1023;
        const double value = exponent == 0 ? std::ldexp(fraction, -24) : exponent == 31 ? std::numeric_limits<double>::infinity() : std::ldexp(1024 + fraction, exponent - 25);
        out[i] = static_cast<float>((half & 0x8000) != 0 ? -value : value);
        break;
      }
      default:
        throw Error(ExitCode::kData, format("'{}' is {}: BF16, F16 or F32 expected", view.name, dtype_name(view.dtype)));
    }
  }
}

double dot(const float* a, const float* b, std::size_t count) {
  float sums[8] = {};
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (std::size_t k = 0; k < 8; ++k) sums[k] += a[i + k] * b[i + k];
  }
  double sum = 0;
  for (const float part : sums) sum += part;
  for (; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

// One place of the text: what was stored there, and the tokens around it.
struct Place {
  std::vector<float> last;                 // behind the final norm; empty when it is not stored
  std::vector<std::vector<float>> layers;  // in the order of the manifest
  int64_t tokens[std::size(kOffsets)] = {};
};

struct Sample {
  std::vector<Place> places;
  std::vector<int64_t> layer_ids;
  int64_t records = 0;
};

FeatureNeeds needs_of(const FeatureCheckRequest& request, const TargetConfig& config, const FeatureManifest& manifest) {
  FeatureNeeds needs{.vocab_size = config.vocab_size, .max_length = request.max_length};
  for (const FeatureTensor& feature : manifest.features) {
    needs.features.push_back({.key = feature.key, .width = feature.width, .layer_ids = feature.layer_ids, .last_state = feature.last_state});
  }
  return needs;
}

Sample take_places(const FeatureCheckRequest& request, const FeatureStore& store, const FeatureManifest& manifest, int64_t hidden) {
  Sample sample;
  sample.records = store.size();
  for (const FeatureTensor& feature : manifest.features) {
    sample.layer_ids.insert(sample.layer_ids.end(), feature.layer_ids.begin(), feature.layer_ids.end());
  }
  std::mt19937_64 random(17);  // the same places every time
  const int64_t records = std::min<int64_t>(store.size(), 64);
  const int64_t from_each = (request.places + records - 1) / records;
  for (int64_t i = 0; i < records; ++i) {
    const int64_t index = i * store.size() / records;
    const std::vector<TensorView> views = store.record(index);
    const std::vector<int64_t> ids = store.sample_tokens(index).input_ids;
    const auto length = static_cast<int64_t>(ids.size());
    if (length < 6) continue;
    for (int64_t n = 0; n < from_each; ++n) {
      const int64_t t = 1 + static_cast<int64_t>(random() % static_cast<std::uint64_t>(length - 4));
      Place& place = sample.places.emplace_back();
      for (std::size_t k = 0; k < std::size(kOffsets); ++k) place.tokens[k] = ids[static_cast<std::size_t>(t + kOffsets[k])];
      for (const FeatureTensor& feature : manifest.features) {
        const auto view = std::find_if(views.begin(), views.end(), [&](const TensorView& one) { return one.name == feature.key; });
        std::vector<float> row;
        read_row(*view, t, row);
        if (feature.last_state) {
          place.last = std::move(row);
          continue;
        }
        for (std::size_t layer = 0; layer < feature.layer_ids.size(); ++layer) {
          const auto begin = row.begin() + static_cast<std::ptrdiff_t>(layer) * hidden;
          place.layers.emplace_back(begin, begin + hidden);
        }
      }
    }
  }
  return sample;
}

double mean_square(const std::vector<float>& row) {
  return dot(row.data(), row.data(), row.size()) / static_cast<double>(row.size());
}

// How often a state's own token scores higher than another token of the same text: 0.5 is chance.
std::vector<double> wins_by_offset(const Sample& sample, const std::vector<std::vector<float>>& states, const TensorView& head) {
  std::vector<double> wins;
  std::mt19937_64 random(23);
  std::vector<float> own, other;
  for (std::size_t k = 0; k < std::size(kOffsets); ++k) {
    std::vector<int64_t> rivals;
    std::vector<std::vector<float>> rows;
    for (std::size_t n = 0; n < kRivals; ++n) {
      rivals.push_back(sample.places[random() % sample.places.size()].tokens[k]);
      read_row(head, rivals.back(), rows.emplace_back());
    }
    double won = 0;
    int64_t asked = 0;
    for (std::size_t i = 0; i < states.size(); ++i) {
      const int64_t token = sample.places[i].tokens[k];
      read_row(head, token, own);
      const double score = dot(states[i].data(), own.data(), own.size());
      for (std::size_t n = 0; n < kRivals; ++n) {
        if (rivals[n] == token) continue;
        const double rival = dot(states[i].data(), rows[n].data(), own.size());
        won += score > rival ? 1.0 : score == rival ? 0.5 : 0.0;
        ++asked;
      }
    }
    wins.push_back(asked == 0 ? 0.5 : won / static_cast<double>(asked));
  }
  return wins;
}

FeatureFinding judge_head(const std::vector<double>& wins, const std::string& whose) {
  std::size_t best = 0;
  std::string figures;
  for (std::size_t k = 0; k < wins.size(); ++k) {
    if (wins[k] > wins[best]) best = k;
    figures += format("{}{}: {}", k == 0 ? "" : ", ", kOffsets[k] > 0 ? format("t+{}", kOffsets[k]) : kOffsets[k] == 0 ? std::string("t") : format("t{}", kOffsets[k]), format_fixed(wins[k], 3));
  }
  FeatureFinding finding{"the head predicts the next token", true,
                         format("from {} at t, the token of the text beats others of the same text (0.5 is chance): {}", whose, figures)};
  const double right = wins[2];
  if (right >= kWins && best == 2 && std::none_of(wins.begin(), wins.end(), [&](const double& other) { return &other != &wins[2] && other > right - kMargin; })) {
    return finding;
  }
  finding.is_fine = false;
  if (wins[best] >= kWins && best != 2) {
    const int shift = kOffsets[best] - 1;
    finding.text += format("; the features are shifted: the state stored at t is the one of t{}{}", shift > 0 ? "+" : "", shift);
  } else if (wins[best] >= kWins) {
    finding.text += "; other places fit nearly as well: states and tokens do not belong to one another";
  } else {
    finding.text += "; this is near chance: they are states of another model, of other tokens, or no last states";
  }
  return finding;
}

FeatureFinding judge_norm(const Sample& sample, const std::vector<float>& norm) {
  double sum = 0;
  double worst = 0;
  for (const Place& place : sample.places) {
    double square = 0;
    std::size_t counted = 0;
    for (std::size_t i = 0; i < norm.size(); ++i) {
      if (std::abs(norm[i]) < 1e-3F) continue;
      const double value = place.last[i] / norm[i];
      square += value * value;
      ++counted;
    }
    square /= static_cast<double>(std::max<std::size_t>(counted, 1));
    sum += square;
    worst = std::max(worst, std::abs(square - 1));
  }
  const double mean = sum / static_cast<double>(sample.places.size());
  FeatureFinding finding{"the last state is behind the final norm", true,
                         format("mean square after division by the norm's weight: {} (1 behind a norm), furthest from 1 by {}", format_fixed(mean, 4), format_fixed(worst, 4))};
  if (std::abs(mean - 1) > kNormTolerance) {
    finding.is_fine = false;
    finding.text += mean > 1 ? "; these are states before the norm, or of another model: the head would see numbers of the wrong size"
                             : "; these are not this target's last states";
  }
  return finding;
}

// Deeper layers have longer states that point more to where the last one points. Each of the two orders may have an exception; a swap breaks both.
FeatureFinding judge_layers(const Sample& sample, const std::vector<float>& norm) {
  const std::size_t count = sample.layer_ids.size();
  std::vector<double> lengths(count, 0), towards(count, 0);
  const bool has_last = !sample.places.front().last.empty();
  for (std::size_t layer = 0; layer < count; ++layer) {
    std::vector<double> sizes;
    for (const Place& place : sample.places) {
      const std::vector<float>& state = place.layers[layer];
      sizes.push_back(std::sqrt(mean_square(state)));
      if (!has_last) continue;
      std::vector<float> direction(norm.size());
      for (std::size_t i = 0; i < norm.size(); ++i) direction[i] = std::abs(norm[i]) < 1e-3F ? 0.0F : place.last[i] / norm[i];
      const double size = std::sqrt(dot(state.data(), state.data(), state.size()) * dot(direction.data(), direction.data(), direction.size()));
      towards[layer] += size > 0 ? dot(state.data(), direction.data(), state.size()) / size / static_cast<double>(sample.places.size()) : 0;
    }
    std::nth_element(sizes.begin(), sizes.begin() + static_cast<std::ptrdiff_t>(sizes.size() / 2), sizes.end());
    lengths[layer] = sizes[sizes.size() / 2];
  }
  FeatureFinding finding{"layers are in order", true, "layer: typical size" + std::string(has_last ? ", cosine with the last state" : "")};
  std::vector<std::size_t> by_depth(count);
  for (std::size_t i = 0; i < count; ++i) by_depth[i] = i;
  std::sort(by_depth.begin(), by_depth.end(), [&](std::size_t a, std::size_t b) { return sample.layer_ids[a] < sample.layer_ids[b]; });
  int64_t shrinks = 0, turns_away = 0, zero = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t layer = by_depth[i];
    finding.text += format("; {}: {}{}", sample.layer_ids[layer], format_fixed(lengths[layer], 3), has_last ? ", " + format_fixed(towards[layer], 3) : "");
    zero += lengths[layer] == 0 ? 1 : 0;
    if (i == 0) continue;
    shrinks += lengths[layer] < lengths[by_depth[i - 1]] ? 1 : 0;
    turns_away += has_last && towards[layer] < towards[by_depth[i - 1]] - 0.01 ? 1 : 0;
  }
  if (zero > 0) {
    finding.is_fine = false;
    finding.text += format("; {} of them are all zero: they were not captured", zero);
  } else if (shrinks > 0 && (turns_away > 0 || !has_last)) {
    finding.is_fine = !has_last;
    finding.text += has_last ? "; a deeper layer is smaller and further from the last state: layers stand in another order than their ids say"
                             : "; a deeper layer has smaller states, which is rare: look at the order of the layers";
  }
  return finding;
}

FeatureFinding judge_tokens(const FeatureCheckRequest& request, const FeatureManifest& manifest, int64_t vocab_size) {
  std::vector<TokenSample> samples = read_tokens(request.tokens, {.vocab_size = vocab_size, .max_length = manifest.max_length});
  std::erase_if(samples, [](const TokenSample& sample) { return !has_supervised_pair(sample.loss_mask); });
  const bool is_same = tokens_fingerprint(samples) == manifest.tokens_sha256;
  return {"they come from the token records", is_same,
          is_same ? format("ids and masks of {} are those that were captured", request.tokens)
                  : format("{} has other ids or masks than were captured: capture again, or name the right file", request.tokens)};
}

}  // namespace

std::vector<FeatureFinding> check_features(const FeatureCheckRequest& request) {
  const Json json = read_model_config(request.target);
  const TargetConfig config = target_config(json, (request.target / "config.json").string());
  const WeightFolder weights = WeightFolder::open(request.target);
  std::vector<FeatureFinding> findings;
  const auto attempt = [&](const char* what, const auto& check) {
    try {
      findings.push_back({what, true, check()});
      return true;
    } catch (const Error& error) {
      findings.push_back({what, false, error.hint().empty() ? error.what() : format("{} ({})", error.what(), error.hint())});
      return false;
    }
  };
  if (!attempt("whole, with right checksums, and of this target", [&] {
        return inspect_features({.folder = request.features,
                                 .vocab_size = config.vocab_size,
                                 .max_length = request.max_length,
                                 .target_fingerprint = target_fingerprint(json, weights),
                                 .named_by = request.named_by});
      }) &&
      !std::filesystem::exists(request.features / kManifestName)) {
    return findings;
  }
  if (!std::filesystem::exists(request.features / kManifestName)) {
    findings.push_back({"the head predicts the next token", true, "not checked: a folder of .ckpt files does not say which of its tensors is what"});
    return findings;
  }
  const FeatureManifest manifest = FeatureManifest::read(request.features / kManifestName);
  Sample sample;
  if (!attempt("readable", [&] {
        const auto store = FeatureStore::open(request.features, needs_of(request, config, manifest));
        sample = take_places(request, *store, manifest, config.hidden_size);
        if (sample.places.empty()) throw Error(ExitCode::kData, "no record has six tokens: too short to judge by", "capture longer conversations");
        return format("{} places of {} records looked at", sample.places.size(), sample.records);
      })) {
    return findings;
  }
  std::vector<float> norm(static_cast<std::size_t>(config.hidden_size), 1.0F);
  if (const TensorView* weight = weights.find_in_decoder("model.norm.weight")) {
    TensorView row = *weight;
    row.shape = {1, config.hidden_size};
    read_row(row, 0, norm);
  }
  const TensorView* head = find_target_tables(weights, config, request.keys).head;
  const bool has_last = !sample.places.front().last.empty();
  if (has_last) findings.push_back(judge_norm(sample, norm));
  const auto deepest = std::max_element(sample.layer_ids.begin(), sample.layer_ids.end());
  if (head != nullptr && (has_last || deepest != sample.layer_ids.end())) {
    std::vector<std::vector<float>> states;
    for (const Place& place : sample.places) {
      if (has_last) {
        states.push_back(place.last);
        continue;
      }
      std::vector<float> state = place.layers[static_cast<std::size_t>(deepest - sample.layer_ids.begin())];
      for (std::size_t i = 0; i < state.size(); ++i) state[i] *= norm[i];
      states.push_back(std::move(state));
    }
    findings.push_back(judge_head(wins_by_offset(sample, states, *head), has_last ? "the last state" : format("layer {} (the last state is not stored)", *deepest)));
  }
  if (sample.layer_ids.size() > 1) findings.push_back(judge_layers(sample, norm));
  if (!request.tokens.empty() && std::filesystem::exists(request.tokens)) findings.push_back(judge_tokens(request, manifest, config.vocab_size));
  return findings;
}

}  // namespace sf
