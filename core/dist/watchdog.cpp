#include "core/dist/watchdog.hpp"

#include <charconv>
#include <filesystem>

#include "core/base/file.hpp"
#include "core/base/log.hpp"
#include "core/base/text.hpp"
#include "sf/json.hpp"

namespace sf {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr auto kAbortLimit = milliseconds(2000);   // ncclCommAbort may wait for a kernel that never ends
constexpr int64_t kTicksOfSilence = 5;             // without a word from a rank
constexpr auto kGoodbyeLimit = milliseconds(2000); // rank 0 keeps the store open so long for others to read why

milliseconds since(Clock::time_point start) { return std::chrono::duration_cast<milliseconds>(Clock::now() - start); }

std::string key_of(int64_t rank) { return "at/" + std::to_string(rank); }

std::string duration_text(milliseconds limit) { return human_duration(static_cast<double>(limit.count()) / 1000.0); }

// "BEAT NUMBER LABEL" of a rank.
struct Word {
  int64_t issued = 0;
  std::string label;
};

Word parse_word(const std::string& text) {
  Word word;
  const size_t first = text.find(' '), second = first == std::string::npos ? first : text.find(' ', first + 1);
  if (second != std::string::npos) {  // else of a rank of another build, of which require_same tells
    std::from_chars(text.data() + first + 1, text.data() + second, word.issued);
    word.label = text.substr(second + 1);
  }
  return word;
}

}  // namespace

std::string rank_list(const std::vector<int64_t>& ranks) {
  constexpr size_t kShown = 8;
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size() && i < kShown; ++i) {
    const bool is_last = i + 1 == ranks.size();
    text += (i == 0 ? "" : is_last ? " and " : ", ") + std::to_string(ranks[i]);
  }
  return ranks.size() <= kShown ? text : text + format(" and {} more", ranks.size() - kShown);
}

int64_t Progress::issue(const std::string& label, std::function<bool()> is_done) {
  const std::lock_guard lock(mutex_);
  label_ = label;
  in_flight_.push_back({.number = ++issued_, .label = label, .issued = Clock::now(), .is_done = std::move(is_done)});
  return issued_;
}

void Progress::finish(int64_t number) {
  const std::lock_guard lock(mutex_);
  for (Entry& entry : in_flight_) {
    entry.finished = entry.finished || entry.number == number;
  }
  while (!in_flight_.empty() && in_flight_.front().finished) {
    in_flight_.pop_front();
    last_done_ = Clock::now();
  }
}

Progress::State Progress::look() {
  const std::lock_guard lock(mutex_);
  while (!in_flight_.empty() && (in_flight_.front().finished || (in_flight_.front().is_done && in_flight_.front().is_done()))) {
    in_flight_.pop_front();
    last_done_ = Clock::now();
  }
  State state{.issued = issued_, .label = label_, .stuck = 0, .stuck_label = {}, .stuck_for = milliseconds(0)};
  if (!in_flight_.empty()) {
    const Entry& oldest = in_flight_.front();
    state.stuck = oldest.number;
    state.stuck_label = oldest.label;
    state.stuck_for = since(std::max(oldest.issued, last_done_));
  }
  return state;
}

std::string Failure::to_text() const {
  Json json = Json::object();
  json.set("rank", rank).set("code", static_cast<int64_t>(code)).set("what", what).set("hint", hint);
  return json.dump();
}

Failure Failure::from_text(const std::string& text) {
  try {
    const Json json = Json::parse(text, "the run's failure");
    return {.rank = json.at("rank").as_int(),
            .code = static_cast<ExitCode>(json.at("code").as_int()),
            .what = json.at("what").as_string(),
            .hint = json.at("hint").as_string()};
  } catch (const JsonError& error) {  // a failure all the same
    return {.rank = -1, .code = ExitCode::kCommunication, .what = format("a rank failed, and its reason can't be read: {}", error.what()),
            .hint = "see the messages of the other ranks; do all of them run the same build?"};
  }
}

Watchdog::Watchdog(Options options, std::unique_ptr<RunStore> store, Progress& progress)
    : options_(std::move(options)), store_(std::move(store)), progress_(progress), seen_(static_cast<size_t>(options_.world.size)) {
  thread_ = std::thread([this] { run(); });
}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Watchdog::set_abort(std::function<void()> abort) {
  const std::lock_guard lock(mutex_);
  abort_ = std::move(abort);
}

void Watchdog::set_problem(std::function<std::string()> problem) {
  const std::lock_guard lock(mutex_);
  problem_ = std::move(problem);
}

