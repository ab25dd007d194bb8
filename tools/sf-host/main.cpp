// sf-host: parses the few flags (Boost.Program_options knows nothing of options; --set goes through the
// recipe's own reader), runs a verb, turns what is thrown into a message and an exit code, and leaves by
// _exit: libraries of plugins are never unloaded.
#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <iostream>
#include <memory>
#include <mutex>
#include <new>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "core/base/file_system.hpp"
#include "core/base/log.hpp"
#include "core/base/text.hpp"
#include "core/recipe/render.hpp"
#include "sf/json.hpp"
#include "sf/plugin.h"
#include "tools/sf-host/command.hpp"
#include "tools/sf-host/run_session.hpp"

#include <signal.h>
#include <time.h>
#include <unistd.h>
#include <boost/program_options.hpp>

namespace sf {
namespace {

namespace po = boost::program_options;

std::atomic<int> stop_signals = 0;
std::atomic<std::int64_t> first_stop = 0;  // when it came, in nanoseconds of the monotonic clock
std::atomic<pid_t> first_sender = -1;      // 0: the terminal, or a process that is not to be seen from here

// Batch systems signal every process of a job, and launchers pass on what they got: one wish that comes from two sides. A second Ctrl-C, and whoever asks again
// later on, wants the end now.
void on_signal(int, siginfo_t* info, void*) {
  constexpr std::int64_t kOneWish = 2'000'000'000;
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  const std::int64_t when = std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
  const pid_t sender = info->si_code <= 0 ? info->si_pid : 0;
  std::int64_t first = 0;
  if (first_stop.compare_exchange_strong(first, when)) {
    first_sender = sender;
    stop_signals = 1;
  } else if (sender == first_sender || when - first > kOneWish) {
    _exit(static_cast<int>(ExitCode::kInterrupted));
  }
}

// A closed terminal: the shell and the kernel both may say so, and neither is impatient.
void on_hangup(int) {
  int none = 0;
  stop_signals.compare_exchange_strong(none, 1);
}

void catch_signals() {
  sigset_t stops;
  sigemptyset(&stops);
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
    sigaddset(&stops, number);
  }
  struct sigaction stop {};
  stop.sa_sigaction = on_signal;
  stop.sa_flags = SA_SIGINFO;
  stop.sa_mask = stops;
  sigaction(SIGINT, &stop, nullptr);
  sigaction(SIGTERM, &stop, nullptr);
  struct sigaction action {}, before {};
  sigaction(SIGHUP, nullptr, &before);
  if (before.sa_handler != SIG_IGN) {  // under nohup it stays ignored
    action.sa_handler = on_hangup;
    sigaction(SIGHUP, &action, nullptr);
  }
  // Over the limit of ulimit -f write() then says EFBIG, which is handled like a full disk.
  action.sa_handler = SIG_IGN;
  sigaction(SIGXFSZ, &action, nullptr);
  pthread_sigmask(SIG_UNBLOCK, &stops, nullptr);  // sf-host's launcher holds them back until they are caught here
}

// Work goes on when nobody reads its messages any more: in `sf-host train | tee log` Ctrl-C ends tee first, and the step is still to be saved.
void outlive_readers() {
  struct sigaction action {};
  action.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &action, nullptr);
}

struct Verb {
  const char* name;
  const char* arguments;
  const char* summary;
  ExitCode (*run)(const Command&);
  bool takes_recipe;
  bool outlives_readers = false;  // works for long and leaves files; the others only print
};

