// tests/fuzz/input_file.hpp: an input as a file in memory, for readers that map files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

namespace sf::fuzz {

/// The path of a file with these bytes, in a folder of this process on a memory disk; overwritten by the next call with that name.
inline std::string input_file(const char* name, const uint8_t* data, size_t size) {
  static const std::string& folder = *new std::string([] {
    std::string pattern = access("/dev/shm", W_OK) == 0 ? "/dev/shm/sf-fuzz-XXXXXX" : "/tmp/sf-fuzz-XXXXXX";
    if (mkdtemp(pattern.data()) == nullptr) {
      __builtin_trap();
    }
    static const std::string kept = pattern;
    atexit([] { (void)!system(("rm -rf " + kept).c_str()); });
    return pattern;
  }());
  const std::string path = folder + "/" + name;
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  for (size_t done = 0; done < size;) {
    const ssize_t got = write(file, data + done, size - done);
    if (got <= 0) {
      __builtin_trap();
    }
    done += static_cast<size_t>(got);
  }
  close(file);
  return path;
}

}  // namespace sf::fuzz
