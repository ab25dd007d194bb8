// The verb `train`: windows, evaluation, checkpoints, stop.
#include "core/train/verbs.hpp"

#include <ATen/ATen.h>

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/file.hpp"
#include "core/base/log.hpp"
#include "core/base/text.hpp"
#include "core/checkpoint/resume.hpp"
#include "core/checkpoint/retention.hpp"
#include "core/checkpoint/save.hpp"
#include "core/plan/plan.hpp"
#include "core/recipe/rules.hpp"
#include "core/train/draft_buffers.hpp"
#include "core/train/evaluate.hpp"
#include "core/train/metrics.hpp"
#include "core/train/ranks.hpp"
#include "core/train/saved_run.hpp"
#include "core/train/schedule.hpp"
#include "core/train/session.hpp"
#include "core/train/soundness.hpp"
#include "core/train/staging.hpp"
#include "core/train/step.hpp"
#include "core/train/tracking.hpp"
#include "sf/checkpoint.h"

namespace sf {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kNoStep = -1;  // of the metrics of an earlier run in this folder: a fresh start is another run

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// How many windows the run has, and how many the schedule is laid out for.
struct Horizon {
  int64_t windows = 0, schedule = 0;
};

Horizon horizon_of(const Plan& plan, int64_t samples, const WindowShape& shape, bool is_lead) {
  const int64_t epochs = plan.get<int64_t>("training.num_epochs");
  const int64_t max_steps = plan.get<int64_t>("training.max_steps");
  const int64_t total_steps = plan.get<int64_t>("training.total_steps");
  const int64_t in_epochs = (samples * epochs + shape.entries() - 1) / shape.entries();
  Horizon horizon;
  horizon.windows = max_steps > 0 ? std::min(max_steps, in_epochs) : in_epochs;
  horizon.schedule = total_steps > 0 ? total_steps : max_steps > 0 ? max_steps : in_epochs;
  if (max_steps > in_epochs && is_lead) {
    log_warn("training.max_steps = {} is not reached: {} samples x {} epochs are {} updates", max_steps, samples, epochs, in_epochs);
  }
  return horizon;
}

void make_run_folder(const std::filesystem::path& folder) {
  std::error_code failed;
  std::filesystem::create_directories(folder, failed);
  if (failed) {
    throw Error(ExitCode::kCheckpoint, "can't make the run folder " + folder.string() + ": " + failed.message(),
                "set output_dir to a folder that you can write");
  }
}

class TrainingRun {
 public:
  TrainingRun(const EngineContext& context, const TrainArguments& arguments, Ranks& ranks)
      : context_(context), plan_(*context.plan), session_(open_session(context, &ranks)) {
    window_shape_ = {.ranks = session_->rank_count(),
                     .accumulation_steps = plan_.get<int64_t>("training.accumulation_steps"),
                     .batch_size = plan_.get<int64_t>("training.batch_size")};
    features_ = open_features(*session_, plan_.get<std::filesystem::path>("data.hidden_states_path"), "data.hidden_states_path");
    source_ = sample_source(*features_);
    const auto held_out = plan_.get<std::filesystem::path>("data.eval_hidden_states_path");
    if (!held_out.empty()) {
      held_out_ = open_features(*session_, held_out, "data.eval_hidden_states_path");
      if (session_->is_lead() && held_out_->fingerprint() == features_->fingerprint()) {
        log_warn("data.eval_hidden_states_path holds the same samples as data.hidden_states_path: what was trained on says nothing about new text");
      }
    } else if (plan_.get<int64_t>("training.eval_interval") > 0) {
      throw Error(ExitCode::kUsage, "training.eval_interval is set, but data.eval_hidden_states_path is not",
                  "name held-out features, or set training.eval_interval = 0");
    }
    horizon_ = horizon_of(plan_, source_.size, window_shape_, session_->is_lead());
    rate_ = std::make_unique<LearningRate>(plan_.get<std::string>("training.lr_scheduler"), plan_.get<double>("training.learning_rate"),
                                           plan_.get<double>("training.warmup_ratio"), horizon_.schedule);
    fields_ = std::make_unique<BatchFields>(
        session_->description, find_prototype(source_, *session_->algorithm, session_->seed, /*evaluating=*/false));
    optimizer_ = std::make_unique<AdamW>(session_->sharding->shards(),
                                         AdamWOptions{.weight_decay = plan_.get<double>("training.weight_decay"),
                                                      .max_grad_norm = plan_.get<double>("training.max_grad_norm")});
    trainer_ = std::make_unique<Trainer>(*session_->algorithm, session_->description, *session_->sharding, *session_->runner, *optimizer_,
                                         session_->placement);
    progress_.updates_total = horizon_.schedule;
    tell_about_windows();
    compare_data();
    compare_lengths();
    if (session_->is_lead()) {  // the others read what rank 0 has made, never make it
      make_run_folder(session_->run_folder);
      lock_ = std::make_unique<FolderLock>(session_->run_folder, ExitCode::kCheckpoint, "another process is training in this run folder",
                                         "wait for it, stop it, or choose another run_id or output_dir");
    }
    require_shared_folder();
    details_interval_ = arguments.details_interval;
    start_from(arguments);
    tell_about_schedule();
    if (const auto best = told_by_lead(*session_, session_->is_lead() ? best_text() : "", "the best checkpoint so far"); !best.empty()) {
      best_score_ = std::stod(best);
    }
    const SnapshotTensors saved = snapshot_tensors(*session_, *optimizer_);
    int64_t snapshot_bytes = 0;
    for (const int64_t bytes : saved.bytes()) {
      snapshot_bytes += bytes;
    }
    staging_ = std::make_shared<Staging>(saved.bytes(), staging_size(plan_, snapshot_bytes), session_->placement.device);
    is_beside_ = writes_beside_training(plan_);
    saver_ = std::make_unique<CheckpointSaver>(session_->run_folder, checkpoint_writer(), save_peers(), is_beside_);
    if (session_->is_lead()) {
      metrics_file_ = std::make_unique<MetricsFile>(session_->run_folder / "metrics.jsonl", resumed_ ? progress_.update : kNoStep);
      trackers_ = std::make_unique<Trackers>(context_.plugins, Trackers::Run{.run_id = plan_.get<std::string>("run_id"),
                                                                             .run_folder = std::filesystem::absolute(session_->run_folder),
                                                                             .recipe = plan_.recipe_text(),
                                                                             .updates_done = progress_.update,
                                                                             .updates_total = horizon_.windows});
      atomic_write(session_->run_folder / "recipe.toml", plan_.recipe_text(), ExitCode::kCheckpoint);
    }
  }

