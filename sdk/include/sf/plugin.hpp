// sf/plugin.hpp: the C++ side of sf/plugin.h. A plugin in C++ is a class and one macro:
//
//   class MyDraft final : public sf::Algorithm {
//    public:
//     MyDraft(const sf::Host& host, const sf::Options& options);   // [main] may throw; touches no device and starts no thread
//     void start();                                                // [main] optional; devices and ranks are up
//     void stop();                                                 // [main] optional; may be called after a start that failed
//     const void* get_interface(std::string_view id);              // [any] null when not offered; lives until the object is destroyed
//   };
//   SF_PLUGIN(MyDraft, SF_KIND_ALGORITHM, SF_TIER_TORCH_CXX)
//
// What a member throws becomes a status with its text, so ordinary C++ is fine. Host and Options may be copied and kept until the object is
// destroyed. sf_add_plugin (CMake) embeds the manifest. Needs C++20 of g++ 12 or clang 14, or newer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "sf/error.hpp"
#include "sf/level.hpp"
#include "sf/plugin.h"

namespace sf {

/// What the host offers to this plugin.
class Host {
 public:
  explicit Host(const sf_host* host) : host_(host) {}

  /// [any] One line: lower case, no final period, units, names in quotes. The place is the caller's (clang 14 has no std::source_location).
  void log(Level level, const std::string& text, const char* file = __builtin_FILE(),
           int line = __builtin_LINE()) const {
    host_->log(host_->ctx, nullptr, static_cast<std::int32_t>(level), file, line, text.c_str());
  }

  /// [any] True when the run is to end soon.
  [[nodiscard]] bool stop_requested() const { return host_->stop_requested(host_->ctx) != 0; }

  /// [main] The host's interface `id` as T, or null when this host does not offer it (now).
  template <class T>
  [[nodiscard]] T* find_service(const char* id) const {
    sf_status status{};
    status.struct_size = sizeof(sf_status);
    return static_cast<T*>(const_cast<void*>(host_->get_service(host_->ctx, id, &status)));
  }

  /// [main] The host's interface `id` as T; throws Error with the host's reason when there is none.
  template <class T>
  [[nodiscard]] T& get_service(const char* id) const {
    sf_status status{};
    status.struct_size = sizeof(sf_status);
    const void* service = host_->get_service(host_->ctx, id, &status);
    if (service == nullptr) {
      throw Error(ExitCode::kPlugin, std::string("the host does not offer ") + id + ": " + status.what,
                  status.hint);
    }
    return *static_cast<T*>(const_cast<void*>(service));
  }

 private:
  const sf_host* host_;
};

/// The plugin's resolved options, all valid. get<T> takes bool, int64_t, double, std::string, or a
/// std::vector of the last three, and claims the option. A name or type that the manifest lacks throws: that
/// is a mistake in the plugin. All calls are [main].
class Options {
 public:
  explicit Options(const sf_options* options) : options_(options) {}

  template <class T>
  [[nodiscard]] T get(const char* name) const;

  /// `count` more things happened because of this option: linears converted, blocks compiled.
  void report_effect(const char* name, std::int64_t count) const {
    check(options_->report_effect(options_->ctx, name, count), name, "an effect");
  }

 private:
  static void check(std::int32_t code, const char* name, const char* type) {
    if (code != SF_OK) {
      throw Error(ExitCode::kInternal, std::string("the plugin reads option \"") + name + "\" as " + type +
                                           ", but its manifest has no such option of that type");
    }
  }

  [[nodiscard]] const sf_list& list(const char* name, std::uint32_t type, const char* type_name) const {
    const sf_list* out = nullptr;
    std::int32_t code = options_->get_list(options_->ctx, name, &out);
    if (code == SF_OK && out->type != type) {
      code = SF_INTERNAL;
    }
    check(code, name, type_name);
    return *out;
  }

