// A folder of its own for a test, gone when the test ends; and what error a call ends with.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "sf/error.hpp"

#include "core/base/file.hpp"
#include "core/base/text.hpp"

namespace sf::test {

class Scratch {
 public:
  Scratch() {
    std::string pattern = (std::filesystem::temp_directory_path() / "sf-test-XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  ~Scratch() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  [[nodiscard]] const std::filesystem::path& path() const { return path_; }
  std::filesystem::path write(const std::string& name, std::string_view bytes) const {
    std::filesystem::create_directories((path_ / name).parent_path());
    std::ofstream(path_ / name, std::ios::binary) << bytes;
    return path_ / name;
  }

 private:
  std::filesystem::path path_;
};

/// What an sf::Error of `call` says, without the scratch folder's name; "no error" when there is none.
inline std::string error_of(const auto& call, const Scratch* scratch = nullptr) {
  try {
    call();
  } catch (const Error& error) {
    std::string text = error.what();
    while (scratch != nullptr && text.find(scratch->path().string() + "/") != std::string::npos) {
      text.erase(text.find(scratch->path().string() + "/"), scratch->path().string().size() + 1);
    }
    return text;
  }
  return "no error";
}

}  // namespace sf::test
