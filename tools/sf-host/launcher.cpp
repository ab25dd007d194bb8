#include "tools/sf-host/launcher.hpp"

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "core/base/file.hpp"
#include "core/base/log.hpp"
#include "core/base/text.hpp"
#include "tools/sf-host/command.hpp"

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

namespace sf {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr auto kGrace = std::chrono::seconds(12);  // ranks that learn of a failure end within some seconds
constexpr int kPollMilliseconds = 50;

// One end of a pipe; text of a rank on its way to ours, in whole lines.
struct Stream {
  int in = -1;
  int out = STDERR_FILENO;
  std::string begun;

  bool read_some(const std::string& prefix) {
    char buffer[4096];
    const ssize_t count = ::read(in, buffer, sizeof buffer);
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) {
      return true;
    }
    if (count > 0) {
      begun.append(buffer, static_cast<size_t>(count));
    }
    for (size_t end = begun.find('\n'); end != std::string::npos; end = begun.find('\n')) {
      put(prefix + begun.substr(0, end + 1));
      begun.erase(0, end + 1);
    }
    if (count <= 0) {
      if (!begun.empty()) {
        put(prefix + begun + "\n");
      }
      ::close(in);
      in = -1;
    }
    return in >= 0;
  }

 private:
  void put(const std::string& line) const {
    for (size_t done = 0; done < line.size();) {
      const ssize_t count = ::write(out, line.data() + done, line.size() - done);
      if (count < 0 && errno != EINTR) {
        return;  // a closed terminal is no reason to end a run
      }
      done += count > 0 ? static_cast<size_t>(count) : 0;
    }
  }
};

struct Rank {
  int64_t number = 0;
  pid_t process = -1;
  bool has_ended = false;
  std::vector<Stream> streams;
};

struct FirstFailure {
  int64_t rank = 0;
  int signal = 0;                 // 0: it left with a code
  ExitCode code = ExitCode::kOk;
  Clock::time_point when;
};

// Removed with all that is in it.
struct Folder {
  fs::path path;
  Folder() {
    constexpr const char* kFix = "set TMPDIR to a folder that you can write";
    std::error_code none;
    const fs::path place = fs::temp_directory_path(none);
    if (none) {
      const char* variable = std::getenv("TMPDIR");
      throw Error(ExitCode::kCommunication, format("there is no folder for temporary files: TMPDIR is \"{}\"", variable == nullptr ? "" : variable), kFix);
    }
    std::string name = (place / "sf-ranks-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) {
      throw Error(ExitCode::kCommunication, format("can't make a folder in {}: {}", place, std::strerror(errno)), kFix);
    }
    path = name;
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
};

// A stop that comes while ranks are being started waits for their own handlers: before them it would end a rank, or be lost between fork and exec.
class StopsHeldBack {
 public:
  StopsHeldBack() {
    sigset_t stops;
    sigemptyset(&stops);
    for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
      sigaddset(&stops, number);
    }
    pthread_sigmask(SIG_BLOCK, &stops, &before_);
  }
  ~StopsHeldBack() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  StopsHeldBack(const StopsHeldBack&) = delete;
  StopsHeldBack& operator=(const StopsHeldBack&) = delete;

 private:
  sigset_t before_{};
};

std::vector<std::string> own_words() {
  const std::string all = read_file("/proc/self/cmdline", ExitCode::kInternal);
  std::vector<std::string> words;
  for (size_t begin = 0; begin < all.size();) {
    const size_t end = std::min(all.find('\0', begin), all.size());
    words.push_back(all.substr(begin, end - begin));
    begin = end + 1;
  }
  return words;
}

[[noreturn]] void become_rank(const std::vector<std::string>& words, const std::vector<std::pair<std::string, std::string>>& variables, pid_t parent,
                              int out, int err) {
  ::setpgid(0, 0);                       // Ctrl-C reaches the launcher alone, which passes it on once
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);    // no orphans, whatever ends the launcher
  if (::getppid() != parent) {
    _exit(static_cast<int>(ExitCode::kCommunication));
  }
  if (out >= 0) {
    ::dup2(out, STDOUT_FILENO);
    ::dup2(err, STDERR_FILENO);
  }
  for (const auto& [name, value] : variables) {
    ::setenv(name.c_str(), value.c_str(), 1);
  }
  std::vector<char*> arguments;
  arguments.reserve(words.size() + 1);
  for (const std::string& word : words) {
    arguments.push_back(const_cast<char*>(word.c_str()));
  }
  arguments.push_back(nullptr);
  ::execv("/proc/self/exe", arguments.data());
  std::fprintf(stderr, "error: this program can't be started again: %s\n", std::strerror(errno));
  _exit(static_cast<int>(ExitCode::kInternal));
}

