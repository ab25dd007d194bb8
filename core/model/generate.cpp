// Shapes: b batch · t tokens · v vocabulary · k candidates
#include "core/model/generate.hpp"

#include "core/base/error.hpp"
#include "core/data/philox.hpp"
#include "core/kernels/crew.hpp"
#include "core/kernels/decode.hpp"
#include "core/kernels/row_tiles.hpp"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
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

// The sequences in work and what is told of them: all that does not depend on how a step is made.
class Sequences {
 protected:
  Sequences(const Target& target, const std::vector<Prompt>& prompts, const std::vector<int64_t>& which, const GenerationOptions& options)
      : target_(target), prompts_(prompts), which_(which), options_(options), bytes_per_token_(target.cache_bytes_per_token()),
        draw_names_(options.sampling.is_greedy() ? std::vector<int64_t>(prompts.size()) : draw_names(prompts)) {
    slots_.resize(static_cast<size_t>(std::min<int64_t>(options.batch_size, static_cast<int64_t>(which.size()))));
    for (const int64_t i : which) longest_ = std::max(longest_, static_cast<int64_t>(prompts[static_cast<size_t>(i)].ids.size()));
  }

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
      std::vector<std::string> names;
      for (const int64_t row : rows) names.push_back(prompts_[static_cast<size_t>(slots_[static_cast<size_t>(row)].prompt)].id);
      require_finite_logits(states.logits_btv.reshape({b, -1}), names);
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

  void take(const at::Tensor& logits_bv, const std::vector<int64_t>& rows) {
    std::vector<int64_t> samples, positions;
    for (const int64_t row : rows) {
      const Slot& slot = slots_[static_cast<size_t>(row)];
      samples.push_back(draw_names_[static_cast<size_t>(slot.prompt)]);
      positions.push_back(static_cast<int64_t>(slot.answer.size()));
    }
    const std::vector<int64_t> tokens = choose_tokens(logits_bv, options_.sampling, samples, positions);
    for (size_t j = 0; j < rows.size(); ++j) add(slots_[static_cast<size_t>(rows[j])], tokens[j]);
  }

  // The next token of a sequence.
  void add(Slot& slot, int64_t token) {
    slot.answer.push_back(token);
    ++times_.tokens;
    const bool is_stop = std::find(options_.stop_tokens.begin(), options_.stop_tokens.end(), token) != options_.stop_tokens.end();
    const bool is_long = static_cast<int64_t>(slot.answer.size()) >= options_.max_new_tokens;
    const bool is_full = options_.context_tokens > 0 && slot.length + 1 >= options_.context_tokens;
    if (!is_stop && !is_long && !is_full) return;
    ++finished_;
    const StopReason reason = is_stop ? StopReason::kStopToken : is_long ? StopReason::kLength : StopReason::kContext;
    if (options_.finished) options_.finished({.prompt = slot.prompt, .ids = std::move(slot.answer), .reason = reason});
    slot = {};
  }

  [[nodiscard]] const std::vector<int64_t>& prompt_of(const Slot& slot) const { return prompts_[static_cast<size_t>(slot.prompt)].ids; }
  [[nodiscard]] bool is_stopped() const { return options_.stop_requested && options_.stop_requested(); }
  [[nodiscard]] int64_t busy() const {
    return std::count_if(slots_.begin(), slots_.end(), [](const Slot& slot) { return !slot.is_free(); });
  }

  const Target& target_;
  const std::vector<Prompt>& prompts_;
  const std::vector<int64_t>& which_;
  const GenerationOptions& options_;
  const int64_t bytes_per_token_;
  const std::vector<int64_t> draw_names_;  // by prompt
  int64_t longest_ = 1;  // prompt
  std::vector<Slot> slots_;
  KeyValueCache cache_;
  size_t next_ = 0;
  int64_t finished_ = 0;
  GenerationTimes times_;
};

