// Shapes: b sequences · t tokens · k drafted tokens · h hidden · v vocabulary
#include "core/train/speculative.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>

#include "core/base/error.hpp"
#include "core/model/generate.hpp"
#include "core/train/batch.hpp"
#include "core/train/loader.hpp"

namespace sf {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

at::Tensor integers(const std::vector<int64_t>& values) { return at::tensor(values, at::kLong); }

std::vector<int64_t> host_values(const at::Tensor& tensor) {
  const at::Tensor host = tensor.to(at::kCPU, at::kLong).contiguous();
  const auto* data = host.const_data_ptr<int64_t>();
  return {data, data + host.numel()};
}

// Prompts (and answers) under each other, zeros behind them.
at::Tensor padded(const std::vector<std::vector<int64_t>>& rows) {
  int64_t t = 0;
  for (const auto& row : rows) t = std::max(t, static_cast<int64_t>(row.size()));
  at::Tensor ids_bt = at::zeros({static_cast<int64_t>(rows.size()), t}, at::kLong);
  for (size_t j = 0; j < rows.size(); ++j) {
    std::copy(rows[j].begin(), rows[j].end(), ids_bt.mutable_data_ptr<int64_t>() + static_cast<int64_t>(j) * t);
  }
  return ids_bt;
}

// What rounding in another order may change a logit by: some units in the last place of the type that the target computes in.
double tolerance_of(const at::Tensor& logits) {
  const double largest = logits.abs().max().item<double>();
  const double unit = logits.scalar_type() == at::kBFloat16 ? 1.0 / 64 : logits.scalar_type() == at::kHalf ? 1.0 / 512 : 1e-5;
  return unit * std::max(1.0, largest);
}

// Sequences of a group that are still in work; a sequence that ends leaves, and its rows of every tensor with it.
struct Active {
  std::vector<size_t> rows;                  // of the group
  KeyValueCache cache;

  [[nodiscard]] int64_t count() const { return static_cast<int64_t>(rows.size()); }
  // The places among the active ones that stay.
  void keep(const std::vector<int64_t>& places) {
    if (static_cast<int64_t>(places.size()) == count()) return;
    std::vector<size_t> kept;
    for (const int64_t place : places) kept.push_back(rows[static_cast<size_t>(place)]);
    rows = std::move(kept);
    if (!rows.empty()) cache = cache.select(places);
  }
};

}  // namespace

void DecodingResult::add(DecodingResult other) {
  answers.insert(answers.end(), std::make_move_iterator(other.answers.begin()), std::make_move_iterator(other.answers.end()));
  passes.insert(passes.end(), other.passes.begin(), other.passes.end());
  tokens += other.tokens;
  target_passes += other.target_passes;
  draft_seconds += other.draft_seconds;
  target_seconds += other.target_seconds;
}

at::Tensor feature_of(const std::vector<int64_t>& wanted, const std::vector<int64_t>& layer_ids, const std::vector<at::Tensor>& layers_bth) {
  std::vector<at::Tensor> parts;
  for (const int64_t id : wanted) {
    const auto place = std::find(layer_ids.begin(), layer_ids.end(), id);
    SF_CHECK(place != layer_ids.end(), "layer {} was not asked for", id);
    parts.push_back(layers_bth[static_cast<size_t>(place - layer_ids.begin())]);
  }
  const at::Tensor feature = at::cat(parts, -1);
  return feature.to(at::kBFloat16).to(feature.scalar_type());
}

PromptGroup::PromptGroup(const Target& target, std::vector<Prompt> prompts, int64_t first_prompt, const DecodingLimits& limits, std::vector<int64_t> layer_ids,
                         int64_t room_tokens)
    : target_(target), prompts_(std::move(prompts)), first_prompt_(first_prompt), limits_(limits), layer_ids_(std::move(layer_ids)) {
  const at::NoGradGuard no_grad;
  std::vector<std::vector<int64_t>> ids;
  for (const Prompt& prompt : prompts_) ids.push_back(prompt.ids);
  prompt_ids_bt_ = padded(ids);
  const int64_t b = prompt_ids_bt_.size(0), t = prompt_ids_bt_.size(1);
  const int64_t longest = limits.context_tokens > 0 ? std::min(t + limits.max_new_tokens, std::max(limits.context_tokens, t)) : t + limits.max_new_tokens;
  cache_ = target.new_cache(b, longest + room_tokens + 2);
  std::vector<int64_t> last;
  for (int64_t j = 0; j < b; ++j) last.push_back(j * t + static_cast<int64_t>(ids[static_cast<size_t>(j)].size()) - 1);
  TargetStates states = target.forward({.input_ids_bt = prompt_ids_bt_,
                                        .layer_ids = layer_ids_,
                                        .logits = true,
                                        .cache = &cache_,
                                        .starts = std::vector<int64_t>(static_cast<size_t>(b), 0),
                                        .logit_places_r = integers(last)});
  layers_bth_ = std::move(states.layers_bth);
  std::vector<std::string> names;
  for (const Prompt& prompt : prompts_) names.push_back(prompt.id);
  require_finite_logits(states.logits_btv.reshape({static_cast<int64_t>(names.size()), -1}), names);
  first_tokens_ = host_values(states.logits_btv.argmax(-1));
}

