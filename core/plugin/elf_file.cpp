#include "core/plugin/elf_file.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/base/file.hpp"
#include "core/base/text.hpp"

#include <elf.h>

namespace sf {
namespace {

// A damaged file ends the reading wherever it is noticed.
struct Damaged {
  std::string what;
};

class ElfReader {
 public:
  explicit ElfReader(std::string_view bytes) : bytes_(bytes) {}

  ElfFile read() {
    header_ = at<Elf64_Ehdr>(0, "its header");
    for (std::uint64_t i = 0; i < header_.e_phnum; ++i) {
      segments_.push_back(at<Elf64_Phdr>(header_.e_phoff + i * header_.e_phentsize, "its program headers"));
    }
    ElfFile out;
    for (const Elf64_Phdr& segment : segments_) {
      if (segment.p_type == PT_NOTE) {
        read_notes(range(segment.p_offset, segment.p_filesz, "its notes"), segment.p_align == 8 ? 8 : 4, out);
      } else if (segment.p_type == PT_DYNAMIC) {
        read_dynamic(segment, out);
      }
    }
    return out;
  }

 private:
  std::string_view range(std::uint64_t offset, std::uint64_t size, const char* what) const {
    if (offset > bytes_.size() || size > bytes_.size() - offset) {
      throw Damaged{std::string(what) + " lie beyond the end of the file"};
    }
    return bytes_.substr(offset, size);
  }

  template <class T>
  T at(std::uint64_t offset, const char* what) const {
    T out;
    std::memcpy(&out, range(offset, sizeof(T), what).data(), sizeof(T));
    return out;
  }

  [[nodiscard]] std::string text(std::uint64_t offset) const {
    std::string_view tail = range(offset, 1, "its names");
    tail = bytes_.substr(offset);
    std::size_t length = tail.find('\0');
    if (length == std::string_view::npos) {
      throw Damaged{"a name has no end"};
    }
    return std::string(tail.substr(0, length));
  }

  // Where an address of the running library lies in the file.
  [[nodiscard]] std::uint64_t offset_of(std::uint64_t address) const {
    for (const Elf64_Phdr& segment : segments_) {
      if (segment.p_type == PT_LOAD && address >= segment.p_vaddr &&
          address - segment.p_vaddr < segment.p_filesz) {
        return address - segment.p_vaddr + segment.p_offset;
      }
    }
    throw Damaged{"an address lies in no segment"};
  }

  static void read_notes(std::string_view bytes, std::uint64_t alignment, ElfFile& out) {
    auto padded = [&](std::uint64_t size) { return (size + alignment - 1) / alignment * alignment; };
    while (bytes.size() >= sizeof(Elf64_Nhdr)) {
      Elf64_Nhdr head;
      std::memcpy(&head, bytes.data(), sizeof head);
      std::uint64_t data_at = padded(sizeof head + head.n_namesz);
      if (alignment == 4) {
        data_at = sizeof head + padded(head.n_namesz);
      }
      if (data_at > bytes.size() || head.n_descsz > bytes.size() - data_at) {
        throw Damaged{"a note is longer than its segment"};
      }
      std::string owner(bytes.substr(sizeof head, head.n_namesz));
      owner = owner.substr(0, owner.find('\0'));
      out.notes.push_back({owner, head.n_type, std::string(bytes.substr(data_at, head.n_descsz))});
      bytes.remove_prefix(std::min<std::uint64_t>(bytes.size(), data_at + padded(head.n_descsz)));
    }
  }

  void read_dynamic(const Elf64_Phdr& segment, ElfFile& out) const {
    std::vector<Elf64_Dyn> entries;
    for (std::uint64_t at_byte = 0; at_byte + sizeof(Elf64_Dyn) <= segment.p_filesz;
         at_byte += sizeof(Elf64_Dyn)) {
      entries.push_back(at<Elf64_Dyn>(segment.p_offset + at_byte, "its dynamic entries"));
      if (entries.back().d_tag == DT_NULL) {
        break;
      }
    }
    auto find = [&](std::int64_t tag) -> std::uint64_t {
      for (const Elf64_Dyn& entry : entries) {
        if (entry.d_tag == tag) {
          return entry.d_un.d_val;
        }
      }
      return 0;
    };
    std::uint64_t strings = find(DT_STRTAB);
    if (strings == 0) {
      return;
    }
    strings = offset_of(strings);
    for (const Elf64_Dyn& entry : entries) {
      if (entry.d_tag == DT_NEEDED) {
        out.needed.push_back(text(strings + entry.d_un.d_val));
      } else if (entry.d_tag == DT_RUNPATH || entry.d_tag == DT_RPATH) {
        out.run_path = split(text(strings + entry.d_un.d_val), ':');
      } else if (entry.d_tag == DT_FLAGS_1) {
        out.stays_loaded = (entry.d_un.d_val & DF_1_NODELETE) != 0;
      }
    }
    if (std::uint64_t symbols = find(DT_SYMTAB); symbols != 0) {
      read_symbols(offset_of(symbols), strings, symbol_count(find(DT_HASH), find(DT_GNU_HASH)), out);
    }
  }