constexpr std::array<Verb, 12> kVerbs = {{
    {"train", "RECIPE", "train a draft as the recipe says", run_train, true, true},
    {"plan", "RECIPE", "print what a run would do: stack, values with origin, sizes; start nothing", run_plan,
     true},
    {"prepare", "RECIPE", "make the recipe's token records, with loss masks, from its chat records", run_prepare, true, true},
    {"capture", "RECIPE", "run the target over the recipe's token records and keep its hidden states",
     run_capture, true, true},
    {"generate", "RECIPE", "let the target answer prompts: token records for training a draft on its own words", run_generate, true, true},
    {"eval", "RECIPE", "loss and acceptance length of a checkpoint on held-out features; --speculative: decode with drafts", run_eval, true, true},
    {"export", "RECIPE", "write a checkpoint as the folder that serving engines load, and check it", run_export, true, true},
    {"bench", "RECIPE | matrix RECIPE | summarize FILE...",
     "time the recipe's run on random data; matrix: variants in turn; summarize: results as a table", run_bench, true, true},
    {"checkpoints", "list | inspect | verify | diff | prune  RUN | CHECKPOINT...",
     "what a run has on disk: all of it, one in detail, every byte checked, two compared, old ones deleted; a recipe stands for its run", run_checkpoints, false},
    {"plugins", "[NAME]", "list installed plugins, or all about one; open nothing", run_plugins, false},
    {"schema", "", "all options as a JSON schema, or as Markdown", run_schema, false},
    {"doctor", "[RECIPE] | data RECIPE | features RECIPE | target RECIPE | vocabulary RECIPE",
     "check plugins, engine, device and disk; with a recipe also its plan and data; or look into one of them", run_doctor, true},
}};

std::string overview() {
  std::string out = "usage: sf-host VERB [arguments]\n\n";
  for (const Verb& verb : kVerbs) {
    std::string name = format("{} {}", verb.name, verb.arguments);
    name.resize(std::max<std::size_t>(name.size(), 18), ' ');
    out += format("  {}  {}\n", name, verb.summary);
  }
  return out +
         "\nsf-host VERB --help says more. Everything that shapes a run is in the recipe or in --set.\n";
}

// For po::value(...)->notifier: a number of things, of which there is one at least. Left out, such a flag has its default.
auto one_at_least(const char* flag) {
  return [flag](std::int64_t value) {
    if (value < 1) {
      throw Error(ExitCode::kUsage, format("--{} {}", flag, value), format("at least 1; left out, --{} has its default", flag));
    }
  };
}

