/* core/dist/gloo_library.h: the C interface of libsf_comm_gloo.so: bytes between processes through the gloo library. It is a library of its own because
 * LibTorch carries another gloo with the same symbols; it is opened with RTLD_LOCAL | RTLD_DEEPBIND and knows nothing of tensors.
 * Functions return 0, or another number with the reason in `problem`. One thread at a time. */
#ifndef SF_GLOO_LIBRARY_H
#define SF_GLOO_LIBRARY_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sf_gloo sf_gloo;

/* Where ranks leave their addresses. Each returns 0, or another number when the store is gone or the wait was too long. */
typedef struct sf_gloo_store {
  void* self;
  int (*set)(void* self, const char* key, const void* value, size_t bytes);
  int (*get)(void* self, const char* key, void* into, size_t capacity, size_t* bytes); /* waits until the key is there */
  int (*wait)(void* self, const char* key);
} sf_gloo_store;

typedef struct sf_gloo_open {
  int rank, size;
  const char* host;         /* name or address of this machine as the other ranks see it */
  const char* prefix;       /* of keys in the store */
  int64_t limit_ms;         /* of one operation */
  sf_gloo_store store;      /* used while opening only */
} sf_gloo_open;

typedef struct sf_gloo_api {
  uint32_t struct_size;
  sf_gloo* (*open)(const sf_gloo_open* arguments, char* problem, size_t problem_bytes);
  void (*close)(sf_gloo* self);
  /* whole[size * part_bytes] <- part of each rank; `part` may be this rank's place in `whole`. */
  int (*all_gather)(sf_gloo* self, void* whole, const void* part, size_t part_bytes, char* problem, size_t problem_bytes);
  /* out[r * bytes] <- rank r's in[own rank * bytes]. */
  int (*all_to_all)(sf_gloo* self, void* out, const void* in, size_t bytes, char* problem, size_t problem_bytes);
  int (*broadcast)(sf_gloo* self, void* data, size_t bytes, int root, char* problem, size_t problem_bytes);
} sf_gloo_api;

/* The one symbol of the library. */
const sf_gloo_api* sf_comm_gloo_v1(void);

#ifdef __cplusplus
}
#endif
#endif