int64_t PromptGroup::limit_of(size_t row) const {
  const auto prompt = static_cast<int64_t>(prompts_[row].ids.size());
  return limits_.context_tokens > 0 ? std::min(limits_.max_new_tokens, limits_.context_tokens - prompt) : limits_.max_new_tokens;
}

bool PromptGroup::is_done(size_t row, const std::vector<int64_t>& answer) const {
  return static_cast<int64_t>(answer.size()) >= limit_of(row) ||
         std::find(limits_.stop_tokens.begin(), limits_.stop_tokens.end(), answer.back()) != limits_.stop_tokens.end();
}

DecodingResult PromptGroup::plain() const {
  const at::NoGradGuard no_grad;
  DecodingResult result;
  Active active{.rows = {}, .cache = cache_.copy()};
  std::vector<int64_t> stay;
  for (size_t row = 0; row < prompts_.size(); ++row) {
    result.answers.push_back({first_tokens_[row]});
    active.rows.push_back(row);
    if (!is_done(row, result.answers[row])) stay.push_back(static_cast<int64_t>(row));
  }
  active.keep(stay);
  while (!active.rows.empty()) {
    const auto start = Clock::now();
    std::vector<int64_t> ids, starts;
    for (const size_t row : active.rows) {
      ids.push_back(result.answers[row].back());
      starts.push_back(static_cast<int64_t>(prompts_[row].ids.size() + result.answers[row].size()) - 1);
    }
    const TargetStates states = target_.forward({.input_ids_bt = integers(ids).view({active.count(), 1}),
                                                 .layer_ids = {},
                                                 .logits = true,
                                                 .cache = &active.cache,
                                                 .starts = starts});
    const std::vector<int64_t> chosen = host_values(states.logits_btv.argmax(-1));
    result.target_seconds += seconds_since(start);
    ++result.target_passes;
    stay.clear();
    for (size_t j = 0; j < active.rows.size(); ++j) {
      std::vector<int64_t>& answer = result.answers[active.rows[j]];
      answer.push_back(chosen[j]);
      ++result.tokens;
      if (!is_done(active.rows[j], answer)) stay.push_back(static_cast<int64_t>(j));
    }
    active.keep(stay);
  }
  return result;
}

namespace {

// A plugin's word: what it does not keep to would be read beyond its end, or looked up beyond the table's.
std::vector<int64_t> checked_guesses(const DecodingDraft& draft, const DraftAnswer& guess, int64_t sequences, int64_t vocab_size) {
  const auto refuse = [&](const std::string& what) {
    throw Error(ExitCode::kPlugin, format("{}: propose() was asked for {} tokens of each of {} sequences and gave {}", draft.name, draft.tokens, sequences, what), "tell the plugin's authors");
  };
  const auto is_of = [](const at::Tensor& tensor, at::IntArrayRef shape) { return tensor.defined() && tensor.scalar_type() == at::kLong && tensor.sizes() == shape; };
  if (!is_of(guess.ids_bk, {sequences, draft.tokens})) {
    refuse(guess.ids_bk.defined() ? format("ids_bk of shape {} and type {}", guess.ids_bk.sizes().vec(), std::string(c10::toString(guess.ids_bk.scalar_type()))) : std::string("none"));
  }
  if (guess.advised_b.defined() && !is_of(guess.advised_b, {sequences})) {
    refuse(format("advised_b of shape {} and type {}", guess.advised_b.sizes().vec(), std::string(c10::toString(guess.advised_b.scalar_type()))));
  }
  std::vector<int64_t> guesses = host_values(guess.ids_bk);
  for (const int64_t token : guesses) {
    if (token < 0 || token >= vocab_size) refuse(format("the token {}, and there are 0 to {}", token, vocab_size - 1));
  }
  return guesses;
}

}  // namespace