po::options_description flags_of(const Verb& verb, Command& command) {
  std::string name = verb.name;
  po::options_description flags("flags", 110);
  auto add = flags.add_options();
  add("help,h", "this text");
  add("json", po::bool_switch(&command.json), "machine-readable result on stdout");
  add("verbose,v", po::bool_switch(), "log why, too");
  add("plugin", po::value(&command.plugins)->value_name("NAME=FILE")->composing(),
      "use this file for a plugin; absolute path");
  add("plugin-path", po::value(&command.plugin_paths)->value_name("FOLDER")->composing(),
      "look for plugins here first; absolute path");
  add("allow-unsafe-path", po::value(&command.unsafe_paths)->value_name("FOLDER")->composing(),
      "accept plugins from a folder that others can write");
  if (verb.takes_recipe) {
    add("set", po::value(&command.overrides)->value_name("KEY=VALUE")->composing(),
        "override a key of the recipe; later wins; paths are relative to the current folder");
    add("backend", po::value(&command.backend)->value_name("A+B+C"),
        "short for backend.sharding, .transforms, .checkpoint and .trackers: fsdp2+fp8+async_ckpt");
  }
  if (name == "train" || name == "plan" || name == "bench") {
    add("nproc", po::value(&command.launch.nproc)->value_name("N"),
        "start N ranks on this machine; without it torchrun's, srun's, mpirun's or Kubernetes' variables count");
    add("nnodes", po::value(&command.launch.nnodes)->value_name("N"), "machines that take part, each with --nproc ranks");
    add("node-rank", po::value(&command.launch.node_rank)->value_name("N"), "which of them this is, from 0");
    add("rendezvous", po::value(&command.launch.rendezvous)->value_name("HOST:PORT"),
        "machine of node 0 and a free port there; on one machine a free one is taken");
  }
  if (name == "train") {
    add("resume", po::value(&command.resume)->value_name("auto|best|none|FOLDER"),
        "auto (the default): go on from the run's newest complete checkpoint, or start; best or a folder: from that one; none: start, "
        "and refuse a run that has checkpoints");
    add("init-from", po::value(&command.init_from)->value_name("FOLDER"),
        "start a new run from the weights of a checkpoint or export");
  }
  if (name == "prepare") {
    add("workers", po::value(&command.workers)->value_name("N")->notifier(one_at_least("workers")), "processes that render and tokenize (default: one for each processor)");
  }
  if (name == "capture") {
    add("split", po::value(&command.split)->value_name("train|eval|all"), "which records (default all)");
    add("for", po::value(&command.readers)->value_name("NAME|RECIPE,..."),
        "what several algorithms read, in one capture: names of algorithms, or recipes (*.toml) that say more");
  }
  if (name == "bench") {
    add("mode", po::value(&command.mode)->value_name("step|run"),
        "step: resident batches, window by window (the default); run: the verb train from feature files on");
    add("warmup", po::value(&command.warmup)->value_name("N"), "windows before the clock starts (3)");
    add("steps", po::value(&command.steps)->value_name("N"), "windows in each repeat (6)");
    add("repeats", po::value(&command.repeats)->value_name("N"), "repeats that median and range are taken of (3)");
    add("samples", po::value(&command.samples)->value_name("N"), "distinct random samples (two windows' worth)");
    add("variable-mask", po::bool_switch(&command.variable_mask), "20 to 80 % of each sample is prompt");
    add("variable-length", po::bool_switch(&command.variable_length), "lengths from a quarter of data.max_length up to it");
    add("label", po::value(&command.label)->value_name("TEXT"), "names the result; default: the recipe's name");
    add("output", po::value(&command.output)->value_name("FILE"), "write the result as JSON, too (matrix: a folder of them)");
    add("compare", po::value(&command.compare)->value_name("FILE"), "an earlier result to set beside this one");
    add("variant", po::value(&command.variants)->value_name("NAME:KEY=VALUE,...")->composing(),
        "matrix: a variant and what it sets; NAME alone is the recipe as it stands");
  }
  if (name == "eval" || name == "export") {
    add("checkpoint", po::value(&command.checkpoint)->value_name("FOLDER"),
        name == "eval" ? "auto (newest, the default), best, untrained, or a folder"
                       : "best (the default; newest when there is none), auto (newest), or a folder");
  }
  if (name == "eval") {
    add("features", po::value(&command.features)->value_name("FOLDER"),
        "other features than data.eval_hidden_states_path");
  }
  DecodingFlags& decoding = command.decoding;
  if (name == "eval") {
    add("speculative", po::bool_switch(&decoding.speculative), "decode prompts with drafts, check every token, measure acceptance; the flags below belong to it");
    add("draft", po::value(&decoding.drafts)->value_name("FOLDER")->composing(),
        "an exported draft, any algorithm; several are compared on the same prompts (default: the recipe's --checkpoint, best)");
    add("draft-tokens", po::value(&decoding.draft_tokens)->value_name("N")->notifier(one_at_least("draft-tokens")), "tokens drafted in a pass (default: as trained)");
    add("sweep", po::value(&decoding.sweep)->value_name("N,N,..."), "also with these numbers of drafted tokens");
    add("schedule", po::bool_switch(&decoding.schedule), "end a draft where its own confidence says so (DSpark)");
    add("draft-cost", po::value(&decoding.draft_cost)->value_name("X"),
        "a draft's pass in passes of the target, for the estimated speed-up (default: by bytes of weights)");
    add("page", po::value(&decoding.page)->value_name("FILE"), "write the report as a self-contained HTML page");
  }
  if (name == "eval" || name == "generate") {
    add("prompts", po::value(&decoding.prompts)->value_name("FILE"),
        name == "eval" ? "token records whose prompts are decoded (default: data.eval_data_path)"
                       : "token records whose prompts are answered (default: data.train_data_path)");
    add("max-prompts", po::value(&decoding.max_prompts)->value_name("N")->notifier(one_at_least("max-prompts")), "the first so many (default: all)");
    add("max-new-tokens", po::value(&decoding.max_new_tokens)->value_name("N")->notifier(one_at_least("max-new-tokens")), name == "eval" ? "of an answer (64)" : "of an answer (256)");
    add("batch-size", po::value(&decoding.batch_size)->value_name("N")->notifier(one_at_least("batch-size")), "prompts at the same time (16)");
    add("stop-tokens", po::value(&decoding.stop_tokens)->value_name("N,N,...|none"),
        "tokens that end an answer (default: eos_token_id of the target's configuration)");
  }
  if (name == "generate") {
    add("output", po::value(&command.output)->value_name("FILE"), "JSONL of token records to write; the report stands beside it");
    add("temperature", po::value(&decoding.temperature)->value_name("X"), "0 (the default): always the best token");
    add("top-p", po::value(&decoding.top_p)->value_name("X"), "sample from the fewest tokens with this probability together (1)");
    add("top-k", po::value(&decoding.top_k)->value_name("N"), "sample from the N best tokens (0: all)");
    add("seed", po::value(&decoding.seed)->value_name("N"), "of the samples (0); draws depend on seed, prompt and token alone");
  }
  if (name == "export") {
    add("output", po::value(&command.output)->value_name("FOLDER"), "the folder to make");
    add("check", po::bool_switch(&command.check), "read the folder back as engines do and compare what it drafts with the checkpoint; always done, unless:");
    add("no-check", po::bool_switch(&command.no_check), "write without that check");
    add("check-only", po::bool_switch(&command.check_only), "write nothing: check a folder that is there");
    add("features", po::value(&command.features)->value_name("FOLDER"), "recorded features for the check (default: the recipe's held-out ones)");
  }
  if (name == "doctor") {
    add("samples", po::value(&command.samples)->value_name("N")->notifier(one_at_least("samples")), "data: records to show of each file (6)");
    add("output", po::value(&command.output)->value_name("FILE"), "data: the same as an HTML page");
  }
  if (name == "checkpoints") {
    add("set", po::value(&command.overrides)->value_name("KEY=VALUE")->composing(), "override a key of the recipe that stands for a run");
    add("keep", po::value(&command.keep)->value_name("N"), "prune: so many of the newest complete ones stay; the best one always does");
    add("keep-every", po::value(&command.keep_every)->value_name("STEPS"), "prune: and those whose step is a multiple of this");
    add("damaged", po::bool_switch(&command.damaged), "prune: damaged and unfinished ones go, too, when a complete one is there");
    add("dry-run", po::bool_switch(&command.dry_run), "prune: only say what would go");
  }
  if (name == "schema") {
    add("markdown", po::bool_switch(&command.markdown), "Markdown tables instead");
  }
  return flags;
}

