// tests/host_program.hpp: sf-host of this build as a program: what it prints, how it ends, how long it takes.
#pragma once

#include <doctest/doctest.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <string>

#include <sys/wait.h>

namespace sf::test {

struct Answer {
  std::string out;  // both streams, unless the call redirects one
  int code = -1;
  double seconds = 0;
};

inline Answer run_shell(const std::string& command) {
  Answer answer;
  const auto start = std::chrono::steady_clock::now();
  FILE* pipe = popen(command.c_str(), "r");
  REQUIRE(pipe != nullptr);
  std::array<char, 4096> buffer{};
  for (std::size_t got = 0; (got = fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) {
    answer.out.append(buffer.data(), got);
  }
  answer.code = WEXITSTATUS(pclose(pipe));
  answer.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return answer;
}

inline Answer run_host(const std::string& arguments) {
  std::string command = std::string(SF_BUILD_DIR) + "/bin/sf-host " + arguments;
  if (arguments.find('>') == std::string::npos) {
    command += " 2>&1";
  }
  return run_shell(command);
}

}  // namespace sf::test