DecodingResult PromptGroup::speculative(const DecodingDraft& draft) const {
  const at::NoGradGuard no_grad;
  const at::Device device = target_.device();
  DecodingResult result;
  Active active{.rows = {}, .cache = cache_.copy()};
  DraftMemory memory;
  std::map<std::string, std::vector<int64_t>> layers_of;
  for (const std::string& name : draft.drafter->reads()) {
    for (const FeatureRead& read : draft.description.reads) {
      if (read.name == name) layers_of[name] = read.layer_ids;
    }
  }
  const auto position_of = [&](size_t row) {  // of the last known token
    return static_cast<int64_t>(prompts_[row].ids.size() + result.answers[row].size()) - 1;
  };
  const auto remember = [&](const std::vector<at::Tensor>& layers_bth, const at::Tensor& next_ids_bt, const std::vector<int64_t>& starts,
                            const std::vector<int64_t>& counts, const std::vector<int64_t>& places) {
    const bool is_whole = static_cast<int64_t>(places.size()) == next_ids_bt.size(0);
    const at::Tensor places_b = integers(places).to(device);
    SeenTokens seen;
    for (const auto& [name, wanted] : layers_of) {
      const at::Tensor feature = feature_of(wanted, layer_ids_, layers_bth);
      seen.features[name] = is_whole ? feature : feature.index_select(0, places_b);
    }
    std::vector<int64_t> kept_starts, kept_counts;
    for (const int64_t place : places) {
      kept_starts.push_back(starts[static_cast<size_t>(place)]);
      kept_counts.push_back(counts[static_cast<size_t>(place)]);
    }
    const at::Tensor next = next_ids_bt.to(device);
    seen.next_ids_bt = is_whole ? next : next.index_select(0, places_b);
    seen.starts_b = integers(kept_starts);
    seen.counts_b = integers(kept_counts);
    seen.room_tokens = cache_.capacity;
    if (!is_whole) {
      for (auto& [name, tensor] : memory.tensors) tensor = tensor.index_select(0, places_b);
    }
    draft.drafter->remember(*draft.units, memory, seen);
  };

  // The prompts.
  std::vector<int64_t> stay, starts, counts;
  at::Tensor next_ids_bt = at::constant_pad_nd(prompt_ids_bt_.narrow(1, 1, prompt_ids_bt_.size(1) - 1), {0, 1});
  for (size_t row = 0; row < prompts_.size(); ++row) {
    const auto length = static_cast<int64_t>(prompts_[row].ids.size());
    result.answers.push_back({first_tokens_[row]});
    active.rows.push_back(row);
    starts.push_back(0);
    counts.push_back(length);
    next_ids_bt[static_cast<int64_t>(row)][length - 1] = first_tokens_[row];
    if (!is_done(row, result.answers[row])) stay.push_back(static_cast<int64_t>(row));
  }
  const auto prompt_start = Clock::now();
  active.keep(stay);
  if (!active.rows.empty()) remember(layers_bth_, next_ids_bt, starts, counts, stay);
  result.draft_seconds += seconds_since(prompt_start);

  while (!active.rows.empty()) {
    auto start = Clock::now();
    std::vector<int64_t> known;
    starts.clear();
    for (const size_t row : active.rows) {
      known.push_back(result.answers[row].back());
      starts.push_back(position_of(row));
    }
    const DraftAnswer guess = draft.drafter->propose(
        *draft.units, memory,
        {.known_ids_b = integers(known).to(device), .positions_b = integers(starts).to(device), .tokens = draft.tokens});
    const std::vector<int64_t> guesses = checked_guesses(draft, guess, active.count(), target_.config().vocab_size);
    const std::vector<int64_t> advised = guess.advised_b.defined() ? host_values(guess.advised_b) : std::vector<int64_t>();
    int64_t looked_at = 0;
    std::vector<int64_t> tried;
    for (size_t j = 0; j < active.rows.size(); ++j) {
      tried.push_back(draft.use_schedule && !advised.empty() ? std::min(advised[j], draft.tokens) : draft.tokens);
      looked_at = std::max(looked_at, tried.back());
    }
    result.draft_seconds += seconds_since(start);

    start = Clock::now();
    const int64_t b = active.count(), t = looked_at + 1;
    at::Tensor ids_bt = at::empty({b, t}, at::kLong);
    for (int64_t j = 0; j < b; ++j) {
      int64_t* ids = ids_bt.mutable_data_ptr<int64_t>() + j * t;
      ids[0] = known[static_cast<size_t>(j)];
      std::copy_n(guesses.begin() + j * draft.tokens, looked_at, ids + 1);
    }
    const TargetStates states = target_.forward(
        {.input_ids_bt = ids_bt, .layer_ids = layer_ids_, .logits = true, .cache = &active.cache, .starts = starts});
    const std::vector<int64_t> chosen = host_values(states.logits_btv.argmax(-1));
    result.target_seconds += seconds_since(start);
    ++result.target_passes;

    start = Clock::now();
    stay.clear();
    counts.clear();
    next_ids_bt = at::zeros({b, t}, at::kLong);
    for (int64_t j = 0; j < b; ++j) {
      const size_t row = active.rows[static_cast<size_t>(j)];
      const int64_t *best = chosen.data() + j * t, *guessed = guesses.data() + j * draft.tokens;
      int64_t accepted = 0;
      while (accepted < tried[static_cast<size_t>(j)] && guessed[accepted] == best[accepted]) ++accepted;
      std::vector<int64_t>& answer = result.answers[row];
      int64_t taken = 0;
      bool done = false;
      for (; taken <= accepted && !done; ++taken) {  // the accepted guesses are the target's own choices, and one more
        answer.push_back(best[taken]);
        next_ids_bt.mutable_data_ptr<int64_t>()[j * t + taken] = best[taken];
        done = is_done(row, answer);
      }
      result.tokens += taken;
      result.passes.push_back({.prompt = first_prompt_ + static_cast<int64_t>(row),
                               .judged = done ? std::min(tried[static_cast<size_t>(j)], taken) : tried[static_cast<size_t>(j)],
                               .accepted = std::min(accepted, taken),
                               .advised = advised.empty() ? -1 : std::min(advised[static_cast<size_t>(j)], draft.tokens)});
      counts.push_back(taken);
      if (!done) stay.push_back(j);
    }
    active.keep(stay);
    if (!active.rows.empty()) remember(states.layers_bth, next_ids_bt, starts, counts, stay);
    result.draft_seconds += seconds_since(start);
  }
  return result;
}

