// The reader of plugin files: program headers, notes, needed libraries, symbols.
#include <cstddef>
#include <cstdint>

#include "core/plugin/elf_file.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  sf::ElfProblem problem;
  const auto elf = sf::read_elf_bytes({reinterpret_cast<const char*>(data), size}, problem);
  if (!elf && problem.message.empty()) {
    __builtin_trap();   // refused without a word
  }
  if (elf) {
    size_t bytes = 0;
    for (const sf::ElfNote& note : elf->notes) {
      bytes += note.owner.size() + note.bytes.size();
    }
    if (bytes > 64 * (size + 1)) {   // segments may overlap, but not without bound
      __builtin_trap();
    }
  }
  return 0;
}
