// sf-plugin-check FILE.so [--static] [--only ID]... [--set KEY=VALUE]... [--limit SECONDS] [--json]
#include <dlfcn.h>
#include <poll.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <system_error>

#include "core/base/error.hpp"
#include "core/base/log.hpp"
#include "core/base/text.hpp"
#include "core/plugin/loader.hpp"
#include "sdk/check/check.hpp"
#include "sdk/testing/lone_plugin.hpp"
#include "sf/json.hpp"

#ifndef SF_TORCH_VARIANT
#define SF_TORCH_VARIANT ""
#endif

namespace sf::check {

namespace fs = std::filesystem;

namespace {

constexpr const char* kUsage =
    "usage: sf-plugin-check FILE.so [flags]\n\n"
    "Looks at a plugin's file, then runs it in small trials: each in a process of its own, with a time limit.\n\n"
    "  --static           only what can be seen without executing anything of it\n"
    "  --only ID          this check alone, or with a final * all whose id begins so; may be given again\n"
    "  --set KEY=VALUE    an option for every trial, as in sf-host; may be given again\n"
    "  --limit SECONDS    of a trial (60)\n"
    "  --json             results as JSON\n";

struct Arguments {
  fs::path file;
  bool only_static = false, json = false;
  std::vector<std::string> only, sets;
  int limit_seconds = 60;
};

struct Result {
  std::string id, sentence;
  Outcome outcome;
  double seconds = 0;
};

[[noreturn]] void refuse(const std::string& what) {
  std::fprintf(stderr, "error: %s\n\n%s", what.c_str(), kUsage);
  std::exit(static_cast<int>(ExitCode::kUsage));
}

Arguments parse(int argc, char** argv) {
  Arguments out;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const auto value = [&]() -> std::string {
      if (i + 1 >= argc) {
        refuse(word + " needs a value");
      }
      return argv[++i];
    };
    if (word == "--help" || word == "-h") {
      std::fputs(kUsage, stdout);
      std::exit(0);
    } else if (word == "--static") {
      out.only_static = true;
    } else if (word == "--json") {
      out.json = true;
    } else if (word == "--only") {
      out.only.push_back(value());
    } else if (word == "--set") {
      out.sets.push_back(value());
    } else if (word == "--limit") {
      out.limit_seconds = std::atoi(value().c_str());
      if (out.limit_seconds < 1) {
        refuse("--limit wants a number of seconds");
      }
    } else if (word.starts_with("-") || !out.file.empty()) {
      refuse(format("unknown argument \"{}\"", word));
    } else {
      out.file = word;
    }
  }
  if (out.file.empty()) {
    refuse("which plugin?");
  }
  std::error_code failed;
  out.file = fs::canonical(out.file, failed);
  if (failed) {
    refuse(format("\"{}\": {}", argv[1], failed.message()));
  }
  return out;
}

bool is_wanted(const Arguments& arguments, const std::string& id) {
  if (arguments.only.empty()) {
    return true;
  }
  for (const std::string& only : arguments.only) {
    if (only == id || (only.ends_with('*') && id.starts_with(only.substr(0, only.size() - 1)))) {
      return true;
    }
  }
  return false;
}

double processor_seconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

constexpr double kOpeningSeconds = 0.3;   // of a processor, with LibTorch already there

// In the trial's process.
Outcome open_and_run(Candidate& candidate, const Check& check) {
  Diagnostics problems;
  const double before = processor_seconds();
  candidate.entry = open_plugin(candidate.file, problems);
  const double opening = processor_seconds() - before;
  check_copies(problems);
  if (problems.has_errors()) {
    return failed(problems.all().front().message);
  }
  if (!check.run) {   // life/opens
    return opening < kOpeningSeconds ? passed(format("{} ms", static_cast<std::int64_t>(opening * 1000)))
                                     : failed(format("opening it takes {} ms of a processor, {} at most", static_cast<std::int64_t>(opening * 1000),
                                                     static_cast<std::int64_t>(kOpeningSeconds * 1000)));
  }
  return check.run(candidate);
}

volatile std::sig_atomic_t asked_to_stop = 0;   // NOLINT: seen from a signal handler

void require_going_on() {
  if (asked_to_stop != 0) {
    throw Error(ExitCode::kInterrupted, "asked to stop");
  }
}

std::string signal_text(int number) { return format("signal {} ({})", number, strsignal(number)); }

/// Everything that the trial leaves in the system's temporary folder is gone with `folder`, however it ends.
Outcome run_trial(Candidate& candidate, const Check& check, int limit_seconds, const fs::path& folder) {
  require_going_on();
  fs::create_directories(folder);
  int ends[2];
  if (pipe(ends) != 0) {
    return failed("no pipe: " + std::generic_category().message(errno));
  }
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    close(ends[0]);
    setpgid(0, 0);
    std::signal(SIGINT, SIG_DFL);
    std::signal(SIGTERM, SIG_DFL);
    setenv("TMPDIR", folder.c_str(), 1);
    redirect_log([](Level, std::string_view) {});
    Outcome outcome;
    try {
      outcome = open_and_run(candidate, check);
    } catch (const std::exception& error) {
      outcome = failed(error.what());
    }
    const std::string told = std::string(1, static_cast<char>('0' + static_cast<int>(outcome.verdict))) + outcome.text;
    (void)!write(ends[1], told.data(), std::min<std::size_t>(told.size(), 4000));
    if (check.exits) {
      std::exit(0);
    }
    _exit(0);
  }
  close(ends[1]);
  setpgid(child, child);
  std::string told;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(limit_seconds);
  bool is_late = false;
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()).count();
    pollfd wanted{.fd = ends[0], .events = POLLIN, .revents = 0};
    if (left <= 0 || poll(&wanted, 1, static_cast<int>(left)) == 0) {
      is_late = true;
      break;
    }
    if (asked_to_stop != 0) {
      break;
    }
    char buffer[4096];
    const ssize_t got = read(ends[0], buffer, sizeof buffer);
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got <= 0) {
      break;
    }
    told.append(buffer, static_cast<std::size_t>(got));
  }
  close(ends[0]);
  int status = 0;
  while (!is_late && asked_to_stop == 0 && waitpid(child, &status, WNOHANG) == 0) {
    is_late = std::chrono::steady_clock::now() > deadline;
    usleep(1000);
  }
  kill(-child, SIGKILL);   // it and what it has started
  if (is_late || asked_to_stop != 0) {
    waitpid(child, &status, 0);
  }
  std::error_code ignored;
  fs::remove_all(folder, ignored);
  require_going_on();
  if (is_late) {
    return failed(format("{} within {} s", told.empty() ? "it did not end" : "the process did not end", limit_seconds));
  }
  if (WIFSIGNALED(status)) {
    return failed(format("the process ended by {}{}", signal_text(WTERMSIG(status)), told.empty() ? "" : ", after the check itself was done"));
  }
  if (WEXITSTATUS(status) != 0 || told.empty()) {
    return failed(format("the process ended with code {}", WEXITSTATUS(status)));
  }
  return {static_cast<Verdict>(told[0] - '0'), told.substr(1)};
}

