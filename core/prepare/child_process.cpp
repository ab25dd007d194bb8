#include "core/prepare/child_process.hpp"

#include "core/base/error.hpp"

#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <ctime>

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

namespace sf {

namespace {

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  result.reserve(texts.size() + 1);
  for (std::string& text : texts) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

void close_if_open(int& descriptor) {
  if (descriptor >= 0) ::close(descriptor);
  descriptor = -1;
}

}  // namespace

ChildProcess::ChildProcess(const std::vector<std::string>& arguments, const std::vector<std::string>& variables) {
  int in[2];
  int out[2];
  // A socket and not a pipe, so that writing to a program that has ended is an error here and no signal.
  const bool has_input = ::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, in) == 0;
  if (!has_input || ::pipe2(out, O_CLOEXEC) != 0) {
    const int error = errno;
    for (const int descriptor : in) {
      if (has_input) ::close(descriptor);
    }
    errno = error;
    throw Error(ExitCode::kData, format("can't start {}: {}", arguments.at(0), std::strerror(errno)), "raise the limit of open files (ulimit -n)");
  }
  // Everything is made before fork: after it a thread of a program with many may hardly do anything.
  std::vector<std::string> words = arguments;
  std::vector<std::string> environment = variables;
  for (char** entry = ::environ; *entry != nullptr; ++entry) environment.emplace_back(*entry);
  std::vector<char*> argv = pointers(words);
  std::vector<char*> envp = pointers(environment);
  const pid_t parent = ::getpid();
  id_ = ::fork();
  if (id_ == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(126);  // it died in between
    ::dup2(in[1], STDIN_FILENO);
    ::dup2(out[1], STDOUT_FILENO);
    ::execvpe(argv[0], argv.data(), envp.data());
    ::_exit(127);
  }
  const int error = errno;
  ::close(in[1]);
  ::close(out[1]);
  input_ = in[0];
  output_ = out[0];
  if (id_ < 0) {
    close_if_open(input_);
    close_if_open(output_);
    throw Error(ExitCode::kData, format("can't start {}: {}", arguments.at(0), std::strerror(error)), "free some memory or processes");
  }
}

ChildProcess::~ChildProcess() {
  close_if_open(input_);
  close_if_open(output_);
  if (id_ > 0) {
    ::kill(id_, SIGKILL);
    while (::waitpid(id_, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
}

bool ChildProcess::write(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::send(input_, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      wait_for(input_, POLLOUT);
      continue;
    }
    if (count <= 0) return false;
    bytes.remove_prefix(static_cast<std::size_t>(count));
  }
  return true;
}

bool ChildProcess::read_line(std::string& line) {
  std::size_t searched = begin_;
  for (;;) {
    const std::size_t end = buffer_.find('\n', searched);
    if (end != std::string::npos) {
      line.assign(buffer_, begin_, end - begin_);
      begin_ = end + 1;
      return true;
    }
    searched = buffer_.size() - begin_;
    if (!read_more()) return false;
  }
}

bool ChildProcess::read_bytes(std::span<std::byte> bytes) {
  while (buffer_.size() - begin_ < bytes.size()) {
    if (!read_more()) return false;
  }
  if (!bytes.empty()) std::memcpy(bytes.data(), buffer_.data() + begin_, bytes.size());
  begin_ += bytes.size();
  return true;
}

bool ChildProcess::read_more() {
  buffer_.erase(0, begin_);
  begin_ = 0;
  const std::size_t had = buffer_.size();
  constexpr std::size_t kPiece = 1 << 16;
  buffer_.resize(had + kPiece);
  ssize_t count = 0;
  try {
    do {
      wait_for(output_, POLLIN);
      count = ::read(output_, buffer_.data() + had, kPiece);
    } while (count < 0 && errno == EINTR);
  } catch (...) {
    buffer_.resize(had);
    throw;
  }
  buffer_.resize(had + static_cast<std::size_t>(count > 0 ? count : 0));
  return count > 0;
}

void ChildProcess::wait_for(int descriptor, short events) const {
  constexpr int kMilliseconds = 100;
  pollfd one{.fd = descriptor, .events = events, .revents = 0};
  while (::poll(&one, 1, kMilliseconds) <= 0) {
    if (watch_) watch_();
  }
}

double ChildProcess::processor_seconds() const {
  clockid_t clock = 0;
  timespec time{};
  if (id_ <= 0 || ::clock_getcpuclockid(id_, &clock) != 0 || ::clock_gettime(clock, &time) != 0) return 0;
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

std::string ChildProcess::how_it_ended() {
  close_if_open(input_);
  int status = 0;
  while (::waitpid(id_, &status, 0) < 0 && errno == EINTR) {
  }
  id_ = -1;
  if (WIFSIGNALED(status)) return format("signal {} ({})", WTERMSIG(status), ::strsignal(WTERMSIG(status)));
  return format("exit code {}", WEXITSTATUS(status));
}

}  // namespace sf
