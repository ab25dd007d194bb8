/* sf/services.h: what the host offers to every plugin in C, by id through sf_host.get_service, from create
 * on. Valid until destroy has returned. Services that see tensors are in C++: "sf.ops/1" in sf/ops.hpp,
 * "sf.comm/1" in sf/comm.hpp.
 *
 * Thread tags as in sf/plugin.h.
 */
#ifndef SF_SERVICES_H
#define SF_SERVICES_H

#include "sf/plugin.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Random numbers as a function, not a sequence: they depend on the recipe's training.seed, the plugin's name,
 * the stream's name, row and place alone, so that neither another plugin nor another number of ranks, nor a
 * resumed run, shifts them. */
#define SF_RANDOM "sf.random/1"

typedef struct sf_random {
  uint32_t struct_size;
  uint32_t reserved;
  const void* ctx;
  /* [any] out[i]: 64 uniform bits of `stream` at (row, first + i). first + count stays below 2^32. */
  void (*draw)(const void* ctx, const char* stream, uint64_t row, uint64_t first, uint64_t count, uint64_t* out);
} sf_random;

/* Files in the run's folder, which belongs to the host. A plugin's files have its name, alone or before a '.',
 * '-' or '_': "my_tracker.csv". */
#define SF_RUN_FILES "sf.run-files/1"

typedef struct sf_run_files {
  uint32_t struct_size;
  uint32_t reserved;
  const void* ctx;
  const char* folder; /* absolute; it is there once training has begun */
  /* [any] a whole file: after a crash the old one or the new one is there. SF_INVALID_ARGUMENT for a name that
   * is not the plugin's, SF_IO when the disk fails. */
  int32_t (*write)(const void* ctx, const char* name, const void* data, uint64_t bytes, sf_status* status);
} sf_run_files;

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* SF_SERVICES_H */