  const sf_options* options_;
};

template <>
inline bool Options::get<bool>(const char* name) const {
  std::int32_t out = 0;
  check(options_->get_bool(options_->ctx, name, &out), name, "bool");
  return out != 0;
}

template <>
inline std::int64_t Options::get<std::int64_t>(const char* name) const {
  std::int64_t out = 0;
  check(options_->get_int(options_->ctx, name, &out), name, "int");
  return out;
}

template <>
inline double Options::get<double>(const char* name) const {
  double out = 0;
  check(options_->get_float(options_->ctx, name, &out), name, "float");
  return out;
}

template <>
inline std::string Options::get<std::string>(const char* name) const {
  const char* out = nullptr;
  check(options_->get_string(options_->ctx, name, &out), name, "string");
  return out;
}

template <>
inline std::vector<std::int64_t> Options::get<std::vector<std::int64_t>>(const char* name) const {
  const sf_list& found = list(name, SF_LIST_INTS, "ints");
  return {found.ints, found.ints + found.count};
}

template <>
inline std::vector<double> Options::get<std::vector<double>>(const char* name) const {
  const sf_list& found = list(name, SF_LIST_FLOATS, "floats");
  return {found.floats, found.floats + found.count};
}

template <>
inline std::vector<std::string> Options::get<std::vector<std::string>>(const char* name) const {
  const sf_list& found = list(name, SF_LIST_STRINGS, "strings");
  return {found.strings, found.strings + found.count};
}

/// Copies text into a status field, cut at a whole UTF-8 character when it is too long.
template <std::size_t N>
void copy_text(char (&to)[N], std::string_view text) {
  std::size_t length = std::min(text.size(), N - 1);
  while (length < text.size() && length > 0 && (static_cast<unsigned char>(text[length]) & 0xC0) == 0x80) {
    --length;
  }
  std::memcpy(to, text.data(), length);
  to[length] = 0;
}

inline void set_status(sf_status* status, std::int32_t code, std::string_view what,
                       std::string_view hint = "") {
  if (status != nullptr) {
    status->code = code;
    copy_text(status->what, what);
    copy_text(status->hint, hint);
  }
}

/// The status code that fits an exit code, and back.
inline std::int32_t status_code(ExitCode code) {
  switch (code) {
    case ExitCode::kOk:
      return SF_OK;
    case ExitCode::kUsage:
      return SF_INVALID_ARGUMENT;
    case ExitCode::kPlugin:
      return SF_UNSUPPORTED;
    case ExitCode::kData:  // NOLINT(bugprone-branch-clone): in the order of the codes
      return SF_IO;
    case ExitCode::kCheckpoint:
      return SF_IO;
    case ExitCode::kDevice:
      return SF_OUT_OF_MEMORY;
    case ExitCode::kCommunication:
      return SF_COMMUNICATION;
    case ExitCode::kInterrupted:
      return SF_CANCELLED;
    case ExitCode::kInternal:
      return SF_INTERNAL;
  }
  return SF_INTERNAL;
}

/// Runs `body`; an exception becomes a status, so that nothing is thrown through a C interface.
template <class Body>
std::int32_t guard(sf_status* status, Body&& body) noexcept {
  try {
    body();
    return SF_OK;
  } catch (const Error& error) {
    set_status(status, status_code(error.code()), error.what(), error.hint());
    return status_code(error.code());
  } catch (const std::bad_alloc&) {
    set_status(status, SF_OUT_OF_MEMORY, "out of host memory");
    return SF_OUT_OF_MEMORY;
  } catch (const std::invalid_argument& error) {
    set_status(status, SF_INVALID_ARGUMENT, error.what());
    return SF_INVALID_ARGUMENT;
  } catch (const std::exception& error) {
    set_status(status, SF_INTERNAL, error.what());
    return SF_INTERNAL;
  } catch (...) {
    set_status(status, SF_INTERNAL, "something was thrown that is no std::exception");
    return SF_INTERNAL;
  }
}

/// The functions of sf_plugin for a class. Used by SF_PLUGIN.
template <class T>
struct PluginCalls {
  static T& self(sf_instance* instance) { return *reinterpret_cast<T*>(instance); }

  static std::int32_t create(const sf_host* host, const sf_options* options, sf_instance** out,
                             sf_status* status) {
    return guard(status, [&] {
      *out = reinterpret_cast<sf_instance*>(std::make_unique<T>(Host(host), Options(options)).release());
    });
  }
  static std::int32_t start(sf_instance* instance, sf_status* status) {
    return guard(status, [&] {
      if constexpr (requires(T & t) { t.start(); }) {
        self(instance).start();
      }
    });
  }
  static std::int32_t stop(sf_instance* instance, sf_status* status) {
    return guard(status, [&] {
      if constexpr (requires(T & t) { t.stop(); }) {
        self(instance).stop();
      }
    });
  }
  static void destroy(sf_instance* instance) { std::unique_ptr<T>(&self(instance)).reset(); }
  static const void* get_interface(sf_instance* instance, const char* id) {
    const void* found = nullptr;
    guard(nullptr, [&] { found = self(instance).get_interface(id); });
    return found;
  }
};

/// "2.11.0+cu130" as 0x020b0000.
constexpr std::uint32_t parse_version(std::string_view text) {
  std::uint32_t part[3] = {0, 0, 0};
  int index = 0;
  for (char c : text) {
    if (c == '.' && index < 2) {
      ++index;
    } else if (c >= '0' && c <= '9') {
      part[index] = part[index] * 10 + static_cast<std::uint32_t>(c - '0');
    } else {
      break;
    }
  }
  return part[0] << 24 | part[1] << 16 | part[2];
}

/// The build note as it lies in the file: ELF note header, owner padded to four bytes, sf_build.
struct BuildNote {
  std::uint32_t owner_size;
  std::uint32_t build_size;
  std::uint32_t type;
  char owner[12];
  sf_build build;
};

template <std::size_t N, std::size_t M>
constexpr void put_text(char (&to)[N], const char (&text)[M]) {
  static_assert(M <= N, "the text is too long for its field of the build note");
  for (std::size_t i = 0; i < M; ++i) {
    to[i] = text[i];
  }
}

}  // namespace sf