void Watchdog::stand_down() {
  const std::lock_guard lock(mutex_);
  stop_ = true;
  changed_.notify_all();
}

std::optional<Failure> Watchdog::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

std::optional<Failure> Watchdog::wait_for_failure(milliseconds limit) const {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, limit, [&] { return failure_.has_value(); });
  return failure_;
}

template <class Wait>
std::vector<int64_t> Watchdog::unchanged_ranks(RunStore& store, const Wait& wait) const {
  std::vector<std::string> keys;
  for (int64_t rank = 0; rank < options_.world.size; ++rank) {
    keys.push_back(key_of(rank));
  }
  const auto before = store.find_all(keys);
  wait();
  const auto after = store.find_all(keys);
  std::vector<int64_t> unchanged;
  for (size_t rank = 0; rank < keys.size(); ++rank) {
    if (before[rank] == after[rank]) {
      unchanged.push_back(static_cast<int64_t>(rank));
    }
  }
  return unchanged;
}

std::vector<int64_t> Watchdog::silent_ranks(RunStore& store, milliseconds window) const {
  return unchanged_ranks(store, [&] { std::this_thread::sleep_for(window); });
}

void Watchdog::run() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    lock.unlock();
    try {
      tick();
    } catch (const std::exception& error) {  // mostly the store is gone
      const auto* known = dynamic_cast<const Error*>(&error);
      const std::lock_guard again(mutex_);
      if (!stop_) {
        failure_ = Failure{.rank = -1, .code = ExitCode::kCommunication, .what = error.what(), .hint = known != nullptr ? known->hint() : ""};
        changed_.notify_all();
      }
    }
    lock.lock();
    if (stop_) {  // stood down in this tick: the rank leaves on its own account
      return;
    }
    if (failure_ && failure_->rank != options_.world.rank) {
      const Failure found = *failure_;
      lock.unlock();
      end_process(found);
      return;
    }
    changed_.wait_for(lock, options_.tick, [&] { return stop_; });
  }
}

void Watchdog::tick() {
  const Progress::State state = progress_.look();
  beat(state);
  if (!failure()) {
    look_for_dead_ranks();
    look_for_problem(state);
    look_for_stuck(state);
    if (options_.world.is_lead()) {
      look_for_silence();
    }
  }
  if (const auto text = store_->find("failure")) {
    const std::lock_guard lock(mutex_);
    failure_ = Failure::from_text(*text);
    changed_.notify_all();
  }
}

void Watchdog::beat(const Progress::State& state) { store_->set(key_of(options_.world.rank), format("{} {} {}", ++beat_, state.issued, state.label)); }

void Watchdog::tell(Failure failure) {
  failure.rank = -1;  // no rank's own mistake: every rank is to end, this one too
  store_->set_once("failure", failure.to_text());
}

// The launcher on this machine sees at once when a rank dies without a word, and leaves a note.
void Watchdog::look_for_dead_ranks() {
  if (options_.world.folder.empty()) {
    return;
  }
  const auto note = std::filesystem::path(options_.world.folder) / "dead";
  std::error_code ignored;
  if (std::filesystem::exists(note, ignored)) {
    tell({.rank = -1, .code = ExitCode::kCommunication, .what = read_file(note, ExitCode::kCommunication),
          .hint = "the log of that rank, or the kernel's (out of memory?), says why; --resume auto goes on from the last checkpoint"});
  }
}

void Watchdog::look_for_problem(const Progress::State& state) {
  std::function<std::string()> ask;
  {
    const std::lock_guard lock(mutex_);
    ask = problem_;
  }
  if (const std::string problem = ask ? ask() : ""; !problem.empty()) {
    std::this_thread::sleep_for(options_.tick);  // the launcher's note may say more
    look_for_dead_ranks();
    tell({.rank = -1, .code = ExitCode::kCommunication,
          .what = format("rank {}, collective '{}' (number {} of this run): {}", options_.world.rank, state.stuck_label, state.stuck, problem),
          .hint = "see the messages of the other ranks; NCCL_DEBUG=INFO says more"});
  }
}

// Ranks that do not tick any more: stopped, swapped out, or their machine is gone. Takes some ticks, in which this rank goes on with its own, as others may be asking, too.
std::vector<int64_t> Watchdog::silent_others(const Progress::State& state) {
  return unchanged_ranks(*store_, [&] {
    std::unique_lock lock(mutex_);
    for (int64_t tick = 0; tick < kTicksOfSilence && !stop_; ++tick) {
      changed_.wait_for(lock, options_.tick, [&] { return stop_; });
      lock.unlock();
      beat(state);
      lock.lock();
    }
  });
}