const TensorChecks* open_tensor_checks(const fs::path& library, std::string& why) {
  ::setenv("OMP_WAIT_POLICY", "passive", 0);
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);   // never closed
  void* symbol = handle == nullptr ? nullptr : dlsym(handle, "sf_tensor_checks_v1");
  if (symbol == nullptr) {
    why = format("libsf_plugin_test.so can't be opened: {}", dlerror());
    return nullptr;
  }
  return reinterpret_cast<const TensorChecks* (*)()>(symbol)();
}

class Report {
 public:
  explicit Report(bool json) : json_(json) {}

  void add(const Check& check, const Outcome& outcome, double seconds) {
    constexpr const char* kWords[] = {"pass", "FAIL", "skip"};
    ++counts_[static_cast<int>(outcome.verdict)];
    if (!json_) {
      std::printf("%s  %-22s %s\n", kWords[static_cast<int>(outcome.verdict)], check.id.c_str(), check.sentence.c_str());
      if (!outcome.text.empty()) {
        std::printf("%s%s\n", outcome.verdict == Verdict::failed ? "        found: " : "        ", outcome.text.c_str());
      }
      std::fflush(stdout);
      return;
    }
    Json one = Json::object();
    one.set("id", check.id).set("sentence", check.sentence).set("result", outcome.verdict == Verdict::passed ? "passed" : outcome.verdict == Verdict::failed ? "failed" : "skipped");
    one.set("text", outcome.text).set("seconds", seconds);
    results_.push_back(std::move(one));
  }

