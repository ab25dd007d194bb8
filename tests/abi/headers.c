/* The C headers are plain C11, and the layout of what lies in files is fixed. Compiling this file is the test. */
#include "sf/checkpoint.h"
#include "sf/plugin.h"
#include "sf/services.h"
#include "sf/tracker.h"

#include <stddef.h>

_Static_assert(sizeof(sf_build) == 256, "the build note has 256 bytes");
_Static_assert(offsetof(sf_build, tier) == 10, "tier");
_Static_assert(offsetof(sf_build, kind) == 12, "kind");
_Static_assert(offsetof(sf_build, flags) == 28, "flags");
_Static_assert(offsetof(sf_build, name) == 32, "name");
_Static_assert(offsetof(sf_build, version) == 64, "version");
_Static_assert(offsetof(sf_build, torch_variant) == 88, "torch_variant");
_Static_assert(offsetof(sf_build, compiler) == 120, "compiler");
_Static_assert(offsetof(sf_build, sdk_version) == 160, "sdk_version");
_Static_assert(offsetof(sf_plugin, struct_size) == 0 && offsetof(sf_host, struct_size) == 0 && offsetof(sf_options, struct_size) == 0 &&
                   offsetof(sf_status, struct_size) == 0 && offsetof(sf_list, struct_size) == 0,
               "struct_size comes first");
_Static_assert(sizeof(SF_NOTE_OWNER) == 10, "owner of the notes");
_Static_assert(offsetof(sf_tracker, struct_size) == 0 && offsetof(sf_tracked_run, struct_size) == 0 && offsetof(sf_figure, struct_size) == 0 &&
                   offsetof(sf_checkpoint_writer, struct_size) == 0 && offsetof(sf_write, struct_size) == 0,
               "struct_size comes first");