// What sf_add_plugin defines. Without it (an editor, a syntax check) the header still compiles.
#ifndef SF_PLUGIN_NAME
#define SF_PLUGIN_NAME "unnamed"
#define SF_PLUGIN_VERSION "0.0.0"
#define SF_PLUGIN_TORCH_VARIANT ""
#endif

#if defined(__clang__)
#define SF_COMPILER_TEXT "clang++ " __clang_version__
#else
#define SF_COMPILER_TEXT "g++ " __VERSION__
#endif

#if defined(__has_feature) /* clang */
#define SF_HAS_FEATURE(name) __has_feature(name)
#else
#define SF_HAS_FEATURE(name) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || SF_HAS_FEATURE(address_sanitizer)
#define SF_FLAG_ASAN SF_BUILD_ASAN
#else
#define SF_FLAG_ASAN 0
#endif
#if defined(__SANITIZE_THREAD__) || SF_HAS_FEATURE(thread_sanitizer)
#define SF_FLAG_TSAN SF_BUILD_TSAN
#else
#define SF_FLAG_TSAN 0
#endif
#if defined(_GLIBCXX_DEBUG)
#define SF_FLAG_DEBUG_STL SF_BUILD_GLIBCXX_DEBUG
#else
#define SF_FLAG_DEBUG_STL 0
#endif
#if defined(_GLIBCXX_USE_CXX11_ABI) && _GLIBCXX_USE_CXX11_ABI
#define SF_FLAG_CXX11_ABI SF_BUILD_CXX11_ABI
#else
#define SF_FLAG_CXX11_ABI 0
#endif
#if defined(CUDART_VERSION)
#define SF_CUDA_VERSION CUDART_VERSION
#else
#define SF_CUDA_VERSION 0
#endif

namespace sf {

constexpr BuildNote make_build_note(std::uint32_t kind, std::uint16_t tier) {
  BuildNote note{};
  note.owner_size = sizeof(SF_NOTE_OWNER);
  note.build_size = sizeof(sf_build);
  note.type = SF_NOTE_BUILD;
  put_text(note.owner, SF_NOTE_OWNER);
  note.build.struct_size = sizeof(sf_build);
  note.build.abi_major = SF_ABI_MAJOR;
  note.build.abi_minor = SF_ABI_MINOR;
  note.build.tier = tier;
  note.build.kind = kind;
  note.build.flags = SF_FLAG_CXX11_ABI | SF_FLAG_DEBUG_STL | SF_FLAG_ASAN | SF_FLAG_TSAN;
  put_text(note.build.name, SF_PLUGIN_NAME);
  put_text(note.build.version, SF_PLUGIN_VERSION);
  put_text(note.build.compiler, SF_COMPILER_TEXT);
  put_text(note.build.sdk_version, SF_SDK_VERSION);
  if (tier == SF_TIER_TORCH_CXX) {
    note.build.torch_version = parse_version(SF_PLUGIN_TORCH_VARIANT);
    note.build.cuda_version = SF_CUDA_VERSION;
    note.build.gxx_abi = __GXX_ABI_VERSION;
    put_text(note.build.torch_variant, SF_PLUGIN_TORCH_VARIANT);
  }
  return note;
}

}  // namespace sf

/// Writes the build note, the descriptor and the entry of a plugin. Once per plugin, at file scope, in a C++
/// file.
#define SF_PLUGIN(Class, KIND, TIER)                                                                   \
  extern "C" {                                                                                         \
  __attribute__((section(".note.sf_build"), used,                                                      \
                 aligned(4))) constinit const ::sf::BuildNote sf_build_note =                          \
      ::sf::make_build_note(KIND, TIER);                                                               \
  SF_EXPORT const sf_plugin* sf_plugin_entry_v1(void) {                                                \
    using Calls = ::sf::PluginCalls<Class>;                                                            \
    static constexpr sf_plugin kPlugin = {sizeof(sf_plugin),    &sf_build_note.build, &Calls::create,  \
                                          &Calls::start,        &Calls::stop,         &Calls::destroy, \
                                          &Calls::get_interface};                                      \
    return &kPlugin;                                                                                   \
  }                                                                                                    \
  }