std::string death_text(int64_t rank, int status) {
  if (WIFSIGNALED(status)) {
    const int number = WTERMSIG(status);
    return format("rank {} was killed by signal {} ({})", rank, number, ::strsignal(number));
  }
  return format("rank {} ended with exit code {}", rank, WEXITSTATUS(status));
}

// A rank has at least two threads that work; a GPU's ranks are far fewer than its machine's processors.
void check_processors(int64_t ranks) {
  constexpr int64_t kMostRanksOfProcessor = 8;
  const int64_t processors = std::max<int64_t>(1, std::thread::hardware_concurrency());
  if (ranks > kMostRanksOfProcessor * processors) {
    throw Error(ExitCode::kUsage, format("--nproc {}: this machine has {} processors, at most {} ranks are started on it", ranks, processors, kMostRanksOfProcessor * processors),
                "--nproc says how many ranks to start on this machine: one for each GPU, or at most one for each processor");
  }
  if (ranks > processors) {
    log_warn("{} ranks on {} processors: they wait for each other", ranks, processors);
  }
}

// Asked once here: each rank would say the same.
void check_host(const std::string& rendezvous) {
  const std::string host = rendezvous.substr(0, rendezvous.rfind(':'));
  if (host.empty() || host.front() == '[') {
    return;
  }
  addrinfo* found = nullptr;
  const int failed = ::getaddrinfo(host.c_str(), nullptr, nullptr, &found);
  if (failed != 0) {
    throw Error(ExitCode::kCommunication, format("--rendezvous {}: the host \"{}\" is not known here: {}", rendezvous, host, ::gai_strerror(failed)),
                "name the machine of node 0 as this one knows it, or by its address");
  }
  ::freeaddrinfo(found);
}

class Launch {
 public:
  explicit Launch(const LaunchFlags& flags) : flags_(flags), seen_stops_(stop_signal_count()) {}
  ~Launch() { kill_all(SIGKILL); }
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;

  void start() {
    const StopsHeldBack held_back;
    const std::vector<std::string> words = own_words();
    const pid_t self = ::getpid();
    const int64_t threads = std::max<int64_t>(1, static_cast<int64_t>(std::thread::hardware_concurrency()) / flags_.nproc);
    for (int64_t local = 0; local < flags_.nproc; ++local) {
      auto variables = environment_of_rank(flags_, local, folder_.path.string());
      if (std::getenv("OMP_NUM_THREADS") == nullptr) {
        variables.emplace_back("OMP_NUM_THREADS", std::to_string(threads));  // ranks share this machine's processors
      }
      Rank rank;
      rank.number = flags_.node_rank * flags_.nproc + local;
      int out[2] = {-1, -1}, err[2] = {-1, -1};
      if (rank.number != 0 && (::pipe2(out, O_CLOEXEC) != 0 || ::pipe2(err, O_CLOEXEC) != 0)) {
        throw Error(ExitCode::kCommunication, format("no pipe for rank {}: {}", rank.number, std::strerror(errno)), "raise the limit of open files");
      }
      rank.process = ::fork();
      if (rank.process < 0) {
        throw Error(ExitCode::kCommunication, format("rank {} can't be started: {}", rank.number, std::strerror(errno)), "lower --nproc, or raise the limit of processes");
      }
      if (rank.process == 0) {
        become_rank(words, variables, self, out[1], err[1]);
      }
      if (rank.number != 0) {
        ::close(out[1]);
        ::close(err[1]);
        rank.streams = {{.in = out[0], .out = STDOUT_FILENO}, {.in = err[0], .out = STDERR_FILENO}};
      }
      ranks_.push_back(std::move(rank));
    }
  }

  ExitCode wait() {
    for (bool any = true; any;) {
      pass_on_lines();
      any = look_at_ranks();
      if (const int stops = stop_signal_count(); stops > seen_stops_) {
        seen_stops_ = stops;
        kill_all(SIGTERM);
      }
      if (first_ && Clock::now() - first_->when > kGrace) {
        kill_all(SIGKILL);
      }
    }
    return verdict();
  }

 private:
  static int signal_of(int status) { return WIFSIGNALED(status) ? WTERMSIG(status) : 0; }

