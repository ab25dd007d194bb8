/* sf/checkpoint.h: the interface "sf.checkpoint-writer/1" of a checkpoint writer (plugin kind
 * SF_KIND_CHECKPOINT).
 *
 * A writer moves bytes to files and says when they are safe. It knows nothing of formats: the host lays out
 * the files, gives their bytes piece by piece, and commits the step (index, marker, names) after the writers
 * of all ranks have said that their files are synced. A step that was never committed does not exist, so a
 * writer that is killed at any moment does no harm.
 *
 * Order of calls for one step: begin, put (any number of times), finish; then poll or wait until done_step
 * reaches the step. The host may begin the next step before the last one is done; a writer that can't take
 * two at once waits in begin.
 *
 * Thread tags as in sf/plugin.h. Functions return SF_OK or a code, and then have filled in status.
 */
#ifndef SF_CHECKPOINT_H
#define SF_CHECKPOINT_H

#include "sf/plugin.h"

#ifdef __cplusplus
extern "C" {
#endif

#define SF_CHECKPOINT_WRITER "sf.checkpoint-writer/1"

/* One piece of one file. The struct is borrowed for the call; the bytes are lent until release is called. */
typedef struct sf_write {
  uint32_t struct_size;
  uint32_t reserved;
  const char* file; /* inside the step's directory, no '/': "rank00003.safetensors" */
  uint64_t offset;  /* of the piece in its file; pieces come in any order, never overlap and leave no gap */
  const void* data; /* host memory, contiguous (pinned when it came from a device) */
  uint64_t bytes;
  void* lease; /* give it back with release */
} sf_write;

typedef struct sf_checkpoint_writer {
  uint32_t struct_size;
  uint32_t reserved;
  /* [main] the directory exists, is empty and belongs to this step alone. */
  int32_t (*begin)(sf_instance* instance, const char* directory, int64_t step, sf_status* status);
  /* [main] takes a piece; may return before it is written. release(lease) is called exactly once per call of
   * put, from any thread, when the buffer is no longer needed: also when put or the writing fails. release
   * may be slow (it takes the checksum) and is not called under locks. */
  int32_t (*put)(sf_instance* instance, const sf_write* piece, void (*release)(void* lease),
                 sf_status* status);
  /* [main] no more pieces for this step; does not wait. */
  int32_t (*finish)(sf_instance* instance, sf_status* status);
  /* [main] the newest step whose files are all on disk (fsync) on this rank, -1 before the first. A failure
   * since the last call is returned here once, and the failed step is given up. */
  int32_t (*poll)(sf_instance* instance, int64_t* done_step, sf_status* status);
  /* [main] like poll, but first waits until nothing is in flight or the time is over; a negative time means
   * forever. */
  int32_t (*wait)(sf_instance* instance, int64_t timeout_ms, sf_status* status);
} sf_checkpoint_writer;

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* SF_CHECKPOINT_H */
