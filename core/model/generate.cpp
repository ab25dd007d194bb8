// Shapes: b batch · t tokens · v vocabulary · k candidates
#include "core/model/generate.hpp"

#include "core/base/error.hpp"
#include "core/data/philox.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <tuple>
#include <utility>

namespace sf {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// A place of the batch: the sequence that stands in it, or none.
struct Slot {
  int64_t prompt = -1;
  std::vector<int64_t> answer;
  int64_t length = 0;  // tokens that have gone through the target
  [[nodiscard]] bool is_free() const { return prompt < 0; }
};

class Decoder {
 public:
  Decoder(const Target& target, const std::vector<Prompt>& prompts, const std::vector<int64_t>& which, const GenerationOptions& options)
      : target_(target), prompts_(prompts), which_(which), options_(options) {
    slots_.resize(static_cast<size_t>(std::min<int64_t>(options.batch_size, static_cast<int64_t>(which.size()))));
    int64_t longest = 1;
    for (const int64_t i : which) longest = std::max(longest, static_cast<int64_t>(prompts[static_cast<size_t>(i)].ids.size()));
    cache_ = target.new_cache(static_cast<int64_t>(slots_.size()), capacity_for(longest + 1));
  }

  GenerationTimes run() {
    while (true) {
      if (options_.stop_requested && options_.stop_requested()) {
        times_.interrupted = true;
        break;
      }
      fill();
      leave_empty_places();
      if (slots_.empty()) break;
      step();
      if (options_.progress) options_.progress(times_.tokens, finished_);
    }
    return times_;
  }

 private:
  static int64_t capacity_for(int64_t tokens) {
    constexpr int64_t kGrain = 64;
    return (tokens + kGrain - 1) / kGrain * kGrain;
  }

  // Puts the next prompts into all free places and gives each its first token. Those that end with it make room again.
  void fill() {
    while (next_ < which_.size()) {
      std::vector<int64_t> rows;
      int64_t t = 0;
      for (size_t i = 0; i < slots_.size() && next_ < which_.size(); ++i) {
        if (!slots_[i].is_free()) continue;
        slots_[i] = {.prompt = which_[next_++]};
        rows.push_back(static_cast<int64_t>(i));
        t = std::max(t, static_cast<int64_t>(prompt_of(slots_[i]).size()));
      }
      if (rows.empty()) return;
      const auto start = Clock::now();
      const auto b = static_cast<int64_t>(rows.size());
      at::Tensor ids_bt = at::zeros({b, t}, at::kLong);
      std::vector<int64_t> last;
      for (int64_t j = 0; j < b; ++j) {
        Slot& slot = slots_[static_cast<size_t>(rows[static_cast<size_t>(j)])];
        const auto& prompt = prompt_of(slot);
        std::copy(prompt.begin(), prompt.end(), ids_bt.mutable_data_ptr<int64_t>() + j * t);
        slot.length = static_cast<int64_t>(prompt.size());
        last.push_back(j * t + slot.length - 1);
        times_.prompt_tokens += slot.length;
      }
      target_.extend_cache(cache_, capacity_for(t));
      const TargetStates states = target_.forward({.input_ids_bt = ids_bt,
                                                   .layer_ids = {},
                                                   .logits = true,
                                                   .cache = &cache_,
                                                   .rows = rows,
                                                   .starts = std::vector<int64_t>(rows.size(), 0),
                                                   .logit_places_r = at::tensor(last, at::kLong)});
      take(states.logits_btv, rows);
      times_.prefill_seconds += seconds_since(start);
    }
  }

  // When no prompt waits: a pass reads the cache of all places without a copy only while nobody is missing.
  void leave_empty_places() {
    std::vector<int64_t> busy;
    std::vector<Slot> kept;
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (slots_[i].is_free()) continue;
      busy.push_back(static_cast<int64_t>(i));
      kept.push_back(slots_[i]);
    }
    if (busy.size() == slots_.size()) return;
    slots_ = std::move(kept);
    if (!busy.empty()) cache_ = cache_.select(busy);
  }