std::string help_text(const Verb& verb, const po::options_description& flags) {
  std::ostringstream out;
  out << "usage: sf-host " << verb.name << " " << verb.arguments << (verb.arguments[0] != 0 ? " " : "")
      << "[flags]\n\n"
      << verb.summary << "\n\n"
      << flags;
  if (verb.takes_recipe) {
    out << "\nkeys of a recipe (plugins add theirs: name a recipe before --help, or see sf-host plugins "
           "NAME)\n"
        << options_help(host_manifest().options, 110);
  }
  return out.str();
}

[[noreturn]] void refuse_usage(const std::string& what, const std::string& hint) {
  throw Error(ExitCode::kUsage, what, hint);
}

// Boost's texts, in our words.
[[noreturn]] void refuse_flag(const Verb& verb, const po::options_description& flags,
                              const po::error& error) {
  std::string hint = format("sf-host {} --help lists the flags", verb.name);
  if (const auto* unknown = dynamic_cast<const po::unknown_option*>(&error)) {
    std::vector<std::string> names;
    for (const auto& option : flags.options()) {
      names.push_back("--" + option->long_name());
    }
    std::string near = did_you_mean(unknown->get_option_name(), names);
    refuse_usage(format("unknown flag \"{}\"", unknown->get_option_name()),
                 near.empty() ? hint : format("did you mean {}?", near));
  }
  refuse_usage(error.what(), hint);
}

