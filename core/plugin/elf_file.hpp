// core/plugin: which plugins there are, whether they may be opened, opening them and their life. Everything
// before `loader` reads files only.
//
// elf_file.hpp: notes, needed libraries and exported symbols of a shared library, read from the file without
// opening it. Every offset is checked against the file's size: the file may be damaged or hostile.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace sf {

struct ElfNote {
  std::string owner;
  std::uint32_t type = 0;
  std::string bytes;
};

struct ElfFile {
  std::vector<ElfNote> notes;
  std::vector<std::string> needed;    // DT_NEEDED
  std::vector<std::string> run_path;  // DT_RUNPATH or DT_RPATH, split at ":"; $ORIGIN not replaced
  std::vector<std::string> exported;  // defined dynamic symbols
  bool stays_loaded = false;          // -z nodelete

  /// The bytes of the first note of that owner and type, or null.
  [[nodiscard]] const std::string* find_note(std::string_view owner, std::uint32_t type) const;
};

struct ElfProblem {
  std::string id;       // "plugin/not-elf" or "plugin/wrong-machine"
  std::string message;  // "is not a shared library (starts with "#!")", without the file's name
};

/// Reads a 64-bit little-endian x86-64 shared library. Nothing, and `problem`, when it is something else or
/// damaged. Throws Error when the file can't be read.
[[nodiscard]] std::optional<ElfFile> read_elf(const std::filesystem::path& path, ElfProblem& problem);
/// The same over the bytes of a file.
[[nodiscard]] std::optional<ElfFile> read_elf_bytes(std::string_view bytes, ElfProblem& problem);

}  // namespace sf
