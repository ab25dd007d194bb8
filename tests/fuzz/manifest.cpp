// The reader of manifests: TOML, options, rules.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "core/recipe/manifest.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  sf::Diagnostics problems;
  const auto manifest = sf::parse_manifest(std::string_view(reinterpret_cast<const char*>(data), size), "fuzz", problems);
  if (!manifest && !problems.has_errors()) {
    __builtin_trap();   // refused without a word
  }
  (void)problems.text();
  return 0;
}
