// A small stand-in for libFuzzer: fuzz_x SECONDS SEEDS... changes the seeds at random, always in the same way, and runs the target on the results. A crash, a
// sanitizer's complaint or an input that takes more than 10 s ends the process with the input written to NAME.input.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
extern "C" void __sanitizer_set_death_callback(void (*callback)(void));

namespace {

namespace fs = std::filesystem;
using Bytes = std::vector<uint8_t>;

constexpr size_t kLargestInput = 256 << 10;
constexpr unsigned kLimitSeconds = 10;

Bytes current;   // NOLINT: seen from a signal handler

void keep_input() {
  const int file = open((std::string(program_invocation_short_name) + ".input").c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
  (void)!write(file, current.data(), current.size());
  static const char kText[] = "the input is in NAME.input of this folder\n";
  (void)!write(2, kText, sizeof kText - 1);
}

void on_alarm(int) {
  static const char kText[] = "an input takes more than 10 s\n";
  (void)!write(2, kText, sizeof kText - 1);
  keep_input();
  _exit(1);
}

std::vector<Bytes> read_seeds(int count, char** paths) {
  std::vector<Bytes> seeds;
  const auto add = [&](const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    Bytes bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    if (!bytes.empty() && bytes.size() <= kLargestInput) {
      seeds.push_back(std::move(bytes));
    }
  };
  for (int i = 0; i < count; ++i) {
    if (!fs::is_directory(paths[i])) {
      add(paths[i]);
      continue;
    }
    std::vector<fs::path> found;
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(paths[i])) {
      const fs::path extension = entry.path().extension();
      if (entry.is_regular_file() && extension != ".cpp" && extension != ".hpp" && extension != ".c" && extension != ".txt") {
        found.push_back(entry.path());
      }
    }
    std::sort(found.begin(), found.end());
    for (const fs::path& path : found) {
      add(path);
    }
  }
  return seeds;
}

class Mutator {
 public:
  explicit Mutator(const std::vector<Bytes>& seeds) : seeds_(seeds) {}

  Bytes next() {
    Bytes bytes = seeds_[draw(seeds_.size())];
    for (size_t changes = 1 + draw(4); changes > 0; --changes) {
      change(bytes);
    }
    bytes.resize(std::min(bytes.size(), kLargestInput));
    return bytes;
  }

 private:
  size_t draw(size_t below) { return below == 0 ? 0 : random_() % below; }

  // Headers matter most: half of all places are in the first or last kilobyte.
  size_t place(const Bytes& bytes) {
    const size_t near = std::min<size_t>(1024, bytes.size());
    switch (draw(4)) {
      case 0: return draw(near);
      case 1: return bytes.size() - near + draw(near);
      default: return draw(bytes.size());
    }
  }

  void change(Bytes& bytes) {
    if (bytes.empty()) {
      bytes.push_back(static_cast<uint8_t>(random_()));
      return;
    }
    const size_t at = place(bytes);
    switch (draw(8)) {
      case 0: bytes[at] ^= static_cast<uint8_t>(1U << draw(8)); break;
      case 1: bytes[at] = static_cast<uint8_t>(random_()); break;
      case 2: {   // a number that is often a limit
        static constexpr uint64_t kLimits[] = {0, 1, 0x7f, 0x80, 0xff, 0x7fff, 0xffff, 0x7fffffff, 0x80000000, 0xffffffff, 0x7fffffffffffffff, 0xffffffffffffffff};
        const uint64_t value = kLimits[draw(std::size(kLimits))];
        const size_t size = std::min<size_t>(size_t{1} << draw(4), bytes.size() - at);
        std::memcpy(bytes.data() + at, &value, size);
        break;
      }
      case 3: bytes.resize(at); break;
      case 4: bytes.erase(bytes.begin() + static_cast<std::ptrdiff_t>(at), bytes.begin() + static_cast<std::ptrdiff_t>(std::min(bytes.size(), at + 1 + draw(16)))); break;
      case 5: bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(at), 1 + draw(16), static_cast<uint8_t>(random_())); break;
      case 6: {   // a piece of another seed
        const Bytes& other = seeds_[draw(seeds_.size())];
        const size_t from = place(other), length = std::min<size_t>(1 + draw(64), other.size() - from);
        const size_t fits = std::min(length, bytes.size() - at);
        std::copy_n(other.begin() + static_cast<std::ptrdiff_t>(from), fits, bytes.begin() + static_cast<std::ptrdiff_t>(at));
        break;
      }
      default: {   // a piece again
        const size_t length = std::min<size_t>(1 + draw(64), bytes.size() - at);
        const Bytes piece(bytes.begin() + static_cast<std::ptrdiff_t>(at), bytes.begin() + static_cast<std::ptrdiff_t>(at + length));
        bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(place(bytes)), piece.begin(), piece.end());
      }
    }
  }

  const std::vector<Bytes>& seeds_;
  std::mt19937_64 random_{20240601};   // NOLINT: the same inputs every time
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: %s SECONDS SEEDS...\n", argv[0]);
    return 2;
  }
  const std::vector<Bytes> seeds = read_seeds(argc - 2, argv + 2);
  if (seeds.empty()) {
    std::fprintf(stderr, "no seed of at most %zu bytes\n", kLargestInput);
    return 2;
  }
  __sanitizer_set_death_callback(keep_input);
  std::signal(SIGALRM, on_alarm);
  for (const Bytes& seed : seeds) {
    current = seed;
    alarm(kLimitSeconds);
    LLVMFuzzerTestOneInput(current.data(), current.size());
  }
  Mutator mutator(seeds);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(std::atof(argv[1]));
  size_t runs = 0;
  while (runs < 500 || std::chrono::steady_clock::now() < end) {
    current = mutator.next();
    alarm(kLimitSeconds);
    LLVMFuzzerTestOneInput(current.data(), current.size());
    ++runs;
  }
  alarm(0);
  std::printf("%zu seeds, %zu inputs\n", seeds.size(), runs);
  return 0;
}