  Json run() {
    if (progress_.update >= horizon_.windows) {
      log_info("nothing to do: all {} updates are done", horizon_.windows);
      return summary();
    }
    if (held_out_ != nullptr && progress_.update == 0) {
      first_evaluation_ = evaluate_held_out();
      if (interrupted_) {
        log_info("asked to stop before the first update: there is nothing to save");
      }
    }
    if (!interrupted_) {
      try {
        train_windows();
        finish_save();
      } catch (const Error& error) {
        keep_finished_updates(error);
      }
    }
    if (trackers_ != nullptr) {
      trackers_->finish();
    }
    return summary();
  }

 private:
  void start_from(const TrainArguments& arguments) {
    if (!arguments.resume.empty() && !arguments.init_from.empty()) {
      throw Error(ExitCode::kUsage, "--resume and --init-from exclude each other",
                  "--resume goes on with a run; --init-from starts a new one from its weights");
    }
    if (!arguments.resume.empty()) {
      if (const auto checkpoint = resumed_checkpoint(arguments.resume)) {
        refuse_other_run(checkpoint->folder());
        progress_ = restore(*checkpoint, *session_, *optimizer_, *features_, horizon_.schedule);
        count_windows_left();
        log_info("going on from {} ({} of {} updates done)", checkpoint->folder().string(), progress_.update, horizon_.windows);
        resumed_ = true;
        resumed_update_ = saved_update_ = committed_update_ = progress_.update;
        compare_named_buffers(*session_, checkpoint->folder().string());
        return;
      }
      log_info("no checkpoint in {} yet: a fresh start", session_->run_folder.string());
    } else if (const auto newest = newest_own_step()) {
      throw Error(ExitCode::kUsage, session_->run_folder.string() + " already holds checkpoints (newest: step " + std::to_string(*newest) + ")",
                  "--resume auto goes on with it; another run_id or output_dir starts anew");
    }
    if (!arguments.init_from.empty()) {
      const std::filesystem::path source = restore_weights_from(arguments.init_from, *session_);
      compare_named_buffers(*session_, source.string());
      log_info("weights from {}", source.string());
      optimizer_->reload_masters();
    } else {
      // Rank 0 counts and keeps the result; the others find it, or count again where it is out of their sight.
      if (session_->is_lead()) {
        make_draft_buffers(*session_, *features_);
      }
      (void)told_by_lead(*session_, "", "the draft's vocabulary");
      if (!session_->is_lead()) {
        make_draft_buffers(*session_, *features_);
      }
    }
  }

  // Which sample goes to which rank is arithmetic, so the same numbers have to mean the same samples everywhere.
  void compare_data() const {
    if (session_->ranks == nullptr) {
      return;
    }
    std::map<std::string, std::string> values = {{"the target", session_->target_fingerprint.substr(0, 16)}};
    const auto add = [&](const char* key, const FeatureStore* features) {
      if (features != nullptr) {
        values[key] = format("{} ({} samples)", features->fingerprint().substr(0, 16), features->size());
      }
    };
    add("data.hidden_states_path", features_.get());
    add("data.eval_hidden_states_path", held_out_.get());
    session_->ranks->require_same(values, "the data", "bring the same files to every machine, or put them on a disk that all of them see");
  }

