#include "core/plugin/catalog.hpp"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <system_error>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/file.hpp"
#include "core/base/text.hpp"
#include "core/plugin/elf_file.hpp"

namespace sf {
namespace {

namespace fs = std::filesystem;

template <std::size_t N>
std::string field_text(const char (&field)[N]) {
  return {field, strnlen(field, N)};
}

// Is a library of that name where the system's linker looks? The linker's cache lists names; LibTorch's come
// from the engine's folders.
bool is_installed(const std::string& soname, const HostBuild& host) {
  auto is_in = [&](const fs::path& folder) {
    std::error_code ignored;
    return fs::exists(folder / soname, ignored);
  };
  if (std::any_of(host.library_folders.begin(), host.library_folders.end(), is_in)) {
    return true;
  }
  constexpr std::array<const char*, 6> kFolders = {
      "/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", "/usr/lib",
      "/usr/local/lib"};
  if (std::any_of(kFolders.begin(), kFolders.end(), is_in)) {
    return true;
  }
  try {
    MappedFile cache("/etc/ld.so.cache");
    std::string needle = '\0' + soname + '\0';
    return cache.text().find(needle) != std::string_view::npos;
  } catch (const Error&) {
    return true;  // no cache to ask: the loader will find out
  }
}

class Inspection {
 public:
  Inspection(PluginFile& file, const HostBuild& host) : file_(file), host_(host) {}

  void run() {
    file_.stem = file_.path.stem().string();
    std::optional<ElfFile> elf = read();
    if (!elf || !read_build_note(*elf)) {
      return;
    }
    check_abi();
    if (file_.build->tier == SF_TIER_TORCH_CXX) {
      check_torch();
    }
    check_manifest(*elf);
    check_libraries(*elf);
  }

 private:
  void error(const char* id, std::string message, std::string why = "", std::string fix = "") {
    file_.problems.error({.id = id,
                          .message = std::move(message),
                          .file = file_.describe(),
                          .why = std::move(why),
                          .fix = std::move(fix)});
  }

  std::optional<ElfFile> read() {
    ElfProblem problem;
    try {
      std::optional<ElfFile> elf = read_elf(file_.path, problem);
      if (!elf) {
        error(problem.id.c_str(), format("\"{}\" {}", file_.path, problem.message), "",
              "install the plugin again, or remove the file");
      }
      return elf;
    } catch (const Error& failure) {
      error("plugin/not-readable", failure.what(), "", failure.hint());
      return std::nullopt;
    }
  }

  bool read_build_note(const ElfFile& elf) {
    const std::string* note = elf.find_note(SF_NOTE_OWNER, SF_NOTE_BUILD);
    sf_build build{};
    if (note != nullptr && note->size() == sizeof build) {
      std::memcpy(&build, note->data(), sizeof build);
    }
    if (build.struct_size != sizeof build) {
      error("plugin/no-note",
            format("\"{}\" has no {}sf-plugin note; it is not a plugin of this program, or was linked "
                   "without the SDK's macro",
                   file_.path, note != nullptr ? "whole " : ""),
            "", "remove the file from the plugin folder, or build it with sf_add_plugin and SF_PLUGIN");
      return false;
    }
    file_.build = build;
    return true;
  }

  void check_abi() {
    const sf_build& build = *file_.build;
    std::string sdk = field_text(build.sdk_version);
    if (build.abi_major != host_.abi_major || build.abi_minor != host_.abi_minor ||
        sdk != host_.sdk_version) {
      error("plugin/abi",
            format("plugin \"{}\" was built with SDK {} (ABI {}.{}), this host is {} (ABI {}.{}); until 1.0 "
                   "they must be equal",
                   file_.name(), sdk, build.abi_major, build.abi_minor, host_.sdk_version, host_.abi_major,
                   host_.abi_minor),
            "until 1.0 every interface may change between versions",
            "rebuild it with this host's SDK, or install the build for this version");
    }
  }

