#include "core/dist/rank_group.hpp"

#include <unistd.h>

#include <array>
#include <filesystem>
#include <thread>

#include "core/base/error.hpp"
#include "core/base/file.hpp"
#include "core/base/text.hpp"
#include "sf/json.hpp"

namespace sf {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr auto kPoll = milliseconds(5);
constexpr auto kExplainLimit = milliseconds(2500);   // some ticks of the watchdog: the launcher's note and another rank's word need one or two
constexpr auto kFinishLimit = milliseconds(10'000);

std::string text_of(const std::map<std::string, std::string>& values) {
  Json json = Json::object();
  for (const auto& [key, value] : values) {
    json.set(key, value);
  }
  return json.dump();
}

std::map<std::string, std::string> values_of(const std::string& text) {
  std::map<std::string, std::string> values;
  const Json json = Json::parse(text, "a rank's values");
  for (const auto& [key, value] : json.entries()) {
    values[key] = value.as_string();
  }
  return values;
}

// Only while ranks find each other: later on they finish their window and save together.
void refuse_when_stopped(const std::function<bool()>& stop_requested) {
  if (stop_requested && stop_requested()) {
    throw Error(ExitCode::kInterrupted, "asked to stop while ranks were still joining");
  }
}

std::string shown(const std::map<std::string, std::string>& values, const std::string& key) {
  const auto found = values.find(key);
  return found == values.end() ? "nothing" : found->second;
}

}  // namespace

std::unique_ptr<RankGroup> RankGroup::open(Options options) {
  auto group = std::unique_ptr<RankGroup>(new RankGroup(std::move(options)));
  const World& world = group->options_.world;
  const auto look_up = [&] {
    refuse_when_stopped(group->options_.stop_requested);
    const auto note = std::filesystem::path(world.folder) / "dead";
    if (!world.folder.empty() && std::filesystem::exists(note)) {
      if (!world.is_lead()) {  // rank 0 tells, or of rank 0 the launcher does
        group->options_.leave(ExitCode::kCommunication, "", "");
      }
      throw Error(ExitCode::kCommunication, read_file(note, ExitCode::kCommunication), "see the messages of that rank");
    }
  };
  group->store_ = RunStore::open(world, group->limit(), look_up);
  const milliseconds tick = world.size <= 32 ? milliseconds(200) : milliseconds(1000);
  group->watchdog_ = std::make_unique<Watchdog>(
      Watchdog::Options{.world = world, .limit = group->limit(), .tick = std::min(tick, group->limit() / 4), .leave = group->options_.leave},
      group->store_->another_connection(), group->progress_);
  return group;
}

namespace {

// Who says to be this rank.
std::string own_name(const World& world) {
  std::array<char, 256> host{};
  (void)::gethostname(host.data(), host.size() - 1);
  return Json::object({{"process", format("process {} on {}", ::getpid(), host.data())}, {"ranks", world.size}}).dump();
}

}  // namespace

void RankGroup::meet() {
  // Two that a launcher gave one number would answer for each other, and ranks that count differently would wait for one that nobody started.
  const std::string own = own_name(world()), key = "who/";
  const std::string known = store_->set_once(key + std::to_string(world().rank), own);
  if (known != own) {
    throw Error(ExitCode::kCommunication, format("two processes say that they are rank {} of {}: {} and {}", world().rank, world().size, Json::parse(known, "a rank's name").at("process").as_string(),
                                                 Json::parse(own, "a rank's name").at("process").as_string()),
                "check what the launcher sets (RANK, NODE_RANK, --node-rank): each process has a number of its own");
  }
  const std::vector<std::string> first = {key + "0"};
  for (const auto start = Clock::now(); !store_->has_all(first); std::this_thread::sleep_for(kPoll)) {
    throw_failure();
    refuse_when_stopped(options_.stop_requested);
    if (Clock::now() - start > limit()) {
      throw Error(ExitCode::kCommunication, format("rank 0 of {} did not arrive at the start of the run within {}", world().size, human_duration(static_cast<double>(limit().count()) / 1000.0)),
                  "see the messages of rank 0; training.dist_timeout is the limit");
    }
  }
  const int64_t ranks = Json::parse(store_->find(first[0]).value(), "a rank's name").at("ranks").as_int();
  if (ranks != world().size) {
    throw Error(ExitCode::kCommunication, format("rank {} was started as one of {} ranks, and rank 0 as one of {}", world().rank, world().size, ranks),
                "start all ranks with the same number of them (--nproc, --nnodes, WORLD_SIZE)");
  }
  (void)gather_texts("", "the start of the run");
}

RankGroup::~RankGroup() = default;

void RankGroup::throw_failure() const {
  if (const auto failure = watchdog_->failure()) {
    throw Error(failure->code, (failure->rank >= 0 ? format("rank {}: ", failure->rank) : "") + failure->what, failure->hint);
  }
}

std::vector<std::string> RankGroup::gather_texts(const std::string& text, std::string_view label) {
  const auto key_of = [&](int64_t round, int64_t rank) { return format("text/{}/{}", round, rank); };
  const int64_t round = gathers_++;
  std::vector<std::string> keys;
  for (int64_t rank = 0; rank < world().size; ++rank) {
    keys.push_back(key_of(round, rank));
  }
  store_->set(keys[static_cast<size_t>(world().rank)], text);
  const auto start = Clock::now();
  for (milliseconds pause = milliseconds(1); !store_->has_all(keys); pause = std::min(pause * 2, world().size <= 32 ? kPoll * 4 : kPoll * 40)) {
    throw_failure();
    if (round == 0) {  // of meet()
      refuse_when_stopped(options_.stop_requested);
    }
    if (Clock::now() - start > limit()) {
      const auto found = store_->find_all(keys);
      std::vector<int64_t> missing;
      for (size_t rank = 0; rank < found.size(); ++rank) {
        if (!found[rank]) {
          missing.push_back(static_cast<int64_t>(rank));
        }
      }
      if (!missing.empty()) {
        throw Error(ExitCode::kCommunication,
                    format("{} of {} did not arrive at {} within {}", rank_list(missing), world().size, label,
                           human_duration(static_cast<double>(limit().count()) / 1000.0)),
                    "were all ranks started, with the same recipe? see their messages; training.dist_timeout is the limit");
      }
    }
    std::this_thread::sleep_for(pause);
  }
  std::vector<std::string> texts;
  for (auto& found : store_->find_all(keys)) {
    texts.push_back(std::move(found).value());
  }
  if (round > 0) {  // whoever is in this round has read the one before
    store_->erase(key_of(round - 1, world().rank));
  }
  return texts;
}

void RankGroup::require_same(const std::map<std::string, std::string>& values, std::string_view what, const char* hint) {
  const std::string mine = text_of(values);
  const std::vector<std::string> hashes = gather_texts(sha256(mine), what);
  std::vector<int64_t> different;
  for (size_t rank = 1; rank < hashes.size(); ++rank) {
    if (hashes[rank] != hashes[0]) {
      different.push_back(static_cast<int64_t>(rank));
    }
  }
  if (different.empty()) {
    return;
  }
  const std::vector<std::string> texts = gather_texts(mine, what);
  const auto first = values_of(texts[0]);
  const auto other = values_of(texts[static_cast<size_t>(different[0])]);
  std::map<std::string, std::string> keys = first;
  keys.insert(other.begin(), other.end());
  std::vector<std::string> sentences;
  for (const auto& [key, ignored] : keys) {
    if (shown(first, key) != shown(other, key)) {
      sentences.push_back(format("{} is {} on rank 0 and {} on rank {}", key, shown(first, key), shown(other, key), different[0]));
    }
  }
  constexpr size_t kShown = 5;
  const size_t more = sentences.size() > kShown ? sentences.size() - kShown : 0;
  sentences.resize(sentences.size() - more);
  throw Error(ExitCode::kCommunication,
              format("{} {} from rank 0 in {}: {}{}", rank_list(different), different.size() == 1 ? "differs" : "differ", what, join(sentences, "; "),
                     more > 0 ? format("; and {} more", more) : ""),
              hint);
}

void RankGroup::explain(const std::string& label, int64_t number, const std::string& reason) {
  std::vector<int64_t> silent;
  if (!watchdog_->wait_for_failure(kExplainLimit)) {
    try {
      silent = watchdog_->silent_ranks(*store_, std::min(kExplainLimit, limit()));
    } catch (const Error&) {  // the store is gone: the watchdog says so
      (void)watchdog_->wait_for_failure(kExplainLimit);
    }
  }
  throw_failure();
  throw Error(ExitCode::kCommunication,
              format("collective '{}' (number {} of this run) failed on rank {}: {}", label, number, world().rank,
                     silent.empty() ? reason : format("{} no longer {} there ({})", rank_list(silent), silent.size() == 1 ? "is" : "are", reason)),
              "see the messages of the other ranks; --resume auto goes on from the last checkpoint");
}

Failure RankGroup::report(const Error& error) {
  Failure own{.rank = world().rank, .code = error.code(), .what = error.what(), .hint = error.hint()};
  Failure first = own;
  watchdog_->stand_down();
  try {
    first = Failure::from_text(store_->set_once("failure", own.to_text()));
    wait_for_others(*store_, world(), milliseconds(2000));
  } catch (const Error&) {  // the store is gone with rank 0: nobody to tell
    first.rank = -2;
  }
  return first;
}

void RankGroup::finish() {
  (void)gather_texts("done", "the end of the run");
  watchdog_->stand_down();
  try {
    wait_for_others(*store_, world(), kFinishLimit);
  } catch (const Error&) {  // all work is done; rank 0 was faster
  }
}

}  // namespace sf