std::optional<Difference> judge_difference(const Target& target, const Prompt& prompt, const std::vector<int64_t>& expected,
                                           const std::vector<int64_t>& found) {
  if (expected == found) return std::nullopt;
  const at::NoGradGuard no_grad;
  Difference difference;
  const auto shared = static_cast<size_t>(std::mismatch(expected.begin(), expected.end(), found.begin(), found.end()).second - found.begin());
  const auto token = [](const std::vector<int64_t>& answer, size_t i) { return i < answer.size() ? answer[i] : int64_t{-1}; };
  difference = {.position = static_cast<int64_t>(shared), .expected = token(expected, shared), .found = token(found, shared)};
  if (difference.expected < 0 || difference.found < 0) {  // one of them stopped where the other went on
    difference.margin = std::numeric_limits<double>::infinity();
    return difference;
  }
  std::vector<int64_t> ids = prompt.ids;
  ids.insert(ids.end(), found.begin(), found.end() - 1);
  const auto first = static_cast<int64_t>(prompt.ids.size()) - 1, count = static_cast<int64_t>(found.size());
  const at::Tensor logits_rv = target
                                   .forward({.input_ids_bt = integers(ids).unsqueeze(0),
                                             .layer_ids = {},
                                             .logits = true,
                                             .logit_places_r = at::arange(first, first + count, at::kLong)})
                                   .logits_btv;
  difference.tolerance = tolerance_of(logits_rv);
  const at::Tensor wide = logits_rv.to(at::kFloat);
  const at::Tensor margins = (wide.amax(-1) - wide.gather(1, integers(found).to(wide.device()).unsqueeze(1)).squeeze(1)).cpu();
  difference.margin = margins[difference.position].item<double>();
  difference.is_tie = true;
  for (int64_t i = difference.position; i < count; ++i) {
    if (!(margins[i].item<double>() <= difference.tolerance)) {
      const at::Tensor best = wide[i].argmax();
      difference = {.position = i, .expected = best.item<int64_t>(), .found = found[static_cast<size_t>(i)], .margin = margins[i].item<double>(),
                    .tolerance = difference.tolerance, .is_tie = false};
      break;
    }
  }
  return difference;
}