  void check_torch() {
    const sf_build& build = *file_.build;
    std::string variant = field_text(build.torch_variant);
    auto number = [](const std::string& text) { return text.substr(0, text.find('+')); };
    const char* why =
        "its tier is torch_cxx: at::Tensor crosses as a C++ object, whose layout is fixed only within one "
        "LibTorch build";
    std::string fix = format("install the {} build for {}, or rebuild it with this host's SDK and LibTorch",
                             file_.name(), host_.torch_variant);
    if (host_.torch_variant.empty()) {
      error("plugin/torch-version",
            format("plugin \"{}\" was built for LibTorch {}, this host was built without LibTorch",
                   file_.name(), variant),
            why, "use a host with LibTorch");
    } else if (number(variant) != number(host_.torch_variant)) {
      error("plugin/torch-version",
            format("plugin \"{}\" was built for LibTorch {}, this host runs {}", file_.name(), variant,
                   host_.torch_variant),
            why, fix);
    } else if (variant != host_.torch_variant) {
      error("plugin/torch-variant",
            format("plugin \"{}\" was built for the variant {} of LibTorch, this host runs {}", file_.name(),
                   variant, host_.torch_variant),
            why, fix);
    }
    struct Flag {
      std::uint32_t bit;
      const char* id;
      const char* what;
      const char* why;
    };
    const std::array<Flag, 4> kFlags = {
        {{SF_BUILD_CXX11_ABI, "plugin/cxx-abi", "the C++11 string ABI (_GLIBCXX_USE_CXX11_ABI)",
          "std::string and std::list have two layouts"},
         {SF_BUILD_GLIBCXX_DEBUG, "plugin/debug-stl", "_GLIBCXX_DEBUG",
          "it changes the layout of containers"},
         {SF_BUILD_ASAN, "plugin/sanitizer", "the address sanitizer",
          "the sanitizer must be in the whole process or nowhere"},
         {SF_BUILD_TSAN, "plugin/sanitizer", "the thread sanitizer",
          "the sanitizer must be in the whole process or nowhere"}}};
    for (const Flag& flag : kFlags) {
      if (((build.flags ^ host_.flags) & flag.bit) != 0) {
        bool in_plugin = (build.flags & flag.bit) != 0;
        error(flag.id,
              format("plugin \"{}\" was compiled {} {}, this host {}", file_.name(),
                     in_plugin ? "with" : "without", flag.what, in_plugin ? "without" : "with"),
              flag.why, "compile both with the same flags");
      }
    }
    // The CUDA major is part of the variant ("+cu130"); the note's number tells when a plugin used another
    // toolkit than its LibTorch.
    std::size_t cu = host_.torch_variant.find("+cu");
    if (build.cuda_version != 0 && cu != std::string::npos) {
      std::string digits = host_.torch_variant.substr(cu + 3);
      std::string host_major = digits.substr(0, digits.size() - 1);
      if (to_text(std::uint64_t{build.cuda_version / 1000}) != host_major) {
        error("plugin/cuda-major",
              format("plugin \"{}\" was compiled with CUDA {}.{}, this host's LibTorch uses CUDA {}",
                     file_.name(), build.cuda_version / 1000, build.cuda_version % 1000 / 10, host_major),
              "two CUDA runtimes of different majors can't share streams",
              "rebuild it with the host's CUDA major");
      }
    }
  }

  void check_manifest(const ElfFile& elf) {
    const std::string* text = elf.find_note(SF_NOTE_OWNER, SF_NOTE_MANIFEST);
    if (text == nullptr) {
      error("plugin/bad-manifest", format("\"{}\" has no manifest in it", file_.path), "",
            "build it with sf_add_plugin(... MANIFEST plugin.toml ...)");
      return;
    }
    Diagnostics problems;
    file_.manifest = parse_manifest(*text, format("plugin.toml inside {}", file_.path.filename()), problems);
    file_.problems.add_all(problems);
    if (!file_.manifest) {
      return;
    }
    const std::array<std::array<std::string, 3>, 3> pairs = {
        {{"name", field_text(file_.build->name), file_.manifest->name},
         {"version", field_text(file_.build->version), file_.manifest->version},
         {"kind", kind_name(file_.build->kind), file_.manifest->kind}}};
    for (const auto& [field, note, manifest] : pairs) {
      if (note != manifest) {
        error("plugin/note-disagrees",
              format("in \"{}\" the note says {} \"{}\", the manifest says \"{}\"", file_.path, field, note,
                     manifest),
              "", "build it with sf_add_plugin, which takes both from one place; clean the build folder");
      }
    }
  }

