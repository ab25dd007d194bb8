/* sf/tracker.h: the interface "sf.tracker/1" of a tracker (plugin kind SF_KIND_TRACKER).
 *
 * A tracker gets the figures of a run as they appear and takes them where people look at them. It stands
 * beside the host's own metrics.jsonl, never in its place: both get the same figures.
 *
 * Order of calls: begin, record (any number of times, steps never descend), finish. They come to rank 0's
 * instance alone; the instances of other ranks are created, started, stopped and destroyed, and called for
 * nothing.
 *
 * A failing begin ends the run before its first step: what was asked for can't be had. A failing record or
 * finish does not: the first failure is a warning with its text, all are counted, and the count is told at
 * the end and stands in the run's summary. record is called between two steps and the run waits for it, so a
 * tracker that talks to a network queues in record and sends on a thread of its own (made in begin, joined in
 * finish).
 *
 * Thread tags as in sf/plugin.h. Functions return SF_OK or a code, and then have filled in status. Nothing is
 * thrown through them; sf/tracker.hpp wraps all of it for C++.
 */
#ifndef SF_TRACKER_H
#define SF_TRACKER_H

#include "sf/plugin.h"

#ifdef __cplusplus
extern "C" {
#endif

#define SF_TRACKER "sf.tracker/1"

/* What is tracked. Borrowed for the call of begin. */
typedef struct sf_tracked_run {
  uint32_t struct_size;
  uint32_t reserved;
  const char* run_id;     /* the recipe's */
  const char* run_folder; /* absolute, exists; a tracker makes files and folders there under its own name only */
  const char* recipe;     /* the resolved recipe, TOML text: every value of the run */
  int64_t first_step;     /* the first step whose figures will come: 1, or one more than the checkpoint that is
                             resumed. What was recorded from this step on belongs to a future that was given up */
  int64_t steps_total;    /* how many steps the run is to have */
} sf_tracked_run;

/* One figure. Names have '/' between their parts: "loss", "perf/tokens_per_second", "eval/acceptance_length". */
typedef struct sf_figure {
  uint32_t struct_size;
  uint32_t reserved;
  const char* name;
  double value; /* may be infinite or NaN */
} sf_figure;

typedef struct sf_tracker {
  uint32_t struct_size;
  uint32_t reserved;
  /* [main] once, after start and before the first step. */
  int32_t (*begin)(sf_instance* instance, const sf_tracked_run* run, sf_status* status);
  /* [main] the figures of a step, a list of pointers that ends in null; borrowed for the call. A step may
   * come more than once, with other figures (training, then evaluation). */
  int32_t (*record)(sf_instance* instance, int64_t step, const sf_figure* const* figures, sf_status* status);
  /* [main] once after a begin that succeeded, also when the run fails: everything goes out. */
  int32_t (*finish)(sf_instance* instance, sf_status* status);
} sf_tracker;

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* SF_TRACKER_H */