ExitCode dispatch(int argc, char** argv) {
  std::vector<std::string> words(argv + 1, argv + argc);
  if (words.empty() || words[0] == "--help" || words[0] == "-h" || words[0] == "help") {
    std::fputs(overview().c_str(), words.empty() ? stderr : stdout);
    return words.empty() ? ExitCode::kUsage : ExitCode::kOk;
  }
  if (words[0] == "--version") {
    std::printf("sf-host %s\n", SF_SDK_VERSION);
    return ExitCode::kOk;
  }
  const Verb* verb = nullptr;
  std::vector<std::string> names;
  for (const Verb& known : kVerbs) {
    names.emplace_back(known.name);
    verb = words[0] == known.name ? &known : verb;
  }
  if (verb == nullptr) {
    std::string near = did_you_mean(words[0], names);
    refuse_usage(format("unknown verb \"{}\"", words[0]),
                 near.empty() ? "sf-host --help lists the verbs" : format("did you mean {}?", near));
  }
  Command command;
  command.verb = verb->name;
  words.erase(words.begin());
  po::options_description flags = flags_of(*verb, command);
  po::options_description all("all");
  all.add(flags);
  all.add_options()("argument", po::value(&command.positional));
  po::positional_options_description positional;
  positional.add("argument", -1);
  po::variables_map values;
  try {
    namespace style = po::command_line_style;
    int rules = style::unix_style & ~style::allow_guessing;
    po::store(po::command_line_parser(words).options(all).positional(positional).style(rules).run(), values);
    po::notify(values);
  } catch (const po::error& error) {
    refuse_flag(*verb, flags, error);
  }
  if (values.count("help") > 0) {
    std::fputs(help_text(*verb, flags).c_str(), stdout);
    if (verb->takes_recipe && !command.positional.empty()) {
      std::fputs(plugin_help(command).c_str(), stdout);
    }
    return ExitCode::kOk;
  }
  if (values["verbose"].as<bool>()) {
    set_log_level(Level::kDebug);
  }
  if (verb->outlives_readers) {
    outlive_readers();
  }
  if (command.positional.size() > 1 && command.verb != "bench" && command.verb != "doctor" && command.verb != "checkpoints") {
    refuse_usage(format("{} takes one argument, found \"{}\" and \"{}\"", verb->name, command.positional[0],
                        command.positional[1]),
                 format("usage: sf-host {} {}", verb->name, verb->arguments));
  }
  // An empty word is a script's unset variable; taken as "not given" it would start another run than was meant.
  for (const auto& [name, value] : values) {
    const auto* text = boost::any_cast<std::string>(&value.value());
    const auto* texts = boost::any_cast<std::vector<std::string>>(&value.value());
    const bool is_empty = (text != nullptr && text->empty()) || (texts != nullptr && std::find(texts->begin(), texts->end(), "") != texts->end());
    if (is_empty && name == "argument") {
      refuse_usage(format("an argument of {} is empty", verb->name), format("usage: sf-host {} {}", verb->name, verb->arguments));
    }
    if (is_empty) {
      refuse_usage(format("--{} is empty", name), format("give it a value, or leave --{} out", name));
    }
  }
  const LaunchFlags& launch = command.launch;
  if (values.count("nproc") > 0 && launch.nproc < 1) {
    refuse_usage(format("--nproc {}", launch.nproc), "at least one rank");
  }
  if (values.count("nproc") == 0 && values.count("nnodes") + values.count("node-rank") + values.count("rendezvous") > 0) {
    refuse_usage("--nnodes, --node-rank and --rendezvous go with --nproc", "--nproc N says how many ranks to start on each machine");
  }
  return verb->run(command);
}

