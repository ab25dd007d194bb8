// Copies between two processes, on two GPUs where there are two and else on one: what arrives, what is summed, and what a process does whose partner was killed.
#include "core/dist/peer_copies.hpp"

#include <doctest/doctest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

extern char** environ;

namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr size_t kElements = 1 << 22;  // of a rank's part, bfloat16
constexpr int kRanks = 2;

int gpus() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

template <class Condition>
bool wait_until(double seconds, Condition&& condition) {
  for (const auto start = Clock::now(); !condition();) {
    if (seconds_since(start) > seconds) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

void note(const fs::path& path, const std::string& text) {
  std::ofstream(path.string() + ".new") << text;
  fs::rename(path.string() + ".new", path);
}

std::string read(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

float value_of(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value = 0;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

uint16_t bits_of(int rank, int round, size_t i) { return static_cast<uint16_t>(0x3f80 + (i * 7 + static_cast<size_t>(round * 13 + rank * 31)) % 200); }  // 1 to 3

struct Handles {
  sf::PeerHandle flags, whole;
};

// One of the two processes. `folder` is where they leave notes for each other.
struct Rank {
  int rank;
  fs::path folder;
  cudaStream_t stream = nullptr;
  uint16_t* whole = nullptr;   // [ranks * n]
  uint16_t* free = nullptr;    // [n] of the other rank
  float* sum = nullptr;        // [n]
  float* share = nullptr;      // [n], what this rank adds to its own part
  std::unique_ptr<sf::PeerCopies> peers;
  const uint16_t* other = nullptr;

  void meet() {
    REQUIRE(cudaSetDevice(rank % gpus()) == cudaSuccess);
    REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    REQUIRE(cudaMalloc(reinterpret_cast<void**>(&whole), kRanks * kElements * 2) == cudaSuccess);
    REQUIRE(cudaMalloc(reinterpret_cast<void**>(&free), kElements * 2) == cudaSuccess);
    REQUIRE(cudaMalloc(reinterpret_cast<void**>(&sum), kElements * 4) == cudaSuccess);
    REQUIRE(cudaMalloc(reinterpret_cast<void**>(&share), kElements * 4) == cudaSuccess);
    peers = std::make_unique<sf::PeerCopies>(rank, kRanks);
    const Handles own{peers->flags(), peers->handle_of(whole)};
    note(folder / ("handles" + std::to_string(rank)), {reinterpret_cast<const char*>(&own), sizeof own});
    const fs::path there = folder / ("handles" + std::to_string(1 - rank));
    REQUIRE(wait_until(30, [&] { return fs::exists(there); }));
    Handles handles;
    const std::string text = read(there);
    REQUIRE(text.size() == sizeof handles);
    std::memcpy(&handles, text.data(), sizeof handles);
    std::vector<void*> flags(kRanks, nullptr);
    flags[static_cast<size_t>(1 - rank)] = peers->open(handles.flags);
    peers->meet(flags);
    other = static_cast<const uint16_t*>(peers->open(handles.whole));
  }

  // This rank's part of both wholes, added; `from_own`: its own share is in `share`, added in two runs.
  void reduce(bool from_own = false) {
    const size_t place = static_cast<size_t>(rank) * kElements;
    const sf::PeerCopy copy{.to = free, .from = other + place, .bytes = kElements * 2};
    const void* mine = from_own ? static_cast<const void*>(share) : whole + place;
    const void* parts[kRanks] = {rank == 0 ? mine : free, rank == 0 ? free : mine};
    std::vector<sf::PeerSum> sums = {{.sum = sum, .parts = parts, .count = kRanks, .elements = kElements, .is_bfloat16 = true, .float_part = from_own ? rank : -1}};
    constexpr size_t kFirst = 1000;  // of the first run, a multiple of 8
    const void* rest[kRanks] = {rank == 0 ? static_cast<const void*>(share + kFirst) : free + kFirst, rank == 0 ? static_cast<const void*>(free + kFirst) : share + kFirst};
    if (from_own) {
      sums.front().elements = kFirst;
      sums.push_back({.sum = sum + kFirst, .parts = rest, .count = kRanks, .elements = kElements - kFirst, .is_bfloat16 = true, .float_part = rank});
    }
    peers->exchange(&copy, 1, sums, stream);
  }
};

pid_t start(int rank, const fs::path& folder) {
  const std::string number = std::to_string(rank);
  std::vector<std::string> words = {"SF_PEER_RANK=" + number, "SF_PEER_FOLDER=" + folder.string()};
  std::vector<char*> environment;
  for (char** word = environ; *word != nullptr; ++word) {
    environment.push_back(*word);
  }
  for (std::string& word : words) {
    environment.push_back(word.data());
  }
  environment.push_back(nullptr);
  std::string self = fs::read_symlink("/proc/self/exe"), picked = "--test-case=peer copies: one of two processes", all = "--no-skip";
  char* arguments[] = {self.data(), picked.data(), all.data(), nullptr};
  pid_t pid = 0;
  REQUIRE(posix_spawn(&pid, self.c_str(), nullptr, nullptr, arguments, environment.data()) == 0);
  return pid;
}

// The exit status, -1 after the time.
int finish(pid_t pid, double seconds) {
  int status = -1;
  if (!wait_until(seconds, [&] { return waitpid(pid, &status, WNOHANG) == pid; })) {
    kill(pid, SIGKILL);
    waitpid(pid, &status, 0);
    return -1;
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace

TEST_CASE("peer copies: one of two processes" * doctest::skip()) {
  const char* number = std::getenv("SF_PEER_RANK");
  REQUIRE(number != nullptr);
  Rank self{.rank = std::stoi(number), .folder = std::getenv("SF_PEER_FOLDER")};
  self.meet();
  std::vector<uint16_t> filled(kRanks * kElements);
  std::vector<float> found(kElements), fine(kElements);
  for (int round = 0; round < 20; ++round) {
    for (size_t i = 0; i < filled.size(); ++i) {
      filled[i] = bits_of(self.rank, round, i);
    }
    REQUIRE(cudaMemcpyAsync(self.whole, filled.data(), filled.size() * 2, cudaMemcpyHostToDevice, self.stream) == cudaSuccess);
    const bool from_own = round % 2 == 1;
    for (size_t i = 0; i < kElements; ++i) {
      fine[i] = value_of(bits_of(self.rank, round, static_cast<size_t>(self.rank) * kElements + i)) + 0x1p-12F;  // bfloat16 has no place for the last digit
    }
    REQUIRE(cudaMemcpyAsync(self.share, fine.data(), kElements * 4, cudaMemcpyHostToDevice, self.stream) == cudaSuccess);
    self.reduce(from_own);
    REQUIRE(cudaMemcpyAsync(found.data(), self.sum, kElements * 4, cudaMemcpyDeviceToHost, self.stream) == cudaSuccess);
    REQUIRE(cudaStreamSynchronize(self.stream) == cudaSuccess);
    size_t wrong = 0;
    for (size_t i = 0; i < kElements; ++i) {
      const size_t at = static_cast<size_t>(self.rank) * kElements + i;
      wrong += found[i] != value_of(bits_of(0, round, at)) + value_of(bits_of(1, round, at)) + (from_own ? 0x1p-12F : 0.0F) ? 1 : 0;
    }
    REQUIRE(wrong == 0);
  }
  note(self.folder / ("summed" + std::to_string(self.rank)), "20");
  // Until one of them is killed: a few exchanges in flight, as a window has.
  for (int round = 0; round < 1000000; ++round) {
    self.reduce();
    if (round % 4 == 3 && !wait_until(1.0, [&] { return cudaStreamQuery(self.stream) != cudaErrorNotReady; })) {
      break;
    }
  }
  CHECK(cudaStreamQuery(self.stream) == cudaErrorNotReady);  // it would wait for ever
  const auto start = Clock::now();
  std::thread([&] {
    cudaSetDevice(self.rank % gpus());
    self.peers->give_up();
  }).join();
  CHECK(wait_until(5.0, [&] { return cudaStreamQuery(self.stream) != cudaErrorNotReady; }));
  note(self.folder / ("released" + std::to_string(self.rank)), std::to_string(seconds_since(start)) + " s, " + cudaGetErrorName(cudaStreamSynchronize(self.stream)));
}

TEST_CASE("peer copies: sums of two processes are exact, and one whose partner was killed is free again at once and leaves no memory behind") {
  if (gpus() == 0) {
    std::printf("skipped: no GPU\n");
    return;
  }
  size_t before = 0, after = 0, total = 0;
  REQUIRE(cudaSetDevice(0) == cudaSuccess);
  REQUIRE(cudaMemGetInfo(&before, &total) == cudaSuccess);
  for (const int victim : {1, 0}) {
    CAPTURE(victim);
    const fs::path folder = fs::temp_directory_path() / ("sf-peer-copies-" + std::to_string(getpid()) + "-" + std::to_string(victim));
    fs::remove_all(folder);
    fs::create_directories(folder);
    const pid_t ranks[kRanks] = {start(0, folder), start(1, folder)};
    const bool have_summed = wait_until(60, [&] { return fs::exists(folder / "summed0") && fs::exists(folder / "summed1"); });
    CHECK(have_summed);
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    kill(ranks[victim], SIGKILL);
    CHECK(finish(ranks[victim], 10) == 128 + SIGKILL);
    CHECK(finish(ranks[1 - victim], 20) == 0);
    const std::string released = read(folder / ("released" + std::to_string(1 - victim)));
    CHECK(released.ends_with("s, cudaSuccess"));
    std::printf("rank %d killed: the other was free after %s\n", victim, released.c_str());
    fs::remove_all(folder);
    CHECK(wait_until(5, [&] { return cudaMemGetInfo(&after, &total) == cudaSuccess && after + (size_t{16} << 20) > before; }));
  }
  std::printf("%d GPU%s; MiB free before %zu, after %zu\n", gpus(), gpus() == 1 ? "" : "s", before >> 20, after >> 20);
}