  // Each rank writes its part of a checkpoint into the folder that rank 0 makes; better known now than at the first save.
  void require_shared_folder() const {
    Comm* comm = session_->placement.comm;
    if (comm == nullptr) {
      return;
    }
    const std::filesystem::path folder = std::filesystem::absolute(session_->run_folder);
    std::string name;
    if (session_->is_lead()) {
      name = format(".ranks-{}-{}", ::getpid(), std::chrono::system_clock::now().time_since_epoch().count());
      atomic_write(folder / name, "every rank has to see this\n", ExitCode::kCheckpoint);
    }
    name = told_by_lead(*session_, name, "the run folder");
    constexpr auto kPatience = std::chrono::seconds(10);   // a disk of the network may show it late
    const auto end = Clock::now() + kPatience;
    std::error_code ignored;
    while (!std::filesystem::exists(folder / name, ignored) && Clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    std::array<char, 256> host{};
    (void)::gethostname(host.data(), host.size() - 1);
    const auto lacks = comm->gather_texts(std::filesystem::exists(folder / name, ignored) ? "" : format("{} on {}", folder.string(), host.data()), "the run folder");
    if (session_->is_lead()) {
      std::filesystem::remove(folder / name, ignored);
    }
    for (size_t rank = 0; rank < lacks.size(); ++rank) {
      if (!lacks[rank].empty()) {
        throw Error(ExitCode::kCheckpoint, format("rank {} does not see what rank 0 writes into the run folder: {} is another folder than rank 0's, or none", rank, lacks[rank]),
                    "set output_dir to a folder on a disk that the machines of all ranks share: each rank saves its part of a checkpoint there");
      }
    }
  }

  // Of rank 0, who says it for all. A save that was cut short is nothing to go on with, so it keeps no other start from this folder.
  std::optional<int64_t> newest_own_step() const {
    for (const FoundCheckpoint& found : session_->is_lead() ? list_checkpoints(session_->run_folder) : std::vector<FoundCheckpoint>()) {
      if (found.state != FoundCheckpoint::State::unfinished) {
        return found.step;
      }
    }
    return std::nullopt;
  }

  // The first save drops what lies behind the step that a run goes on from: in a folder with steps of its own that would be another run's work.
  void refuse_other_run(const std::filesystem::path& step_folder) const {
    const std::optional<int64_t> newest = newest_own_step();
    std::error_code unknown;
    const auto is_here = [&](const std::filesystem::path& step) {
      return std::filesystem::equivalent(std::filesystem::absolute(step, unknown).parent_path(), session_->run_folder, unknown);
    };
    if (newest && !is_here(step_folder) && !is_here(std::filesystem::canonical(step_folder, unknown))) {
      throw Error(ExitCode::kUsage, format("--resume names {}, of another run, and {} holds checkpoints of its own (newest: step {})", step_folder, session_->run_folder,
                                           *newest),
                  "go on with that run in its own folder (run_id, output_dir), or choose a run_id for what is to become of it here");
    }
  }

  // Windows of another number of ranks took other parts of the stream; what counts is where they ended.
  void count_windows_left() {
    const int64_t max_steps = plan_.get<int64_t>("training.max_steps");
    const SampleOrder order(session_->seed, source_.size, plan_.get<int64_t>("training.num_epochs"));
    const int64_t in_epochs = progress_.update + order.windows_left(progress_.stream_position, window_shape_).value_or(0);
    horizon_.windows = max_steps > 0 ? std::min(max_steps, in_epochs) : in_epochs;
  }

  // Which checkpoint "auto" means is rank 0's to say: on a shared disk another rank may see an older state. It also reads every byte, for all of them.
  std::optional<CheckpointReader> resumed_checkpoint(const std::string& wanted) const {
    std::optional<CheckpointReader> found = session_->is_lead() ? open_checkpoint(session_->run_folder, wanted) : std::nullopt;
    const std::string folder = told_by_lead(*session_, found ? found->folder().string() : "", "the checkpoint to go on from");
    if (!found && !folder.empty()) {
      found = CheckpointReader::open(folder, CheckpointReader::Verify::sizes);
    }
    return found;
  }

  // The score to beat. One of a future that this run has left is none, nor one on other samples.
  std::string best_text() const {
    const auto best = read_best(session_->run_folder);
    if (!best || held_out_ == nullptr || (resumed_ && best->step > resumed_update_)) {
      return "";
    }
    if (!are_comparable(*best, {.measured_on = measured_on()})) {
      log_warn("step {} is the best so far on other held-out samples ({}) than this run has ({}): the next evaluation is the new best", best->step, best->measured_on,
               measured_on());
      return "";
    }
    return to_text(best->score);
  }

  std::string measured_on() const {
    const int64_t most = plan_.get<int64_t>("training.eval_max_samples");
    return format("{}, {} samples", held_out_->fingerprint().substr(0, 16), most > 0 ? std::min(most, held_out_->size()) : held_out_->size());
  }

  void tell_about_schedule() const {
    if (!session_->is_lead() || progress_.update >= horizon_.windows) {
      return;
    }
    if (horizon_.windows < rate_->warm()) {
      log_warn("the run's {} updates all lie in the warm-up, which takes {} of the schedule's {}: the learning rate reaches {}", horizon_.windows, rate_->warm(), horizon_.schedule,
               rate_->at(horizon_.windows - 1));
    }
    if (horizon_.schedule < horizon_.windows && plan_.get<std::string>("training.lr_scheduler") != "constant") {
      log_warn("training.total_steps = {} is less than the run's {} updates: those after it keep the schedule's last learning rate, {}", horizon_.schedule,
               horizon_.windows, rate_->at(horizon_.schedule));
    }
  }

  SavePeers save_peers() const {
    Comm* comm = session_->placement.comm;
    if (comm == nullptr) {
      return {};
    }
    return {.rank = static_cast<int>(comm->rank()),
            .world_size = static_cast<int>(comm->size()),
            .gather = [comm](const std::string& text, std::string_view label) { return comm->gather_texts(text, label); }};
  }

  // A draft that guesses further than the samples go learns nothing about the rest.
  void compare_lengths() const {
    const Description& description = session_->description;
    const bool unrolls = description.rows_per_token > 0;
    const int64_t needed = unrolls ? description.rows_per_token + 1 : description.rows_per_slot;
    constexpr int64_t kLookedAt = 100;    // for the share; all of them to say that there is none
    int64_t looked = 0, long_enough = 0, longest = 0;
    while (looked < features_->size() && (looked < kLookedAt || long_enough == 0)) {
      const auto tokens = static_cast<int64_t>(features_->sample_tokens(looked++).input_ids.size());
      longest = std::max(longest, tokens);
      long_enough += tokens >= needed ? 1 : 0;
    }
    const std::string what = unrolls ? format("training.ttt_length = {}", description.rows_per_token) : format("blocks of {} tokens", description.rows_per_slot);
    const char* fix = unrolls ? "lower training.ttt_length, or train on longer conversations" : "lower model.draft_block_size, or train on longer conversations";
    if (looked > 0 && long_enough == 0) {
      throw Error(ExitCode::kUsage, format("{}, and none of the {} samples is that long: the longest has {} tokens, {} are needed", what, looked, longest, needed), fix);
    }
    if (session_->is_lead() && 2 * long_enough < looked) {
      log_warn("{}, and only {} of the {} samples are that long ({} tokens): the last guesses learn from few of them; {}", what, long_enough,
               looked < features_->size() ? format("first {}", looked) : format("{}", looked), needed, fix);
    }
  }

  void tell_about_windows() const {
    if (!session_->is_lead()) {
      return;
    }
    if (window_shape_.entries() > source_.size) {
      log_info("a window takes {} samples, and there are {}: it goes through the data more than once", window_shape_.entries(), source_.size);
    }
    if (session_->placement.comm == nullptr) {
      return;
    }
    log_info("{} ranks x {} micro-steps x {} samples: {} samples in a window", window_shape_.ranks, window_shape_.accumulation_steps,
             window_shape_.batch_size, window_shape_.entries());
  }

  // The failed window changed nothing, so what was done before it is worth keeping. Numbers that are not finite are the exception: the
  // updates before them have most likely gone wrong already.
  [[noreturn]] void keep_finished_updates(const Error& error) {
    // Alone, or when all ranks leave the same window, what is being saved can be finished; it was taken from updates that were good.
    const bool all_leave = session_->placement.comm == nullptr || all_failed_ || diverged_;
    std::string kept;
    if (all_leave && error.code() != ExitCode::kCheckpoint && error.code() != ExitCode::kDevice) {
      try {
        finish_save();
        if (!diverged_ && progress_.update != saved_update_) {
          save(std::nullopt);
          finish_save();
          kept = "saved step " + std::to_string(progress_.update) + " before leaving";
        }
      } catch (const Error& failed) {  // what ended the run is what is told; this beside it
        kept = failed.what();
      }
    }
    if (kept.empty()) {
      kept = committed_update_ > 0 ? "the last checkpoint is step " + std::to_string(committed_update_) : "nothing was saved";
    }
    throw Error(error.code(), std::string(error.what()) + "; " + kept, error.hint());
  }

  void train_windows() {
    WindowLoader loader(source_, *session_->algorithm, *fields_,
                        {.seed = session_->seed,
                         .window = window_shape_,
                         .rank = session_->rank(),
                         .epochs = plan_.get<int64_t>("training.num_epochs"),
                         .batch = session_->batch_shape,
                         .first_window = progress_.update,
                         .last_window = horizon_.windows,
                         .first_position = progress_.stream_position});
    const int64_t log_interval = std::max<int64_t>(1, plan_.get<int64_t>("training.log_interval"));
    const int64_t eval_interval = plan_.get<int64_t>("training.eval_interval");
    const int64_t save_interval = plan_.get<int64_t>("training.save_interval");
    const int64_t first_update = progress_.update;
    const auto start = Clock::now();
    SampleOrder order(session_->seed, source_.size, plan_.get<int64_t>("training.num_epochs"));
    double elapsed_logged = 0, waited_logged = 0;
    bool some_beside_save = false;
    int64_t tokens_logged = 0, own_tokens_logged = 0, positions_logged = 0, samples_logged = 0, updates_logged = 0;
    if (session_->batch_shape.is_static) {
      log_info("static shapes: batches are padded to {} tokens and {} block slots", session_->batch_shape.lengths(), session_->description.slots);
    }

    std::optional<Window> upcoming;  // taken early, so that its first batch is on the device when its turn comes
    const auto take_upcoming = [&]() -> const Window* {
      if (!upcoming) {
        upcoming = loader.try_next();
      }
      return upcoming ? &*upcoming : nullptr;
    };
    while (progress_.update < horizon_.windows) {
      const auto window_start = Clock::now();
      const Window window = upcoming ? std::move(*upcoming) : next_window(loader);
      upcoming.reset();
      const int64_t update = progress_.update;
      const bool is_last = update + 1 == horizon_.windows;
      const bool will_log = (update + 1) % log_interval == 0 || is_last || update == first_update;
      const bool wants_details = details_interval_ > 0 ? (update + 1) % details_interval_ == 0 || is_last || update == first_update : will_log;
      const StepInfo step{.update = update, .updates_total = horizon_.schedule, .wants_details = wants_details};
      const double rate = rate_->at(update);
      const StepResult result =
          trainer_->run(window, step, rate, {.wants_stop = context_.stop_requested && context_.stop_requested(),
                                             .upcoming = take_upcoming,
                                             .before_update = [&] { staging_->hold_updates(); },
                                             .save_settled = saver_->is_settled()});
      some_beside_save = some_beside_save || pending_.has_value();
      throw_failed_data(result);
      check(result, update);
      const bool is_settled = session_->placement.comm == nullptr ? saver_->is_settled() : result.saves_settled == session_->rank_count();
      if (pending_ && is_settled) {  // all ranks have seen the same number
        note_committed(saver_->advance());
      }
      if (update == first_update) {
        compare_first_window();
        if (context_.check_effects) {
          context_.check_effects();
        }
        report_memory();
      }
      progress_.update = update + 1;
      progress_.stream_position = order.next_position(progress_.stream_position, window_shape_);
      progress_.epoch = progress_.stream_position / source_.size;
      if (session_->placement.comm == nullptr || wants_details) {  // other windows' losses are summed on each rank alone
        last_loss_ = result.loss;
      }
      tokens_ += result.tokens;
      train_seconds_ += seconds_since(window_start);
      tokens_logged += result.tokens;
      samples_logged += result.samples;
      own_tokens_logged += window.tokens;
      positions_logged += window.positions;
      ++updates_logged;
      elapsed_logged += seconds_since(window_start);

      if (will_log) {
        std::map<std::string, double> metrics;
        if (wants_details) {
          metrics = ratios(session_->runner->metrics());
          session_->algorithm->derive_metrics(metrics);
        }
        const auto accept = metrics.find("acceptance_length");
        const double per_update = train_seconds_ / static_cast<double>(progress_.update - first_update);
        const StepLine line{.step = progress_.update,
                            .steps_total = horizon_.windows,
                            .loss = result.loss,
                            .gradient_norm = result.gradient_norm,
                            .learning_rate = rate,
                            .acceptance_length = accept == metrics.end() ? 0.0 : accept->second,
                            .tokens_per_second = static_cast<double>(tokens_logged) / elapsed_logged,
                            .seconds_left = per_update * static_cast<double>(horizon_.windows - progress_.update),
                            .memory_bytes = memory_use(session_->placement.device).now};
        log_info("{}", step_line(line));
        Json json = Json::object();
        json.set("step", line.step).set("loss", line.loss).set("grad_norm", line.gradient_norm).set("lr", rate);
        json.set("epoch", static_cast<double>(progress_.stream_position) / static_cast<double>(source_.size));
        json.set("perf/tokens_per_second", line.tokens_per_second);
        json.set("perf/samples_per_second", static_cast<double>(samples_logged) / elapsed_logged);
        json.set("perf/optimizer_step_time_s", elapsed_logged / static_cast<double>(updates_logged));
        json.set("perf/data_wait_time_s", (loader.seconds_waited() - waited_logged) / static_cast<double>(updates_logged));
        json.set("perf/padded_share", 1 - static_cast<double>(own_tokens_logged) / static_cast<double>(std::max<int64_t>(positions_logged, 1)));
        json.set("perf/memory_bytes", line.memory_bytes);
        if (some_beside_save) {
          json.set("perf/beside_save", true);
          some_beside_save = false;
        }
        for (const auto& [name, value] : metrics) {
          json.set(name, value);
        }
        write_metrics(json);
        elapsed_logged = 0;
        tokens_logged = own_tokens_logged = positions_logged = samples_logged = updates_logged = 0;
        waited_logged = loader.seconds_waited();
      }

      // With ranks the window itself has asked all of them; alone the answer may be fresher.
      const bool stop = result.stop || (session_->placement.comm == nullptr && context_.stop_requested && context_.stop_requested());
      bool save_now = is_last || stop || (save_interval > 0 && progress_.update % save_interval == 0);
      std::optional<Evaluation> evaluation;
      if (held_out_ != nullptr && !stop && (is_last || (eval_interval > 0 && progress_.update % eval_interval == 0))) {
        evaluation = evaluate_held_out();
        if (evaluation) {
          save_now = save_now || !best_score_ || evaluation->acceptance_length > *best_score_;
        }
      }
      if (save_now || interrupted_) {
        save(evaluation);
      }
      if (stop || interrupted_) {
        finish_save();
        log_info("asked to stop: saved after update {} of {}; --resume auto goes on", progress_.update, horizon_.windows);
        interrupted_ = true;
        break;
      }
    }
    unusable_ = loader.unusable();
    pool_unusable();
    if (session_->is_lead() && unusable_.count > 0) {
      log_warn("{} samples could not be used, {} times in all", unusable_.reasons.size(), unusable_.count);
    }
    log_debug("trained for {} s, waited {} s for data", seconds_since(start), loader.seconds_waited());
  }

  // A window that changed nothing: harmless when no sample had weight, the end of the run when a number is not finite.
  void check(const StepResult& result, int64_t update) {
    if (!result.alarm.empty()) {
      throw_diverged(format("in update {} {}", update + 1, result.alarm));
    }
    if (result.updated) {
      return;
    }
    if (result.denominator == 0) {
      ++empty_windows_;
      if (empty_windows_ == 1) {
        log_warn("update {} has no supervised row in any of its samples and changes nothing", update + 1);
      }
      return;
    }
    throw_diverged(format("update {} has loss {} and gradient norm {} (learning rate {}, denominator {})", update + 1, result.loss, result.gradient_norm,
                          rate_->at(update), result.denominator));
  }

  [[noreturn]] void throw_diverged(const std::string& how) {
    diverged_ = true;
    throw Error(ExitCode::kUsage, "the run diverged: " + how + format("; training.learning_rate is {}", plan_.get<double>("training.learning_rate")),
                "lower training.learning_rate or raise training.warmup_ratio and start anew; a checkpoint from before may have gone wrong already");
  }

  // Only sums over ranks are read by others: every rank must run the same units, and have the same metrics.
  void compare_first_window() {
    std::vector<std::string> names = session_->runner->never_touched();
    if (session_->ranks != nullptr) {
      session_->ranks->require_same({{"order of units", format("{}", session_->runner->order_hash())}, {"metrics", session_->runner->metric_names()}},
                                    "the first window");
      const auto everyones = session_->placement.comm->gather_texts(join(names, "\n"), "parameters without gradient");
      std::erase_if(names, [&](const std::string& name) {
        return std::any_of(everyones.begin(), everyones.end(), [&](const std::string& text) { return ("\n" + text + "\n").find("\n" + name + "\n") == std::string::npos; });
      });
    }
    refuse_untouched(names);
  }

  void refuse_untouched(const std::vector<std::string>& names) {
    if (!names.empty() && empty_windows_ == 0) {
      throw Error(ExitCode::kInternal, format("{} parameters got no gradient in the first window: {}", names.size(), join(names, ", ")),
                  "an algorithm declares parameters that may stay untouched as idle");
    }
  }

  // Alone a rank can't leave a window that the others run: it runs a dead one with a denominator that is no number, which changes nothing anywhere and tells
  // all that a rank failed.
  Window next_window(WindowLoader& loader) {
    try {
      return loader.next();
    } catch (const Error& error) {
      if (session_->placement.comm == nullptr) {
        throw;
      }
      failed_data_ = Failure{.rank = session_->rank(), .code = error.code(), .what = error.what(), .hint = error.hint()};
      Window window = loader.dead(progress_.update);
      window.denominators.assign(window.denominators.size(), std::numeric_limits<double>::quiet_NaN());
      return window;
    }
  }

  void throw_failed_data(const StepResult& result) {
    if (session_->placement.comm == nullptr || !std::isnan(result.denominator)) {
      return;
    }
    for (const std::string& text : session_->placement.comm->gather_texts(failed_data_ ? failed_data_->to_text() : "", "a window that failed")) {
      if (!text.empty()) {
        const Failure failure = Failure::from_text(text);
        all_failed_ = true;
        throw Error(failure.code, format("rank {}: {}", failure.rank, failure.what), failure.hint);
      }
    }
  }

  void write_metrics(const Json& line) {
    if (metrics_file_ != nullptr) {
      metrics_file_->write(line);
      trackers_->record(line.at("step").as_int(), line);
    }
  }

  // Of all ranks: each has met samples of its own.
  void pool_unusable() {
    if (session_->placement.comm == nullptr) {
      return;
    }
    Json own = Json::object();
    Json reasons = Json::object();
    for (const auto& [sample, reason] : unusable_.reasons) {
      reasons.set(std::to_string(sample), reason);
    }
    own.set("count", unusable_.count).set("reasons", std::move(reasons));
    unusable_ = {};
    for (const std::string& text : session_->placement.comm->gather_texts(own.dump(), "samples that can't be used")) {
      const Json json = Json::parse(text, "a rank's samples");
      unusable_.count += json.at("count").as_int();
      for (const auto& [sample, reason] : json.at("reasons").entries()) {
        unusable_.reasons.emplace(std::stoll(sample), reason.as_string());
      }
    }
  }

  void report_memory() const {
    const int64_t planned = plan_sizes(plan_, session_->description, session_->sharding, session_->transforms.get()).back().bytes;
    log_info("memory after the first update: {} planned, {} seen at most", human_bytes(static_cast<uint64_t>(planned)),
             human_bytes(static_cast<uint64_t>(memory_use(session_->placement.device).peak + session_->runner->capture_counts().bytes)));
  }

  // Nothing when a stop was requested meanwhile.
  std::optional<Evaluation> evaluate_held_out() {
    const StepInfo step{.update = progress_.update, .updates_total = horizon_.schedule, .wants_details = true};
    std::optional<Evaluation> found;
    try {
      found = evaluate(*session_, sample_source(*held_out_), step, plan_.get<int64_t>("training.eval_max_samples"));
    } catch (const LossNotFinite& error) {
      // Features that have given a loss before are not to blame.
      if (progress_.update > 0 && (error.code() == ExitCode::kUsage || last_evaluation_ || best_score_)) {
        throw_diverged(format("the held-out loss after update {} is not finite", progress_.update));
      }
      throw;
    }
    if (!found) {
      interrupted_ = true;
      return std::nullopt;
    }
    const Evaluation& evaluation = *found;
    log_info("eval after update {}: loss {}, acceptance length {} ({} samples, {})", progress_.update,
             format_fixed(evaluation.loss, 4), format_fixed(evaluation.acceptance_length, 3), evaluation.samples,
             human_duration(evaluation.seconds));
    Json line = Json::object();
    line.set("step", progress_.update).set("eval", evaluation.to_json());
    write_metrics(line);
    last_evaluation_ = evaluation;
    return found;
  }

  CheckpointWriter checkpoint_writer() {
    for (const LoadedPlugin& plugin : context_.plugins) {
      if (plugin.kind == SF_KIND_CHECKPOINT) {
        const void* found = plugin.entry->get_interface(plugin.instance, SF_CHECKPOINT_WRITER);
        SF_CHECK(found != nullptr, "plugin '{}' is open and offers no \"{}\"", plugin.name, SF_CHECKPOINT_WRITER);
        return {static_cast<const sf_checkpoint_writer*>(found), plugin.instance};
      }
    }
    return sync_writer_.writer();
  }

  // Snapshot and writer get the run as it stands. With a writer that works beside training, and room for the snapshot, that is all: the rest happens while
  // windows run, and advance() takes note of it.
  void save(const std::optional<Evaluation>& evaluation) {
    const auto start = Clock::now();
    if (pending_) {
      const int64_t before = pending_->update;
      finish_save();
      if (session_->is_lead() && seconds_since(start) > 0.01) {  // less is only the taking note of it
        log_info("{}", run_rule("A2", {{"step", to_text(progress_.update)}, {"pending", to_text(before)}, {"seconds", human_duration(seconds_since(start))}}).message);
      }
    }
    const double waited = seconds_since(start);
    if (!are_weights_sound(*session_)) {  // the next window would say so; a checkpoint of them would be the newest, and of no use
      throw_diverged(format("the weights after update {} are not finite or far too large", progress_.update));
    }
    CheckpointSaver::Request request = snapshot(*session_, *optimizer_, progress_, *features_, staging_);
    if (session_->is_lead()) {
      const int64_t update = progress_.update;
      const bool drops_future = resumed_ && !saved_since_resume_;
      request.after_commit = [this, update, drops_future, evaluation] { tend_checkpoints(update, drops_future, evaluation); };
    }
    pending_ = PendingSave{.update = progress_.update, .waited_seconds = waited};
    saver_->start(std::move(request));
    saved_since_resume_ = true;
    saved_update_ = progress_.update;
    if (evaluation && (!best_score_ || evaluation->acceptance_length > *best_score_)) {
      best_score_ = evaluation->acceptance_length;
    }
    if (!is_beside_) {
      (void)saver_->wait();
    }
    pending_->stall_seconds = seconds_since(start);
    if (saver_->is_idle()) {  // with one rank start() itself may have gone all the way
      note_committed(saver_->last_step());
    }
  }

  // All ranks: nothing is in flight after this. Throws what the save has failed with.
  void finish_save() {
    if (pending_) {
      note_committed(saver_->wait());
    }
  }

  void note_committed(const std::optional<CommittedStep>& committed) {
    if (!committed) {
      return;
    }
    const PendingSave save = *std::exchange(pending_, std::nullopt);
    committed_update_ = save.update;
    const double held = staging_->held_seconds();
    ++saves_;
    save_stall_seconds_ += save.stall_seconds + held;
    save_seconds_ += committed->seconds;
    if (!session_->is_lead()) {
      return;
    }
    log_debug("saved step {} in {}; training waited {} ms", save.update, human_duration(committed->seconds), format_fixed((save.stall_seconds + held) * 1e3, 1));
    Json line = Json::object();
    Json told = Json::object();
    told.set("step", save.update).set("stall_s", save.stall_seconds).set("waited_s", save.waited_seconds).set("device_wait_s", held);
    told.set("seconds", committed->seconds).set("bytes", committed->bytes).set("beside", is_beside_);
    write_metrics(line.set("step", progress_.update).set("save", std::move(told)));
  }

  // On the committing thread, when the step has its name and not before (rule A5).
  void tend_checkpoints(int64_t update, bool drops_future, const std::optional<Evaluation>& evaluation) const {
    if (drops_future) {
      for (const int64_t step : discard_newer_than(session_->run_folder, resumed_update_, update)) {
        log_info("removed step {} of the run's abandoned future", step);
      }
    }
    if (evaluation && offer_best(session_->run_folder, {.step = update, .score = evaluation->acceptance_length, .metric = "acceptance_length",
                                                        .metrics = evaluation->to_json(), .measured_on = measured_on()})) {
      log_info("{}", run_rule("A5", {{"step", to_text(update)}, {"metric", "acceptance length"}, {"score", format_fixed(evaluation->acceptance_length, 3)}}).message);
    }
    (void)rotate_checkpoints(session_->run_folder,
                             {.newest = plan_.get<int64_t>("training.max_checkpoints"), .every = plan_.get<int64_t>("checkpoint.keep_every")}, update);
  }

  Json summary() const {
    Json json = Json::object();
    json.set("run_folder", session_->run_folder.string());
    json.set("updates", progress_.update).set("updates_total", horizon_.windows);
    json.set("interrupted", interrupted_);
    json.set("loss", last_loss_ ? Json(*last_loss_) : Json());  // null: no update was made
    json.set("tokens_per_second", train_seconds_ > 0 ? static_cast<double>(tokens_) / train_seconds_ : 0.0);
    json.set("seconds_training", train_seconds_);
    json.set("unusable_samples", static_cast<int64_t>(unusable_.reasons.size()));
    json.set("empty_windows", empty_windows_);
    json.set("saves", saves_).set("save_stall_seconds", save_stall_seconds_).set("save_seconds", save_seconds_);
    json.set("memory_peak_bytes", memory_use(session_->placement.device).peak);
    if (trackers_ != nullptr) {
      json.set("tracker_failures", trackers_->failures());
    }
    if (first_evaluation_) {
      json.set("eval_before", first_evaluation_->to_json());
    }
    if (last_evaluation_) {
      json.set("eval_after", last_evaluation_->to_json());
    }
    return json;
  }

  const EngineContext& context_;
  const Plan& plan_;
  std::unique_ptr<Session> session_;
  WindowShape window_shape_;
  std::unique_ptr<FeatureStore> features_, held_out_;
  SampleSource source_;
  Horizon horizon_;
  std::unique_ptr<LearningRate> rate_;
  std::unique_ptr<BatchFields> fields_;
  std::unique_ptr<AdamW> optimizer_;
  std::unique_ptr<Trainer> trainer_;
  SyncWriter sync_writer_;
  std::shared_ptr<Staging> staging_;
  std::unique_ptr<MetricsFile> metrics_file_;   // rank 0's, as the trackers are
  std::unique_ptr<Trackers> trackers_;
  std::unique_ptr<FolderLock> lock_;

  RunProgress progress_;
  bool resumed_ = false, saved_since_resume_ = false, interrupted_ = false;
  int64_t resumed_update_ = 0;           // where a resumed run went on
  bool diverged_ = false;
  std::optional<double> last_loss_;
  double train_seconds_ = 0;
  int64_t tokens_ = 0, empty_windows_ = 0;
  int64_t saved_update_ = 0;             // what the last save was begun after
  int64_t committed_update_ = 0;         // and what the last checkpoint that is whole holds
  /// A save whose step has no name yet.
  struct PendingSave {
    int64_t update = 0;
    double stall_seconds = 0;            // what the training thread gave to it, the next included
    double waited_seconds = 0;           // for the save before it (rule A2)
  };
  std::optional<PendingSave> pending_;
  bool is_beside_ = false;               // the writer works while windows run
  int64_t details_interval_ = 0;
  int64_t saves_ = 0;
  double save_stall_seconds_ = 0, save_seconds_ = 0;
  Unusable unusable_;
  std::optional<Failure> failed_data_;   // of this rank
  bool all_failed_ = false;              // every rank leaves the same window for the same reason, so they can still save together
  std::optional<double> best_score_;     // the same on all ranks
  std::optional<Evaluation> first_evaluation_, last_evaluation_;
  std::unique_ptr<CheckpointSaver> saver_;   // last: its thread uses the rest until it is gone
};

}  // namespace

Json train(const EngineContext& context, const TrainArguments& arguments, Ranks& ranks) { return TrainingRun(context, arguments, ranks).run(); }

}  // namespace sf