  void pass_on_lines() {
    std::vector<pollfd> waiting;
    std::vector<std::pair<Stream*, std::string>> streams;
    for (Rank& rank : ranks_) {
      for (Stream& stream : rank.streams) {
        if (stream.in >= 0) {
          waiting.push_back({.fd = stream.in, .events = POLLIN, .revents = 0});
          streams.emplace_back(&stream, format("[rank {}] ", rank.number));
        }
      }
    }
    ::poll(waiting.data(), waiting.size(), kPollMilliseconds);
    for (size_t i = 0; i < waiting.size(); ++i) {
      if ((waiting[i].revents & (POLLIN | POLLHUP | POLLERR)) != 0) {
        streams[i].first->read_some(streams[i].second);
      }
    }
  }

  // False when all have ended. (A grandchild may hold a pipe open for ever: only ranks count.)
  bool look_at_ranks() {
    bool any = false;
    for (Rank& rank : ranks_) {
      int status = 0;
      if (rank.has_ended || ::waitpid(rank.process, &status, WNOHANG) != rank.process) {
        any = any || !rank.has_ended;
        continue;
      }
      rank.has_ended = true;
      for (Stream& stream : rank.streams) {
        while (stream.in >= 0 && has_data(stream.in) && stream.read_some(format("[rank {}] ", rank.number))) {
        }
      }
      const bool is_fine = WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == static_cast<int>(ExitCode::kInterrupted));
      interrupted_ = interrupted_ || (WIFEXITED(status) && WEXITSTATUS(status) == static_cast<int>(ExitCode::kInterrupted));
      if (rank.number == 0) {
        rank_zero_told_ = WIFEXITED(status) && WEXITSTATUS(status) != 0 && WEXITSTATUS(status) != static_cast<int>(ExitCode::kInterrupted);
      }
      if (!is_fine && !first_) {
        first_ = FirstFailure{.rank = rank.number, .signal = signal_of(status),
                              .code = WIFEXITED(status) ? static_cast<ExitCode>(WEXITSTATUS(status)) : ExitCode::kCommunication, .when = Clock::now()};
        death_ = death_text(rank.number, status);
        atomic_write(folder_.path / "dead", death_, ExitCode::kCommunication);
      }
    }
    return any;
  }

  static bool has_data(int descriptor) {
    pollfd one{.fd = descriptor, .events = POLLIN, .revents = 0};
    return ::poll(&one, 1, 0) > 0;
  }

  void kill_all(int signal) {
    for (Rank& rank : ranks_) {
      if (!rank.has_ended) {
        ::kill(rank.process, signal);
      }
    }
  }

  [[nodiscard]] ExitCode verdict() const {
    if (!first_) {
      return interrupted_ ? ExitCode::kInterrupted : ExitCode::kOk;
    }
    if (!rank_zero_told_) {
      throw Error(first_->code, death_,
                  first_->signal == SIGKILL ? "out of memory? the kernel's log says so; --resume auto goes on from the last checkpoint"
                  : flags_.node_rank > 0    ? "the log of rank 0 says why"
                                            : "see its messages; --resume auto goes on from the last checkpoint");
    }
    return first_->code;
  }

  const LaunchFlags& flags_;
  Folder folder_;
  std::vector<Rank> ranks_;
  std::optional<FirstFailure> first_;
  std::string death_;
  bool interrupted_ = false, rank_zero_told_ = false;
  int seen_stops_ = 0;
};

}  // namespace

bool is_launcher(const LaunchFlags& flags) {
  if (!flags.starts_ranks() || process_environment()("SF_LAUNCHER")) {
    return false;
  }
  const World world = world_from(process_environment());
  if (world.size > 1 && flags.nnodes == 1) {
    throw Error(ExitCode::kUsage, format("--nproc {}, but this process is rank {} of {} already: {}", flags.nproc, world.rank, world.size, world.origin),
                "leave --nproc out; or start one process on each machine and give --nnodes, --node-rank and --rendezvous");
  }
  return flags.nproc > 1 || flags.nnodes > 1;
}

ExitCode launch_ranks(const LaunchFlags& flags) {
  (void)environment_of_rank(flags, 0, "");  // refuses flags that contradict each other before anything is started
  check_processors(flags.nproc);
  check_host(flags.rendezvous);
  Launch launch(flags);
  launch.start();
  return launch.wait();
}

}  // namespace sf