  int close(const Candidate& candidate) {
    if (json_) {
      Json out = Json::object();
      out.set("file", candidate.file.path.string()).set("plugin", candidate.file.name());
      out.set("passed", counts_[0]).set("failed", counts_[1]).set("skipped", counts_[2]).set("checks", std::move(results_));
      std::puts(out.dump(2).c_str());
    } else {
      std::printf("%d passed, %d failed, %d skipped\n", counts_[0], counts_[1], counts_[2]);
    }
    return counts_[1] == 0 && counts_[0] > 0 ? 0 : 1;
  }

 private:
  bool json_;
  int counts_[3] = {0, 0, 0};
  Json results_ = Json::array();
};

int run(const Arguments& arguments) {
  std::error_code ignored;
  const fs::path library = fs::read_symlink("/proc/self/exe", ignored).parent_path().parent_path() / "lib" / "sf" / "libsf_plugin_test.so";
  Candidate candidate;
  candidate.sets = arguments.sets;
  candidate.services.find = [](std::string_view) -> const void* { return nullptr; };   // those in C come with each plugin
  candidate.file = inspect_plugin(arguments.file, "argument", this_host(SF_TORCH_VARIANT, library));
  const sf::testing::TemporaryFolder folder;
  candidate.target = folder.path() / "target";
  sf::testing::write_tiny_target(candidate.target);
  Report report(arguments.json);
  for (const Check& check : static_checks()) {
    if (is_wanted(arguments, check.id)) {
      report.add(check, check.run(candidate), 0);
    }
  }
  if (arguments.only_static) {
    return report.close(candidate);
  }
  std::vector<Check> trials = {{"life/opens", "it opens in less than 300 ms", nullptr}};
  const std::uint32_t kind = candidate.file.build ? candidate.file.build->kind : 0;
  for (const std::vector<Check>& more : {life_checks(), kind == SF_KIND_CHECKPOINT ? writer_checks() : kind == SF_KIND_TRACKER ? tracker_checks() : std::vector<Check>()}) {
    trials.insert(trials.end(), more.begin(), more.end());
  }
  std::string why = candidate.file.fits() ? "" : "the host refuses the file: sf-host would not open it";
  if (why.empty() && candidate.file.build->tier == SF_TIER_TORCH_CXX) {
    if (const TensorChecks* checks = open_tensor_checks(library, why)) {
      candidate.services = checks->services();
      for (Check& check : checks->checks(candidate.file.build->kind)) {
        trials.push_back(std::move(check));
      }
    }
  }
  for (const Check& check : trials) {
    if (is_wanted(arguments, check.id)) {
      const auto start = std::chrono::steady_clock::now();
      const Outcome outcome = why.empty() ? run_trial(candidate, check, arguments.limit_seconds, folder.path() / "trial") : skipped(why);
      report.add(check, outcome, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
  }
  return report.close(candidate);
}

}  // namespace
}  // namespace sf::check

int main(int argc, char** argv) {
  struct sigaction action {};
  action.sa_handler = [](int) { sf::check::asked_to_stop = 1; };   // without SA_RESTART: poll comes back
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  try {
    const int code = sf::check::run(sf::check::parse(argc, argv));
    std::fflush(stdout);
    _exit(code);   // LibTorch may be loaded, and it has nothing to say at the end
  } catch (const sf::Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return static_cast<int>(error.code());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
