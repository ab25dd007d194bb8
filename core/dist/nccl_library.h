/* core/dist/nccl_library.h: NCCL, and copies between GPUs of one machine, as libsf_engine_cuda.so offers them: pointers, counts and streams, no tensors. Functions return 0, or another number with the
 * reason in `problem`. One thread issues; is_done, problem_of and abort may be called by another at the same time. */
#ifndef SF_NCCL_LIBRARY_H
#define SF_NCCL_LIBRARY_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { SF_NCCL_ID_BYTES = 128, SF_PEER_HANDLE_BYTES = 72 };
enum { SF_NCCL_FLOAT32 = 0, SF_NCCL_BFLOAT16 = 1, SF_NCCL_FLOAT64 = 2, SF_NCCL_INT64 = 3, SF_NCCL_BYTES = 4 };
enum { SF_NCCL_SUM = 0, SF_NCCL_MAX = 1 };

typedef struct sf_nccl sf_nccl;           /* a communicator with a stream of its own, of high priority */
typedef struct sf_nccl_work sf_nccl_work; /* a collective that was issued */

/* Each starts after what `stream` has queued and runs on the communicator's own stream. */
typedef struct sf_nccl_call {
  void* out;
  const void* in;
  uint64_t count;   /* elements: of the part in all_gather and reduce_scatter */
  int type;         /* SF_NCCL_* */
  int reduction;    /* of all_reduce */
  int root;         /* of broadcast */
  void* stream;     /* cudaStream_t */
} sf_nccl_call;

typedef struct sf_peer_copy {
  void* to;
  const void* from;
  uint64_t bytes;
} sf_peer_copy;

enum { SF_PEERS_MOST = 16 };

/* sum[i] = parts[0][i] + parts[1][i] + ..., in this order, in float32. Parts are of the exchange's type, the one of number float_part is float32; -1: none. */
typedef struct sf_peer_sum {
  float* sum;
  const void* parts[SF_PEERS_MOST];
  int parts_count;
  int float_part;
  uint64_t elements;
} sf_peer_sum;

/* What each rank copies from the others' memory once all have come this far; then the sums, if there are any. It is done when all ranks have copied. */
typedef struct sf_peer_exchange {
  const sf_peer_copy* copies;
  int copies_count;
  const sf_peer_sum* sums;
  int sums_count;
  int type;           /* of the sums' parts: SF_NCCL_FLOAT32 or SF_NCCL_BFLOAT16 */
  void* stream;       /* cudaStream_t: starts after what it has queued */
} sf_peer_exchange;

typedef struct sf_nccl_api {
  uint32_t struct_size;
  int version;      /* 22809 */
  int (*make_id)(void* id, char* problem, size_t problem_bytes);
  /* Waits for all ranks at most limit_ms. */
  sf_nccl* (*open)(const void* id, int rank, int size, int device, int64_t limit_ms, char* problem, size_t problem_bytes);
  sf_nccl_work* (*all_gather)(sf_nccl* self, const sf_nccl_call* call, char* problem, size_t problem_bytes);
  sf_nccl_work* (*reduce_scatter)(sf_nccl* self, const sf_nccl_call* call, char* problem, size_t problem_bytes);
  sf_nccl_work* (*all_reduce)(sf_nccl* self, const sf_nccl_call* call, char* problem, size_t problem_bytes);
  sf_nccl_work* (*broadcast)(sf_nccl* self, const sf_nccl_call* call, char* problem, size_t problem_bytes);
  int (*wait)(sf_nccl_work* work, void* stream, char* problem, size_t problem_bytes); /* the stream waits, not the host */
  int (*is_done)(sf_nccl_work* work);  /* 1 when it is, or when the device has failed: then problem_of or the next call says so */
  void (*release)(sf_nccl_work* work);
  int (*register_buffer)(sf_nccl* self, void* data, size_t bytes, char* problem, size_t problem_bytes);
  /* 1 and a text when NCCL has met an error that no call returned: another rank's process is gone, the network failed. */
  int (*problem_of)(sf_nccl* self, char* problem, size_t problem_bytes);
  void (*abort)(sf_nccl* self);        /* collectives in flight end without a result; the communicator is of no use afterwards */
  /* Copies between the ranks' GPUs, on the communicator's stream. Handles are SF_PEER_HANDLE_BYTES long and are opened by other processes of the machine.
   * Flags first: make_peers gives the handle of the own ones, meet_peers takes the others', in rank order. Fails where a GPU or the system does not allow it. */
  int (*make_peers)(sf_nccl* self, void* handle, char* problem, size_t problem_bytes);
  int (*meet_peers)(sf_nccl* self, const void* handles, char* problem, size_t problem_bytes);
  int (*share_memory)(sf_nccl* self, const void* data, void* handle, char* problem, size_t problem_bytes);
  int (*open_memory)(sf_nccl* self, const void* handle, void** data, char* problem, size_t problem_bytes);
  sf_nccl_work* (*exchange)(sf_nccl* self, const sf_peer_exchange* exchange, char* problem, size_t problem_bytes);
} sf_nccl_api;

const sf_nccl_api* sf_nccl_v1(void);

#ifdef __cplusplus
}
#endif
#endif