// The tokens on the logits' device; uniform_b [b] float64 there, unless sampling is greedy.
at::Tensor chosen_tokens(const at::Tensor& logits_bv, const Sampling& sampling, const at::Tensor& uniform_b) {
  if (sampling.is_greedy()) return logits_bv.argmax(-1);
  at::Tensor values_bk = logits_bv.to(at::kFloat) / sampling.temperature, ids_bk;
  if (sampling.top_k > 0 || sampling.top_p < 1) {
    const int64_t v = logits_bv.size(1);
    // Largest first, so that a cut keeps the head.
    std::tie(values_bk, ids_bk) = values_bk.topk(sampling.top_k > 0 ? std::min(sampling.top_k, v) : v);
  }
  at::Tensor probability_bk = at::softmax(values_bk.to(at::kDouble), -1);
  if (sampling.top_p < 1) {
    const at::Tensor before_bk = probability_bk.cumsum(-1) - probability_bk;
    probability_bk.masked_fill_(before_bk >= sampling.top_p, 0.0);
  }
  const at::Tensor sum_bk = probability_bk.cumsum(-1);
  const at::Tensor wanted_b1 = uniform_b.unsqueeze(1) * sum_bk.narrow(1, sum_bk.size(1) - 1, 1);
  // The first token whose running sum is above the draw: one without probability never is.
  const at::Tensor place_b1 = (sum_bk <= wanted_b1).sum(-1, true).clamp_max(sum_bk.size(1) - 1);
  return (ids_bk.defined() ? ids_bk.gather(1, place_b1) : place_b1).squeeze(1);
}

class Decoder : Sequences {
 public:
  Decoder(const Target& target, const std::vector<Prompt>& prompts, const std::vector<int64_t>& which, const GenerationOptions& options)
      : Sequences(target, prompts, which, options) {
    cache_ = target.new_cache(static_cast<int64_t>(slots_.size()), capacity_for(longest_ + 1));
  }