  // The table of symbols has no length of its own; the hash tables know it.
  [[nodiscard]] std::uint64_t symbol_count(std::uint64_t hash, std::uint64_t gnu_hash) const {
    if (hash != 0) {
      return at<std::uint32_t>(offset_of(hash) + 4, "its hash table");
    }
    if (gnu_hash == 0) {
      return 0;
    }
    std::uint64_t table = offset_of(gnu_hash);
    const auto buckets = at<std::uint32_t>(table, "its hash table");
    const auto first = at<std::uint32_t>(table + 4, "its hash table");
    const auto bloom = at<std::uint32_t>(table + 8, "its hash table");
    std::uint64_t bucket_at = table + 16 + std::uint64_t{bloom} * 8;
    std::uint64_t last = 0;
    for (std::uint64_t i = 0; i < buckets; ++i) {
      last = std::max<std::uint64_t>(last, at<std::uint32_t>(bucket_at + 4 * i, "its hash table"));
    }
    if (last < first) {
      return first;
    }
    std::uint64_t chains = bucket_at + std::uint64_t{buckets} * 4;
    while ((at<std::uint32_t>(chains + 4 * (last - first), "its hash table") & 1) == 0) {
      ++last;
    }
    return last + 1;
  }

  void read_symbols(std::uint64_t table, std::uint64_t strings, std::uint64_t count, ElfFile& out) const {
    for (std::uint64_t i = 1; i < count; ++i) {
      auto symbol = at<Elf64_Sym>(table + i * sizeof(Elf64_Sym), "its symbols");
      unsigned binding = ELF64_ST_BIND(symbol.st_info);
      if (symbol.st_shndx != SHN_UNDEF &&
          (binding == STB_GLOBAL || binding == STB_WEAK || binding == STB_GNU_UNIQUE)) {
        out.exported.push_back(text(strings + symbol.st_name));
      }
    }
  }

  std::string_view bytes_;
  Elf64_Ehdr header_{};
  std::vector<Elf64_Phdr> segments_;
};

std::string first_bytes(std::string_view bytes) {
  std::string out;
  for (char c : bytes.substr(0, 8)) {
    if (c < 0x20 || c > 0x7e) {
      break;
    }
    out += c;
  }
  return out.empty() ? "it does not start like one" : format("starts with \"{}\"", out);
}

std::string machine_name(std::uint16_t machine) {
  switch (machine) {
    case EM_AARCH64:
      return "aarch64";
    case EM_386:
      return "x86, 32 bits";
    case EM_RISCV:
      return "RISC-V";
    case EM_PPC64:
      return "POWER";
    default:
      return format("machine type {}", machine);
  }
}

}  // namespace

const std::string* ElfFile::find_note(std::string_view owner, std::uint32_t type) const {
  for (const ElfNote& note : notes) {
    if (note.owner == owner && note.type == type) {
      return &note.bytes;
    }
  }
  return nullptr;
}

std::optional<ElfFile> read_elf(const std::filesystem::path& path, ElfProblem& problem) {
  MappedFile file(path, ExitCode::kPlugin);
  return read_elf_bytes(file.text(), problem);
}

std::optional<ElfFile> read_elf_bytes(std::string_view bytes, ElfProblem& problem) {
  problem.id = "plugin/not-elf";
  if (bytes.size() < sizeof(Elf64_Ehdr) || bytes.substr(0, SELFMAG) != ELFMAG) {
    problem.message = bytes.empty() ? "is not a shared library (it is empty)"
                                    : format("is not a shared library ({})", first_bytes(bytes));
    return std::nullopt;
  }
  Elf64_Ehdr header;
  std::memcpy(&header, bytes.data(), sizeof header);
  if (header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_ident[EI_DATA] != ELFDATA2LSB ||
      header.e_machine != EM_X86_64) {
    problem = {"plugin/wrong-machine",
               format("is for {}, this host is x86-64", header.e_machine == EM_X86_64
                                                            ? "x86-64 with another byte order"
                                                            : machine_name(header.e_machine))};
    return std::nullopt;
  }
  if (header.e_type != ET_DYN) {
    problem.message = header.e_type == ET_EXEC ? "is a program and not a shared library"
                                               : "is an object file and not a shared library";
    return std::nullopt;
  }
  try {
    return ElfReader(bytes).read();
  } catch (const Damaged& damaged) {
    problem.message = "is a damaged shared library: " + damaged.what;
    return std::nullopt;
  }
}

}  // namespace sf
