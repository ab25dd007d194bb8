/* sf/plugin.h: the part of a plugin that crosses in C.
 *
 * A plugin is one shared library with one job. It carries two ELF notes that the host reads from the file before it opens it (a build
 * note, sf_build, and a manifest, TOML text) and exports one function, sf_plugin_entry_v1. All else is reached from there.
 *
 * Rules for every struct: struct_size comes first and is sizeof; fields are only appended; reserved space is zero; sized integers only.
 * Until version 1.0 host and SDK must have exactly the same version. Strings are UTF-8 and end in zero.
 *
 * Thread tags: [main] the one thread that makes all lifecycle and step calls; [any] from any thread, reentrant.
 * Nothing may be thrown through a function of this header. sf/plugin.hpp wraps all of it for C++.
 */
#ifndef SF_PLUGIN_H
#define SF_PLUGIN_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of host and SDK, one number. SF_ABI_MINOR rises with every change of a header in include/sf, the version with every release of
 * one (tests/abi/interfaces.py compares). */
#define SF_ABI_MAJOR 0
#define SF_ABI_MINOR 5
#define SF_SDK_VERSION "0.2.0"

#define SF_EXPORT __attribute__((visibility("default")))

/* ELF notes: owner and types. */
#define SF_NOTE_OWNER "sf-plugin"
#define SF_NOTE_BUILD 1
#define SF_NOTE_MANIFEST 2

/* Which contract a plugin needs. A torch_cxx plugin passes at::Tensor, so it must be built with the host's LibTorch, patch level included. */
enum { SF_TIER_C = 1, SF_TIER_TORCH_CXX = 2 };

enum { SF_KIND_SHARDING = 1, SF_KIND_TRANSFORM = 2, SF_KIND_ALGORITHM = 3, SF_KIND_CHECKPOINT = 4, SF_KIND_TRACKER = 5 };

/* Bits of sf_build.flags. */
enum { SF_BUILD_CXX11_ABI = 1, SF_BUILD_GLIBCXX_DEBUG = 2, SF_BUILD_ASAN = 4, SF_BUILD_TSAN = 8 };

/* The build note: may this file be opened at all? Written by SF_PLUGIN (plugin.hpp) from compiler macros. 256 bytes, little endian. */
typedef struct sf_build {
  uint32_t struct_size;
  uint16_t abi_major; /* SF_ABI_MAJOR of the headers */
  uint16_t abi_minor; /* SF_ABI_MINOR of the headers */
  uint16_t reserved0;
  uint16_t tier;          /* SF_TIER_... */
  uint32_t kind;          /* SF_KIND_... */
  uint32_t torch_version; /* 0x020b0000 = 2.11.0; 0 for tier c */
  uint32_t cuda_version;  /* CUDART_VERSION; 0 when compiled without CUDA */
  uint32_t gxx_abi;       /* __GXX_ABI_VERSION; 0 for tier c */
  uint32_t flags;         /* SF_BUILD_... */
  char name[32];          /* [a-z][a-z0-9_]*; third parties prefix theirs: "acme_fsdp3" */
  char version[24];       /* semantic version of the plugin */
  char torch_variant[32]; /* "2.11.0+cu130"; empty for tier c */
  char compiler[40];      /* "g++ 12.2.0" */
  char sdk_version[16];   /* SF_SDK_VERSION of the headers */
  char reserved[80];      /* zero */
} sf_build;

/* Results, returned as int32_t. */
enum {
  SF_OK = 0,
  SF_INVALID_ARGUMENT = 1,
  SF_UNSUPPORTED = 2,
  SF_NOT_FOUND = 3,
  SF_IO = 4,
  SF_OUT_OF_MEMORY = 5,
  SF_COMMUNICATION = 6,
  SF_CANCELLED = 7,
  SF_INTERNAL = 8
};