  void check_libraries(const ElfFile& elf) {
    for (const std::string& library : elf.needed) {
      if (library.starts_with("libnccl")) {
        error("plugin/own-nccl",
              format("plugin \"{}\" is linked with {}; use the host's sf.comm/1", file_.name(), library),
              "two copies of NCCL in a process do not see each other's groups",
              "leave the library out when linking");
      } else if (!is_installed(library, host_)) {
        const bool is_torch = library.starts_with("libtorch") || library.starts_with("libc10");
        error("plugin/missing-library",
              format("plugin \"{}\" needs {}, which is not installed", file_.name(), library),
              is_torch ? "LibTorch is the host's, and this host finds none: neither beside itself nor where it was built" : "",
              is_torch ? "put the torch wheel beside sf: python3 -m pip install --target PREFIX torch==2.11.0, or links PREFIX/torch and PREFIX/nvidia to the folders of an installed one"
                       : "install the library, or a build of the plugin without it");
      }
    }
  }

  PluginFile& file_;
  const HostBuild& host_;
};

}  // namespace

HostBuild this_host(const std::string& torch_variant, const fs::path& engine) {
  HostBuild out;
  out.torch_variant = torch_variant;
#if defined(_GLIBCXX_USE_CXX11_ABI) && _GLIBCXX_USE_CXX11_ABI
  out.flags |= SF_BUILD_CXX11_ABI;
#endif
#if defined(_GLIBCXX_DEBUG)
  out.flags |= SF_BUILD_GLIBCXX_DEBUG;
#endif
#if defined(__SANITIZE_ADDRESS__)
  out.flags |= SF_BUILD_ASAN;
#endif
#if defined(__SANITIZE_THREAD__)
  out.flags |= SF_BUILD_TSAN;
#endif
  // The dynamic linker looks there as well; an installation beside another torch wheel names its folders so.
  if (const char* path = std::getenv("LD_LIBRARY_PATH")) {
    for (const std::string& folder : split(path, ':')) {
      if (!folder.empty()) {
        out.library_folders.emplace_back(folder);
      }
    }
  }
  std::error_code ignored;
  if (fs::exists(engine, ignored)) {
    ElfProblem problem;
    if (std::optional<ElfFile> elf = read_elf(engine, problem)) {
      out.library_folders.push_back(engine.parent_path());
      for (std::string folder : elf->run_path) {
        if (folder.starts_with("$ORIGIN")) {
          folder = engine.parent_path().string() + folder.substr(7);
        }
        out.library_folders.emplace_back(std::move(folder));
      }
    }
  }
  return out;
}

std::string PluginFile::name() const {
  return build ? field_text(build->name) : stem;
}

std::string PluginFile::describe() const {
  if (!build) {
    return path.string();
  }
  return format("{} (version {}, {})", path, field_text(build->version), field_text(build->compiler));
}

const char* kind_name(std::uint32_t kind) {
  switch (kind) {
    case SF_KIND_SHARDING:
      return "sharding";
    case SF_KIND_TRANSFORM:
      return "transform";
    case SF_KIND_ALGORITHM:
      return "algorithm";
    case SF_KIND_CHECKPOINT:
      return "checkpoint";
    case SF_KIND_TRACKER:
      return "tracker";
    default:
      return "unknown";
  }
}

bool is_plugin_name(std::string_view text) {
  return !text.empty() && text[0] >= 'a' && text[0] <= 'z' &&
         text.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_") == std::string_view::npos;
}

PluginFile inspect_plugin(const fs::path& path, const std::string& origin, const HostBuild& host) {
  PluginFile out;
  out.path = path;
  out.origin = origin;
  Inspection(out, host).run();
  return out;
}

Catalog::Catalog(const SearchRequest& request, const std::vector<std::string>& named, const HostBuild& host,
                 Diagnostics& problems)
    : dirs_(plugin_dirs(request, problems)) {
  auto add = [&](const fs::path& path, const std::string& origin) {
    PluginFile file = inspect_plugin(path, origin, host);
    std::string why;
    if (!is_safe_to_load_from(path, why) && !is_allowed_unsafe(path, request.allowed_unsafe)) {
      file.problems.error(
          {.id = "plugin/unsafe-path",
           .message = format(
               "{}; plugins are loaded only from files and folders that only root or you can write", why),
           .file = path.string(),
           .why = "whoever can write there can run code as you",
           .fix = format("chmod go-w, another folder, or --allow-unsafe-path {}", path.parent_path())});
    }
    files_.push_back(std::move(file));
  };
  for (const std::string& text : named) {
    std::size_t equals = text.find('=');
    fs::path path = equals == std::string::npos ? fs::path() : fs::path(text.substr(equals + 1));
    std::error_code ignored;
    if (!path.is_absolute() || !fs::is_regular_file(path, ignored)) {
      problems.error(
          {.id = "plugin/bad-flag",
           .message = format(
               "\"--plugin {}\" is not of the form name=/absolute/file.so with a file that exists", text),
           .fix = "for example --plugin fp8=/opt/sf/lib/sf/plugins/fp8.so"});
      continue;
    }
    add(fs::canonical(path), "--plugin");
    if (files_.back().name() != text.substr(0, equals)) {
      problems.error({.id = "plugin/bad-flag",
                      .message = format("\"--plugin {}\" names a file whose plugin is called \"{}\"", text,
                                        files_.back().name()),
                      .fix = format("--plugin {}={}", files_.back().name(), path)});
    }
  }
  for (const PluginDir& dir : dirs_) {
    std::vector<fs::path> paths;
    for (const fs::directory_entry& entry : fs::directory_iterator(dir.path)) {
      std::error_code ignored;
      if (entry.path().extension() == ".so" && entry.is_regular_file(ignored)) {
        paths.push_back(entry.path());
      }
    }
    std::sort(paths.begin(), paths.end());
    for (const fs::path& path : paths) {
      fs::path real = fs::canonical(path);
      if (std::none_of(files_.begin(), files_.end(),
                       [&](const PluginFile& other) { return other.path == real; })) {
        add(real, dir.origin);
      }
    }
  }
}

std::vector<Manifest> Catalog::manifests() const {
  std::vector<Manifest> out;
  for (const PluginFile& file : files_) {
    if (file.manifest) {
      out.push_back(*file.manifest);
    }
  }
  return out;
}

const PluginFile* Catalog::find(const std::string& name, const Place& place, Diagnostics& problems) const {
  if (!is_plugin_name(name)) {
    problems.error(
        {.id = "plugin/bad-name",
         .message = format("plugin name \"{}\" is not of the form [a-z][a-z0-9_]*", name),
         .place = place,
         .why =
             "a recipe names a plugin and never a path, so that opening a recipe can't run somebody's code",
         .fix = "write the name that sf-host plugins shows; a file is named with --plugin "
                "name=/absolute/file.so"});
    return nullptr;
  }
  std::vector<const PluginFile*> found;
  std::vector<std::string> names;
  for (const PluginFile& file : files_) {
    names.push_back(file.name());
    if (file.name() == name) {
      found.push_back(&file);
    }
  }
  if (found.empty()) {
    std::vector<std::string> places;
    for (const PluginDir& dir : dirs_) {
      std::vector<std::string> skipped;
      for (const PluginFile& file : files_) {
        if (file.path.parent_path() == dir.path && !file.build && file.problems.has_errors()) {
          skipped.push_back(format("{}: {}", file.path.filename(), file.problems.all().front().id));
        }
      }
      places.push_back(format("{} ({}{})", dir.path, dir.origin,
                              skipped.empty() ? "" : "; skipped " + join(skipped, ", ")));
    }
    std::string near = did_you_mean(name, names);
    problems.error(
        {.id = "plugin/not-found",
         .message = format("no plugin \"{}\"", name),
         .place = place,
         .note = near.empty() ? "" : format("did you mean \"{}\"?", near),
         .why = places.empty() ? "there is no folder to look in" : "looked in " + join(places, ", "),
         .fix = "install it there, or name its folder with --plugin-path or SF_PLUGIN_PATH"});
    return nullptr;
  }
  if (found.size() > 1 && found.front()->origin != "--plugin") {
    problems.error({.id = "plugin/duplicate",
                    .message = format("two plugins are called \"{}\": {} and {}", name, found[0]->describe(),
                                      found[1]->describe()),
                    .place = place,
                    .fix = format("remove one, or name one: --plugin {}={}", name, found[0]->path)});
    return nullptr;
  }
  if (!found.front()->fits()) {
    problems.add_all(found.front()->problems);
    return nullptr;
  }
  return found.front();
}

}  // namespace sf