// One failure is told by a process, by whichever thread meets it first.
std::mutex& telling() {
  static std::mutex& mutex = *std::make_unique<std::mutex>().release();
  return mutex;
}
std::atomic<bool> told_as_json = false;

ExitCode report(ExitCode code, const std::string& what, const std::string& hint, bool wants_json) {
  telling().lock();  // never unlocked: the process ends with this
  if (wants_json) {
    Json problem = Json::object();
    problem.set("severity", "error");
    problem.set("message", what);
    if (!hint.empty()) {
      problem.set("fix", hint);
    }
    Json out = Json::object();
    out.set("problems", Json::array().push_back(std::move(problem)));
    out.set("exit_code", static_cast<int>(code));
    std::puts(out.dump(2).c_str());
  } else {
    std::fprintf(stderr, "error: %s\n%s%s%s", what.c_str(), hint.empty() ? "" : "  fix:  ", hint.c_str(),
                 hint.empty() ? "" : "\n");
  }
  return code;
}

ExitCode report_all(const Error& error, bool wants_json) {
  Diagnostics problems;
  for (const Problem& problem : error.problems()) {
    problems.error({.id = problem.id,
                    .message = problem.message,
                    .place = {.source = problem.place},
                    .why = problem.why,
                    .fix = problem.fix});
  }
  Command command;
  command.json = wants_json;
  print_problems(command, problems, error.code());
  return error.code();
}

ExitCode run_program(int argc, char** argv) {
  catch_signals();
  // Asked of the words themselves, so that a mistake among the flags is told as JSON, too.
  bool wants_json = std::any_of(argv + 1, argv + argc, [](const char* word) { return word == std::string_view("--json"); });
  told_as_json = wants_json;
  try {
    return dispatch(argc, argv);
  } catch (const RefusedRun& refused) {
    return refused.code();
  } catch (const Error& error) {
    if (!error.problems().empty()) {
      return report_all(error, wants_json);
    }
    return report(error.code(), error.what(), error.hint(), wants_json);
  } catch (const JsonError& error) {  // no place that expects such a file said it better
    return report(ExitCode::kData, error.what(), "that file is damaged, or not what its name says: correct it, or make it again", wants_json);
  } catch (const std::filesystem::filesystem_error& error) {
    const Error told = told_of_path(error);
    return report(told.code(), told.what(), told.hint(), wants_json);
  } catch (const std::bad_alloc&) {
    return report(ExitCode::kDevice, "out of memory", "smaller training.batch_size or data.max_length",
                  wants_json);
  } catch (const std::exception& error) {
    return report(ExitCode::kInternal, error.what(), "", wants_json);
  }
}

}  // namespace

bool is_stop_requested() {
  return stop_signals.load() > 0;
}

int stop_signal_count() {
  return stop_signals.load();
}

void leave(ExitCode code, const std::string& what, const std::string& hint) {
  if (what.empty()) {
    telling().lock();
  } else {
    (void)report(code, what, hint, told_as_json);
  }
  flush_log();
  std::fflush(stdout);
  std::fflush(stderr);
  _exit(static_cast<int>(code));
}

// A result that did not arrive whole is no success.
ExitCode finish_stdout(ExitCode code) {
  errno = 0;
  const bool lost_before = std::ferror(stdout) != 0;
  if (std::fflush(stdout) == 0 && !lost_before) {
    return code;
  }
  std::string why = errno != 0 ? ": " + std::generic_category().message(errno) : "";
  std::fprintf(stderr, "error: the output on stdout could not be written whole%s\n  fix:  see where stdout leads: a full disk, a limit, a closed pipe\n",
               why.c_str());
  return code == ExitCode::kOk ? ExitCode::kUsage : code;
}

}  // namespace sf

int main(int argc, char** argv) {
  sf::ExitCode code = sf::run_program(argc, argv);
  sf::flush_log();
  code = sf::finish_stdout(code);
  std::fflush(stderr);
  _exit(static_cast<int>(code));
}