  GenerationTimes run() {
    while (true) {
      if (is_stopped()) {
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
      times_.cache_bytes += slots_[i].length * bytes_per_token_;
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
};

// Several steps at a time, one after another on the device, each fed with what the one before chose. Whoever ends within them says on into the void until they are over. Room
// for the longest answer is there from the start, as a recording knows addresses.
class DeviceDecoder : Sequences {
 public:
  DeviceDecoder(const Target& target, const std::vector<Prompt>& prompts, const std::vector<int64_t>& which, const GenerationOptions& options)
      : Sequences(target, prompts, which, options) {
    const int64_t longest = options.context_tokens > 0 ? std::min(longest_ + options.max_new_tokens, std::max(options.context_tokens, longest_)) : longest_ + options.max_new_tokens;
    cache_ = target.new_cache(static_cast<int64_t>(slots_.size()), capacity_for(longest + kSteps + 1));
    make_places();
  }

  GenerationTimes run() {
    while (true) {
      if (is_stopped()) {
        times_.interrupted = true;
        break;
      }
      const int64_t places = static_cast<int64_t>(slots_.size()), waiting = places - busy();
      if (next_ < which_.size() && (waiting == places || waiting * kFillShare >= places)) fill();
      if (busy() == 0) {
        if (next_ >= which_.size()) break;
        continue;
      }
      if (next_ >= which_.size() && busy() * 2 <= static_cast<int64_t>(slots_.size())) {
        leave_empty_places();
        make_places();
      }
      steps();
      if (options_.progress) options_.progress(times_.tokens, finished_);
    }
    return times_;
  }

 private:
  static constexpr int64_t kSteps = 8;       // a question costs some 50 us, a step of a small target 300
  static constexpr int64_t kFillShare = 8;   // a prompts' pass costs some steps of all: it waits until an eighth of the places is free

  void make_places() {
    const auto places = static_cast<int64_t>(slots_.size());
    const at::TensorOptions integers = at::TensorOptions().dtype(at::kLong).device(target_.device());
    ids_b_ = at::zeros({places}, integers);
    positions_b_ = at::zeros({places}, integers);
    said_sb_ = at::zeros({kSteps, places}, integers);
    draws_sb_ = at::zeros({kSteps, places}, integers.dtype(at::kDouble));
    again_ = nullptr;
  }

  void enqueue() {
    for (int64_t s = 0; s < kSteps; ++s) {
      const at::Tensor logits_bv = target_.decode_step(ids_b_, positions_b_, cache_);
      if (options_.sampling.is_greedy()) {
        decode_choose(logits_bv, said_sb_[s], ids_b_, positions_b_);
        continue;
      }
      const at::Tensor chosen_b = chosen_tokens(logits_bv, options_.sampling, draws_sb_[s]);
      said_sb_[s].copy_(chosen_b);
      ids_b_.copy_(chosen_b);
      positions_b_.add_(1);
    }
  }

  void steps() {
    const at::NoGradGuard no_grad;
    const auto start = Clock::now();
    const auto places = static_cast<int64_t>(slots_.size());
    std::vector<int64_t> ids(slots_.size(), 0), positions(slots_.size(), 0);
    std::vector<double> draws(slots_.size() * static_cast<size_t>(kSteps), 0.0);
    const PhiloxStream stream(options_.sampling.seed, "generate");
    for (size_t i = 0; i < slots_.size(); ++i) {
      const Slot& slot = slots_[i];
      if (slot.is_free()) continue;
      ids[i] = slot.answer.back();
      positions[i] = slot.length;
      for (int64_t s = 0; s < kSteps && !options_.sampling.is_greedy(); ++s) {
        draws[static_cast<size_t>(s * places) + i] = stream.uniform(0, static_cast<uint64_t>(draw_names_[static_cast<size_t>(slot.prompt)]), slot.answer.size() + static_cast<uint64_t>(s));
      }
    }
    ids_b_.copy_(at::tensor(ids, at::kLong));
    positions_b_.copy_(at::tensor(positions, at::kLong));
    if (!options_.sampling.is_greedy()) draws_sb_.copy_(at::tensor(draws, at::kDouble).view({kSteps, places}));
    // What cuts to the best tokens sorts, and sorting asks the device.
    const bool can_record = options_.record && options_.sampling.top_k == 0 && options_.sampling.top_p >= 1;
    if (again_) {
      again_();
    } else if (can_record && is_warm_) {
      again_ = options_.record([this] { enqueue(); });
    } else {
      enqueue();  // libraries load and allocate when first called, which can't be recorded
      is_warm_ = true;
    }
    const at::Tensor said = said_sb_.to(at::kCPU);
    const auto* tokens = said.const_data_ptr<int64_t>();
    for (int64_t s = 0; s < kSteps; ++s) {
      int64_t given = 0;
      for (size_t i = 0; i < slots_.size(); ++i) {
        Slot& slot = slots_[i];
        if (slot.is_free()) continue;  // or ended within these steps
        ++given;
        ++slot.length;
        times_.cache_bytes += slot.length * bytes_per_token_;
        add(slot, tokens[s * places + static_cast<int64_t>(i)]);
      }
      times_.decode_tokens += given;
      times_.decode_passes += given > 0 ? 1 : 0;
    }
    times_.decode_seconds += seconds_since(start);
  }

  at::Tensor ids_b_, positions_b_, said_sb_, draws_sb_;
  std::function<void()> again_;
  bool is_warm_ = false;
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
  if (sampling.is_greedy() && logits_bv.is_cpu() && logits_bv.scalar_type() == at::kFloat && logits_bv.is_contiguous() && row_tiles() != nullptr) {
    std::vector<int64_t> best(static_cast<size_t>(logits_bv.size(0)));
    const int64_t v = logits_bv.size(1);
    const auto* logits = logits_bv.const_data_ptr<float>();
    in_crew(logits_bv.size(0), at::get_num_threads(), [&](int64_t i) { best[static_cast<size_t>(i)] = row_tiles()->largest(logits + i * v, v); });
    return best;
  }
  std::vector<double> uniform;
  const PhiloxStream draws(sampling.seed, "generate");
  for (size_t j = 0; j < samples.size() && !sampling.is_greedy(); ++j) {
    uniform.push_back(draws.uniform(0, static_cast<uint64_t>(samples[j]), static_cast<uint64_t>(positions[j])));
  }
  const at::Tensor host = chosen_tokens(logits_bv, sampling, at::tensor(uniform, at::kDouble).to(logits_bv.device())).to(at::kCPU, at::kLong).contiguous();
  const auto* tokens = host.const_data_ptr<int64_t>();
  return {tokens, tokens + logits_bv.size(0)};
}

void require_finite_logits(const at::Tensor& logits_rv, const std::vector<std::string>& ids) {
  const at::Tensor is_fine_r = at::isfinite(logits_rv).all(-1).cpu();
  for (int64_t r = 0; r < is_fine_r.size(0); ++r) {
    if (!is_fine_r[r].item<bool>()) {
      throw Error(ExitCode::kData, format("prompt '{}': the target's logits are not finite (NaN or infinity)", ids[static_cast<size_t>(r)]),
                  "its weights are damaged, or its type is too narrow for them: fetch the model again, or try it in float32 on a CPU");
    }
  }
}

GenerationTimes generate(const Target& target, const std::vector<Prompt>& prompts, const std::vector<int64_t>& which,
                         const GenerationOptions& options) {
  SF_CHECK(options.batch_size > 0 && options.max_new_tokens > 0, "a batch of {} and {} new tokens", options.batch_size, options.max_new_tokens);
  if (which.empty()) return {};
  return options.on_device ? DeviceDecoder(target, prompts, which, options).run() : Decoder(target, prompts, which, options).run();
}

}  // namespace sf