LosslessVerdict lossless_verdict(const std::vector<ComparedAnswers>& compared, const WholeCheck& whole) {
  LosslessVerdict verdict;
  for (const ComparedAnswers& one : compared) {
    verdict.answers += one.answers;
    verdict.exact += one.exact;
    for (const auto& [prompt, difference] : one.differences) {
      verdict.ties += difference.is_tie ? 1 : 0;
      if (!difference.is_tie && verdict.first.empty()) {
        verdict.first = format("{}, prompt '{}', token {} of the answer: the target alone says {}, decoding with the draft gave {} (the target likes it less by {}, rounding explains {})",
                               one.draft, prompt, difference.position + 1, difference.expected, difference.found, format_fixed(difference.margin, 4),
                               format_fixed(difference.tolerance, 4));
      }
    }
  }
  const bool is_whole_same = whole.worst_margin <= whole.tolerance;
  verdict.lossless = verdict.first.empty() && is_whole_same;
  verdict.text =
      !is_whole_same      ? format("NOT LOSSLESS: decoding with a cache leaves what one whole pass of the target says, by {} where rounding explains {}", format_fixed(whole.worst_margin, 4),
                                   format_fixed(whole.tolerance, 4))
      : !verdict.lossless ? "NOT LOSSLESS: " + verdict.first
                          : format("lossless: {} of {} answers are the target's own token for token{}; {} tokens of them checked by whole passes", verdict.exact, verdict.answers,
                                   verdict.ties == 0 ? "" : format(", {} leave it where two tokens are equally good to within rounding", verdict.ties), whole.tokens);
  return verdict;
}

WholePass whole_pass(const Target& target, const std::vector<Prompt>& prompts, const std::vector<std::vector<int64_t>>& answers,
                     const std::vector<int64_t>& layer_ids) {
  const at::NoGradGuard no_grad;
  std::vector<std::vector<int64_t>> rows;
  for (size_t j = 0; j < prompts.size(); ++j) {
    rows.push_back(prompts[j].ids);
    rows.back().insert(rows.back().end(), answers[j].begin(), answers[j].end());
  }
  const at::Tensor ids_bt = padded(rows);
  std::vector<int64_t> places, said;
  for (size_t j = 0; j < prompts.size(); ++j) {
    for (size_t i = 0; i < answers[j].size(); ++i) {
      places.push_back(static_cast<int64_t>(j) * ids_bt.size(1) + static_cast<int64_t>(prompts[j].ids.size() + i) - 1);
      said.push_back(answers[j][i]);
    }
  }
  TargetStates states = target.forward(
      {.input_ids_bt = ids_bt, .layer_ids = layer_ids, .last_state = true, .logits = true, .logit_places_r = integers(places)});
  WholePass pass{.layers_bth = std::move(states.layers_bth), .last_state_bth = std::move(states.last_state_bth)};
  pass.tokens_checked = static_cast<int64_t>(said.size());
  pass.tolerance = tolerance_of(states.logits_btv);
  const at::Tensor wide = states.logits_btv.to(at::kFloat);
  pass.worst_margin = (wide.amax(-1) - wide.gather(1, integers(said).to(wide.device()).unsqueeze(1)).squeeze(1)).max().item<double>();
  return pass;
}

void evaluate_answers(const DecodingDraft& draft, EvaluationRunner& runner, const std::vector<Prompt>& prompts, const std::vector<std::vector<int64_t>>& answers,
                      const WholePass& pass, const std::vector<int64_t>& layer_ids, at::Device device, at::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  std::vector<std::optional<Sample>> samples;
  int64_t longest = 1;
  for (size_t j = 0; j < prompts.size(); ++j) {
    Sample sample;
    sample.index = static_cast<int64_t>(j);
    sample.tokens = static_cast<int64_t>(prompts[j].ids.size() + answers[j].size());
    std::vector<int64_t> ids = prompts[j].ids, mask(prompts[j].ids.size(), 0);
    ids.insert(ids.end(), answers[j].begin(), answers[j].end());
    mask.resize(ids.size(), 1);
    sample.tensors = {{"input_ids", integers(ids)}, {"loss_mask", integers(mask)}};
    for (const FeatureRead& read : draft.description.reads) {
      if (read.columns == 0 || read.optional) continue;
      const at::Tensor whole = read.last_state ? pass.last_state_bth.to(at::kBFloat16).to(dtype) : feature_of(read.layer_ids, layer_ids, pass.layers_bth);
      sample.tensors[read.name] = whole[static_cast<int64_t>(j)].narrow(0, 0, sample.tokens).cpu();
    }
    if (draft.algorithm->prepare(sample, sample_context(0, 0, sample.index, /*evaluating=*/true)).empty()) {
      longest = std::max(longest, sample.tokens);
      samples.emplace_back(std::move(sample));  // one that is too short to draft in has no pass either
    }
  }
  if (samples.empty()) return;
  const BatchFields fields(draft.description, *samples.front());
  Batch batch = fields.stack(samples, {.max_tokens = longest});
  draft.algorithm->finish(batch);
  draft.algorithm->micro_step(runner, to_device(batch, draft.description, device, dtype));
}

}  // namespace sf