  // One token for every sequence.
  void step() {
    const auto start = Clock::now();
    std::vector<int64_t> rows, starts, ids;
    int64_t longest = 0;
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (slots_[i].is_free()) continue;
      rows.push_back(static_cast<int64_t>(i));
      ids.push_back(slots_[i].answer.back());
      starts.push_back(slots_[i].length++);
      longest = std::max(longest, slots_[i].length);
    }
    if (longest > cache_.capacity) target_.extend_cache(cache_, std::max(capacity_for(longest), cache_.capacity * 2));
    const auto b = static_cast<int64_t>(rows.size());
    const TargetStates states = target_.forward({.input_ids_bt = at::tensor(ids, at::kLong).view({b, 1}),
                                                 .layer_ids = {},
                                                 .logits = true,
                                                 .cache = &cache_,
                                                 .rows = rows,
                                                 .starts = starts});
    take(states.logits_btv.view({b, -1}), rows);
    times_.decode_seconds += seconds_since(start);
    times_.decode_tokens += b;
    ++times_.decode_passes;
  }

  void take(const at::Tensor& logits_bv, const std::vector<int64_t>& rows) {
    std::vector<int64_t> samples, positions;
    for (const int64_t row : rows) {
      const Slot& slot = slots_[static_cast<size_t>(row)];
      samples.push_back(slot.prompt);
      positions.push_back(static_cast<int64_t>(slot.answer.size()));
    }
    const std::vector<int64_t> tokens = choose_tokens(logits_bv, options_.sampling, samples, positions);
    for (size_t j = 0; j < rows.size(); ++j) {
      Slot& slot = slots_[static_cast<size_t>(rows[j])];
      slot.answer.push_back(tokens[j]);
      ++times_.tokens;
      const bool is_stop = std::find(options_.stop_tokens.begin(), options_.stop_tokens.end(), tokens[j]) != options_.stop_tokens.end();
      const bool is_long = static_cast<int64_t>(slot.answer.size()) >= options_.max_new_tokens;
      const bool is_full = options_.context_tokens > 0 && slot.length + 1 >= options_.context_tokens;
      if (!is_stop && !is_long && !is_full) continue;
      ++finished_;
      const StopReason reason = is_stop ? StopReason::kStopToken : is_long ? StopReason::kLength : StopReason::kContext;
      if (options_.finished) options_.finished({.prompt = slot.prompt, .ids = std::move(slot.answer), .reason = reason});
      slot = {};
    }
  }

  [[nodiscard]] const std::vector<int64_t>& prompt_of(const Slot& slot) const { return prompts_[static_cast<size_t>(slot.prompt)].ids; }

  const Target& target_;
  const std::vector<Prompt>& prompts_;
  const std::vector<int64_t>& which_;
  const GenerationOptions& options_;
  std::vector<Slot> slots_;
  KeyValueCache cache_;
  size_t next_ = 0;
  int64_t finished_ = 0;
  GenerationTimes times_;
};

}  // namespace

const char* name_of(StopReason reason) {
  switch (reason) {
    case StopReason::kStopToken: return "stop_token";
    case StopReason::kLength: return "length";
    case StopReason::kContext: return "context";
  }
  return "";
}

std::vector<int64_t> choose_tokens(const at::Tensor& logits_bv, const Sampling& sampling, const std::vector<int64_t>& samples,
                                   const std::vector<int64_t>& positions) {
  const at::NoGradGuard no_grad;
  const int64_t b = logits_bv.size(0), v = logits_bv.size(1);
  at::Tensor chosen_b;
  if (sampling.is_greedy()) {
    chosen_b = logits_bv.argmax(-1);
  } else {
    at::Tensor values_bk = logits_bv.to(at::kFloat) / sampling.temperature, ids_bk;
    if (sampling.top_k > 0 || sampling.top_p < 1) {
      // Largest first, so that a cut keeps the head.
      std::tie(values_bk, ids_bk) = values_bk.topk(sampling.top_k > 0 ? std::min(sampling.top_k, v) : v);
    }
    at::Tensor probability_bk = at::softmax(values_bk.to(at::kDouble), -1);
    if (sampling.top_p < 1) {
      const at::Tensor before_bk = probability_bk.cumsum(-1) - probability_bk;
      probability_bk.masked_fill_(before_bk >= sampling.top_p, 0.0);
    }
    const PhiloxStream draws(sampling.seed, "generate");
    std::vector<double> uniform;
    for (size_t j = 0; j < samples.size(); ++j) {
      uniform.push_back(draws.uniform(0, static_cast<uint64_t>(samples[j]), static_cast<uint64_t>(positions[j])));
    }
    const at::Tensor sum_bk = probability_bk.cumsum(-1);
    const at::Tensor wanted_b1 = at::tensor(uniform, at::kDouble).to(sum_bk.device()).unsqueeze(1) * sum_bk.narrow(1, sum_bk.size(1) - 1, 1);
    // The first token whose running sum is above the draw: one without probability never is.
    const at::Tensor place_b1 = (sum_bk <= wanted_b1).sum(-1, true).clamp_max(sum_bk.size(1) - 1);
    chosen_b = (ids_bk.defined() ? ids_bk.gather(1, place_b1) : place_b1).squeeze(1);
  }
  const at::Tensor host = chosen_b.to(at::kCPU, at::kLong).contiguous();
  const auto* tokens = host.const_data_ptr<int64_t>();
  return {tokens, tokens + b};
}

GenerationTimes generate(const Target& target, const std::vector<Prompt>& prompts, const std::vector<int64_t>& which,
                         const GenerationOptions& options) {
  SF_CHECK(options.batch_size > 0 && options.max_new_tokens > 0, "a batch of {} and {} new tokens", options.batch_size, options.max_new_tokens);
  if (which.empty()) return {};
  return Decoder(target, prompts, which, options).run();
}

}  // namespace sf
