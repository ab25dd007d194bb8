// sf-host bench: one timed run, a matrix of variants run in turn, or a table of results.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <map>
#include <set>
#include <system_error>
#include <thread>

#include "core/base/file.hpp"
#include "core/base/log.hpp"
#include "core/base/text.hpp"
#include "core/plan/print.hpp"
#include "tools/sf-host/launcher.hpp"
#include "tools/sf-host/run_session.hpp"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

namespace sf {

namespace fs = std::filesystem;

namespace {

constexpr const char* kUsage = "sf-host bench RECIPE, sf-host bench matrix RECIPE --variant NAME:KEY=VALUE,... or sf-host bench summarize FILE...";

Json read_result(const fs::path& path) {
  Json json = Json::parse(read_file(path, ExitCode::kUsage), path.string());
  const Json* step = json.find("step_ms");
  if (step == nullptr || step->find("median") == nullptr || json.find("label") == nullptr) {
    throw Error(ExitCode::kUsage, format("{} is not a benchmark's result: it has no label or no step_ms.median", path),
                "name a file that sf-host bench --output wrote");
  }
  return json;
}

double number_at(const Json& json, std::initializer_list<const char*> path) {
  const Json* at = &json;
  for (const char* key : path) {
    at = at->find(key);
    if (at == nullptr) {
      return 0;
    }
  }
  return at->is_number() ? at->as_double() : 0;
}

std::string cell(double value, int digits) { return value > 0 ? format_fixed(value, digits) : "-"; }

std::string percent(double now, double before) {
  const double change = (now / before - 1) * 100;
  return (change >= 0 ? "+" : "") + format_fixed(change, 1) + " %";
}

double gib(double bytes) { return bytes / (1024.0 * 1024.0 * 1024.0); }

// The first result is what others are compared with.
std::string table(const std::vector<Json>& results) {
  std::string out =
      "| label | step ms (range) | against first | samples/s | tokens/s | forward / backward / reduce / optimizer ms | peak GiB | planned GiB | "
      "at rest GiB | host reads | data wait ms | model TFLOP/s (of the ceiling) |\n|---|---|---|---|---|---|---|---|---|---|---|---|\n";
  for (const Json& result : results) {
    const double step = number_at(result, {"step_ms", "median"}), share = number_at(result, {"share_of_product_ceiling"});
    out += format("| {} | {} ({} to {}) | {} | {} | {} | {} / {} / {} / {} | {} | {} | {} | {} | {} | {} |\n", result.at("label").as_string(),
                  format_fixed(step, 1), format_fixed(number_at(result, {"step_ms", "min"}), 1),
                  format_fixed(number_at(result, {"step_ms", "max"}), 1), percent(step, number_at(results.front(), {"step_ms", "median"})),
                  cell(number_at(result, {"samples_per_second"}), 2), cell(number_at(result, {"tokens_per_second"}), 0),
                  cell(number_at(result, {"split_ms", "forward"}), 1), cell(number_at(result, {"split_ms", "backward"}), 1),
                  cell(number_at(result, {"split_ms", "reduce"}), 1), cell(number_at(result, {"split_ms", "optimizer"}), 1),
                  cell(gib(number_at(result, {"memory_bytes", "peak"})), 2), cell(gib(number_at(result, {"memory_bytes", "planned"})), 2), cell(gib(number_at(result, {"memory_bytes", "at_rest"})), 2),
                  cell(number_at(result, {"host_reads_per_step"}), 0), cell(number_at(result, {"data_wait_ms", "median"}), 1),
                  share > 0 ? format("{} ({} %)", format_fixed(number_at(result, {"model_tflops"}), 1), format_fixed(100 * share, 0)) : "-");
  }
  return out;
}

void print_json(const std::vector<Json>& results) {
  Json all = Json::array();
  for (const Json& result : results) {
    all.push_back(result);
  }
  std::puts(all.dump(2).c_str());
}

ExitCode summarize(const Command& command) {
  std::vector<Json> results;
  for (size_t i = 1; i < command.positional.size(); ++i) {
    results.push_back(read_result(command.positional[i]));
  }
  if (results.empty()) {
    throw Error(ExitCode::kUsage, "summarize got no results", kUsage);
  }
  if (command.json) {
    print_json(results);
  } else {
    std::fputs(table(results).c_str(), stdout);
  }
  return ExitCode::kOk;
}

// A child for each measurement: a GPU's memory and a library's state begin anew. What it prints stands beside the messages when stdout is for JSON alone.
int run_child(const std::vector<std::string>& words, bool is_stdout_ours) {
  std::vector<char*> arguments;
  arguments.reserve(words.size() + 1);
  for (const std::string& word : words) {
    arguments.push_back(const_cast<char*>(word.c_str()));
  }
  arguments.push_back(nullptr);
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child < 0) {
    throw Error(ExitCode::kInternal, "can't start a process: " + std::generic_category().message(errno));
  }
  if (child == 0) {
    if (is_stdout_ours) {
      dup2(STDERR_FILENO, STDOUT_FILENO);
    }
    execv("/proc/self/exe", arguments.data());
    _exit(127);
  }
  int status = 0;
  for (bool is_told = false; waitpid(child, &status, WNOHANG) == 0;) {
    if (is_stop_requested() && !is_told) {  // of this process alone, perhaps
      kill(child, SIGTERM);
      is_told = true;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

struct Variant {
  std::string name;
  std::vector<std::string> overrides;
};

Variant parse_variant(const std::string& text) {
  const size_t colon = text.find(':');
  Variant variant{.name = text.substr(0, colon), .overrides = {}};
  if (variant.name.empty() || variant.name.find('/') != std::string::npos) {
    throw Error(ExitCode::kUsage, format("--variant \"{}\" has no usable name before the colon", text), "--variant NAME:KEY=VALUE,KEY=VALUE");
  }
  // A comma inside brackets belongs to a value.
  std::string word;
  int depth = 0;
  for (const char c : colon == std::string::npos ? std::string() : text.substr(colon + 1)) {
    depth += c == '[' ? 1 : c == ']' ? -1 : 0;
    if (c == ',' && depth == 0) {
      variant.overrides.push_back(word);
      word.clear();
    } else {
      word += c;
    }
  }
  if (!word.empty()) {
    variant.overrides.push_back(word);
  }
  return variant;
}

// One result of several runs: the median of their medians, the range over all of them.
Json merge(const std::vector<Json>& runs) {
  std::vector<double> medians;
  double low = number_at(runs.front(), {"step_ms", "min"}), high = 0;
  for (const Json& run : runs) {
    medians.push_back(number_at(run, {"step_ms", "median"}));
    low = std::min(low, number_at(run, {"step_ms", "min"}));
    high = std::max(high, number_at(run, {"step_ms", "max"}));
  }
  std::vector<size_t> order(runs.size());
  for (size_t i = 0; i < order.size(); ++i) {
    order[i] = i;
  }
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return medians[a] < medians[b]; });
  Json merged = runs[order[order.size() / 2]];
  Json step = Json::object();
  step.set("median", medians[order[order.size() / 2]]).set("min", low).set("max", high);
  return merged.set("step_ms", std::move(step)).set("runs", static_cast<std::int64_t>(runs.size()));
}

ExitCode matrix(const Command& command) {
  if (command.positional.size() != 2 || command.variants.empty()) {
    throw Error(ExitCode::kUsage, "a matrix takes one recipe and at least one --variant", kUsage);
  }
  if (command.launch.nnodes > 1) {
    throw Error(ExitCode::kUsage, "a matrix is measured on one machine, and --nnodes asks for several", "leave --nnodes out; --nproc goes with a matrix");
  }
  if (!command.label.empty()) {
    throw Error(ExitCode::kUsage, "--label has no meaning for a matrix: results are called as their variants", "leave --label out");
  }
  std::vector<Variant> variants;
  std::set<std::string> names;
  for (const std::string& text : command.variants) {
    variants.push_back(parse_variant(text));
    if (!names.insert(variants.back().name).second) {
      throw Error(ExitCode::kUsage, format("two variants are called \"{}\": their results would become one", variants.back().name), "give each --variant a name of its own");
    }
  }
  std::vector<Json> merged;
  if (!command.compare.empty()) {
    merged.push_back(read_result(command.compare));
  }
  const size_t compared = merged.size();
  const fs::path folder = command.output.empty() ? fs::path("bench-results") : fs::path(command.output);
  fs::create_directories(folder);
  // Variants in turn, repeat by repeat, so that a machine that slows down slows all of them.
  std::map<std::string, std::vector<Json>> results;
  std::vector<std::string> failed;
  for (std::int64_t repeat = 0; repeat < command.repeats; ++repeat) {
    for (const Variant& variant : variants) {
      const fs::path file = folder / format("{}-{}.json", variant.name, repeat + 1);
      std::error_code ignored;
      fs::remove(file, ignored);
      std::vector<std::string> words = {"sf-host", "bench", command.positional[1], "--mode", command.mode, "--label", variant.name, "--output",
                                        file.string(), "--repeats", "1", "--warmup", to_text(command.warmup), "--steps", to_text(command.steps),
                                        "--samples", to_text(command.samples)};
      const auto pass = [&](const char* flag, const std::vector<std::string>& values) {
        for (const std::string& value : values) {
          words.insert(words.end(), {flag, value});
        }
      };
      pass("--set", command.overrides);
      pass("--set", variant.overrides);
      pass("--plugin", command.plugins);
      pass("--plugin-path", command.plugin_paths);
      pass("--allow-unsafe-path", command.unsafe_paths);
      if (command.launch.starts_ranks()) {
        pass("--nproc", {to_text(command.launch.nproc)});
      }
      if (!command.backend.empty()) {
        pass("--backend", {command.backend});
      }
      for (const auto& [wanted, flag] : {std::pair(command.variable_mask, "--variable-mask"), std::pair(command.variable_length, "--variable-length")}) {
        if (wanted) {
          words.emplace_back(flag);
        }
      }
      std::fprintf(stderr, "bench matrix: %s, repeat %lld of %lld\n", variant.name.c_str(), static_cast<long long>(repeat) + 1,
                   static_cast<long long>(command.repeats));
      const int code = run_child(words, command.json);
      if (code == static_cast<int>(ExitCode::kInterrupted) || is_stop_requested()) {
        return ExitCode::kInterrupted;
      }
      if (code != 0) {
        failed.push_back(format("{} (repeat {}, exit {})", variant.name, repeat + 1, code));
      } else {
        results[variant.name].push_back(read_result(file));
      }
    }
  }
  for (const Variant& variant : variants) {
    if (!results[variant.name].empty()) {
      merged.push_back(merge(results[variant.name]));
      atomic_write(folder / (variant.name + ".json"), merged.back().dump(2) + "\n", ExitCode::kUsage);
    }
  }
  if (command.json) {
    print_json(merged);
  } else if (merged.size() > compared) {
    std::fputs(table(merged).c_str(), stdout);
  }
  if (!failed.empty() && command.json) {  // stdout has one document
    log_error("runs of the matrix failed: {}; their messages stand above", join(failed, ", "));
    return ExitCode::kInternal;
  }
  if (!failed.empty()) {
    throw Error(ExitCode::kInternal, "runs of the matrix failed: " + join(failed, ", "), "their messages stand above; the others are in the table");
  }
  return ExitCode::kOk;
}

void print_result(const Json& result) {
  std::fputs(table({result}).c_str(), stdout);
  const double ceiling = number_at(result, {"product_ceiling_tflops"});
  if (ceiling > 0) {
    std::printf("a large product of the model's type reaches %s TFLOP/s on this device\n", format_fixed(ceiling, 1).c_str());
  }
}

}  // namespace

ExitCode run_bench(const Command& command) {
  if (command.positional.empty()) {
    throw Error(ExitCode::kUsage, "bench got nothing to do", kUsage);
  }
  if (command.positional[0] == "summarize") {
    return summarize(command);
  }
  if (command.mode != "step" && command.mode != "run") {
    throw Error(ExitCode::kUsage, format("--mode is \"{}\", expected step or run", command.mode), kUsage);
  }
  for (const auto& [name, value, least] : {std::tuple("--warmup", command.warmup, 1), std::tuple("--steps", command.steps, 1),
                                           std::tuple("--repeats", command.repeats, 1), std::tuple("--samples", command.samples, 0)}) {
    if (value < least) {
      throw Error(ExitCode::kUsage, format("{} is {}, expected at least {}", name, value, least),
                  "the first window pays for what is set up once, so one at least has to come before the clock");
    }
  }
  if (command.positional[0] == "matrix") {
    return matrix(command);
  }
  if (command.positional.size() > 1) {
    throw Error(ExitCode::kUsage, format("bench takes one recipe, found \"{}\" and \"{}\"", command.positional[0], command.positional[1]), kUsage);
  }
  require_place_of_file("--output", command.output);
  const Json before = command.compare.empty() ? Json() : read_result(command.compare);  // read before the work
  require_place_of_file("--output", command.output);
  const bool launches = is_launcher(command.launch);
  RunSession session(command);
  if (!session.plan(true)) {
    return session.code();
  }
  if (launches) {
    return launch_ranks(command.launch);
  }
  if (!session.open(true)) {
    return session.code();
  }
  const std::string label = command.label.empty() ? fs::path(command.positional[0]).stem().string() : command.label;
  Json result = session.engine().bench(session.context(), {.end_to_end = command.mode == "run",
                                                           .warmup = command.warmup,
                                                           .steps = command.steps,
                                                           .repeats = command.repeats,
                                                           .samples = command.samples,
                                                           .variable_mask = command.variable_mask,
                                                           .variable_length = command.variable_length,
                                                           .label = label});
  result.set("versions", Json::object().set("sf", SF_SDK_VERSION));
  if (!session.world().is_lead()) {
    session.close();
    return ExitCode::kOk;
  }
  if (!command.output.empty()) {
    atomic_write(command.output, result.dump(2) + "\n", ExitCode::kUsage);
  }
  if (command.json) {
    std::puts(result.dump(2).c_str());
  } else {
    print_result(result);
    if (!before.is_null()) {
      std::fputs("\nbeside the earlier result:\n", stdout);
      std::fputs(table({before, result}).c_str(), stdout);
    }
  }
  session.close();
  return ExitCode::kOk;
}

}  // namespace sf