/* Where a failing call puts its text. The caller's memory; untouched on SF_OK. */
typedef struct sf_status {
  uint32_t struct_size;
  int32_t code;
  char what[1024]; /* what failed, one sentence */
  char hint[512];  /* what to do, may be empty */
} sf_status;

enum { SF_LOG_TRACE = 0, SF_LOG_DEBUG = 1, SF_LOG_INFO = 2, SF_LOG_WARN = 3, SF_LOG_ERROR = 4 };

typedef struct sf_instance sf_instance; /* the plugin's own object */

/* What the host offers. Valid until destroy has returned. */
typedef struct sf_host {
  uint32_t struct_size;
  uint16_t abi_major, abi_minor;
  void* ctx;
  /* [any] finished text, no newline; the host adds the plugin's name, the rank and the time. instance may be null. */
  void (*log)(void* ctx, const sf_instance* instance, int32_t level, const char* file, int32_t line, const char* text);
  /* [any] 1 when the run is to end soon; poll it in long work. */
  int32_t (*stop_requested)(void* ctx);
  /* [main] an interface of the host by id: those of sf/services.h from create on, "sf.ops/1" likewise, "sf.comm/1" once the ranks have met
   * (sf/comm.hpp). Null and a status that says why when there is none; status may be null. Lives until destroy. */
  const void* (*get_service)(void* ctx, const char* id, sf_status* status);
} sf_host;

enum { SF_LIST_INTS = 1, SF_LIST_FLOATS = 2, SF_LIST_STRINGS = 3 };

/* A list option. The array of its type is set, the others are null. */
typedef struct sf_list {
  uint32_t struct_size;
  uint32_t type; /* SF_LIST_... */
  uint64_t count;
  const int64_t* ints;
  const double* floats;
  const char* const* strings;
} sf_list;

/* The plugin's resolved options: complete, typed, in range. A name is the option's name in the manifest.
 * Reading an option claims it: one that the user set and nobody claimed ends the run. Asking for a name that the manifest lacks, or with
 * another type, is SF_INTERNAL. bytes and duration options are read with get_int (bytes) and get_float (seconds); choice and path with
 * get_string. Valid, results included, until destroy has returned. All functions: [main]. */
typedef struct sf_options {
  uint32_t struct_size;
  void* ctx;
  int32_t (*get_bool)(void* ctx, const char* name, int32_t* out);
  int32_t (*get_int)(void* ctx, const char* name, int64_t* out);
  int32_t (*get_float)(void* ctx, const char* name, double* out);
  int32_t (*get_string)(void* ctx, const char* name, const char** out);
  int32_t (*get_list)(void* ctx, const char* name, const sf_list** out);
  /* Says that the option did something, `count` times more: linears converted, tables sharded. An option that the user set, for which
   * only zeros were reported, ends the run before the first step. */
  int32_t (*report_effect)(void* ctx, const char* name, int64_t count);
} sf_options;

/* Life: entry, create, start, work, stop, destroy; once in a run. */
typedef struct sf_plugin {
  uint32_t struct_size;
  const sf_build* build; /* the note itself */
  /* [main] may not start threads or touch a device. */
  int32_t (*create)(const sf_host* host, const sf_options* options, sf_instance** out, sf_status* status);
  /* [main] devices and ranks are up; threads may start. */
  int32_t (*start)(sf_instance* instance, sf_status* status);
  /* [main] joins threads, finishes work, drops tensors; may be called after a failed start. */
  int32_t (*stop)(sf_instance* instance, sf_status* status);
  /* [main] after stop, or after create alone. */
  void (*destroy)(sf_instance* instance);
  /* [any] an interface by id, null when the plugin does not offer it; lives until destroy. */
  const void* (*get_interface)(sf_instance* instance, const char* id);
} sf_plugin;

/* [main] The one exported symbol. Returns static data and does nothing else: no allocation, thread, device call or environment. */
SF_EXPORT const sf_plugin* sf_plugin_entry_v1(void);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* SF_PLUGIN_H */