void Watchdog::look_for_stuck(const Progress::State& state) {
  if (state.stuck == 0 || state.stuck_for < options_.limit) {
    return;
  }
  std::vector<int64_t> missing;
  std::string others, last;
  for (int64_t rank = 0; rank < options_.world.size; ++rank) {
    const auto text = store_->find(key_of(rank));
    const Word word = text ? parse_word(*text) : Word{};
    if (word.issued < state.stuck) {
      missing.push_back(rank);
      if (last.empty()) {
        last = word.issued == 0 ? "it has issued none" : format("the last of rank {}: '{}', number {}", rank, word.label, word.issued);
      }
    } else if (word.issued == state.stuck && word.label != state.stuck_label && others.empty()) {
      others = format("rank {} issued '{}' instead", rank, word.label);
    }
  }
  const std::string which = format("collective '{}' (number {} of this run) did not finish within {}", state.stuck_label, state.stuck,
                                   duration_text(options_.limit));
  // A rank that waits for another one's part of the collective before has not arrived either, and is not to blame.
  const std::vector<int64_t> silent = silent_others(state);
  look_for_dead_ranks();  // the launcher's note says more
  const std::string no_word = silent.empty()                            ? std::string()
                              : silent == missing && silent.size() == 1 ? ", and says nothing any more"
                                                                        : format(", and {} {} nothing any more", rank_list(silent), silent.size() == 1 ? "says" : "say");
  const std::string why = !missing.empty() ? format("{} had not arrived{}; {}", rank_list(missing), no_word, last)
                          : !others.empty() ? others
                          : !silent.empty() ? format("all ranks had arrived{}", no_word)
                                            : "all ranks had arrived, so the network or a device hangs";
  tell({.rank = -1, .code = ExitCode::kCommunication, .what = format("{}: {}", which, why),
        .hint = "look at the ranks that had not arrived; training.dist_timeout is the limit"});
}

void Watchdog::look_for_silence() {
  for (int64_t rank = 1; rank < options_.world.size; ++rank) {
    auto& [word, when] = seen_[static_cast<size_t>(rank)];
    const auto now = store_->find(key_of(rank));
    if (!now) {
      continue;  // has not joined yet: the rendezvous has a limit of its own
    }
    if (*now != word) {
      word = *now;
      when = Clock::now();
    } else if (since(when) > options_.limit) {
      const Word last = parse_word(word);
      tell({.rank = -1, .code = ExitCode::kCommunication,
            .what = format("rank {} has been silent for {}; its last collective was '{}' (number {})", rank, duration_text(options_.limit), last.label, last.issued),
            .hint = "did its machine go down? --resume auto goes on from the last checkpoint"});
      return;
    }
  }
}

void Watchdog::end_process(const Failure& failure) {
  std::function<void()> abort;
  {
    const std::lock_guard lock(mutex_);
    abort = abort_;
  }
  if (abort) {
    auto done = std::make_shared<std::pair<std::mutex, std::condition_variable>>();
    auto finished = std::make_shared<bool>(false);
    std::thread([abort, done, finished] {
      abort();
      const std::lock_guard lock(done->first);
      *finished = true;
      done->second.notify_all();
    }).detach();
    std::unique_lock lock(done->first);
    done->second.wait_for(lock, kAbortLimit, [&] { return *finished; });
  }
  const World& world = options_.world;
  const bool store_is_gone = failure.what.starts_with("the run's store");
  try {
    if (!store_is_gone) {
      wait_for_others(*store_, world, kGoodbyeLimit);
    }
  } catch (const Error&) {  // then nobody waits for this rank either
  }
  const bool tells = world.is_lead() || (store_is_gone && world.folder.empty());  // the launcher tells of rank 0's death
  const std::string who = failure.rank >= 0 ? format("rank {}: ", failure.rank) : world.is_lead() ? "" : format("rank {}: ", world.rank);
  options_.leave(failure.code, tells ? who + failure.what : "", tells ? failure.hint : "");
}

void wait_for_others(RunStore& store, const World& world, milliseconds limit) {
  const auto key = [](int64_t rank) { return "left/" + std::to_string(rank); };
  store.set(key(world.rank), "");
  if (!world.is_lead()) {
    return;
  }
  std::vector<std::string> keys;
  for (int64_t rank = 0; rank < world.size; ++rank) {
    keys.push_back(key(rank));
  }
  for (const auto start = Clock::now(); !store.has_all(keys) && since(start) < limit;) {
    std::this_thread::sleep_for(milliseconds(5));
  }
}

}  // namespace sf
