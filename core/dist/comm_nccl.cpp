// NCCL behind core/dist/nccl_library.h, in libsf_engine_cuda.so. Communicators are non-blocking: every call returns, and what it began is asked for with a
// time limit, so that a rank that is gone never stops another in a call.
#include <cuda_runtime.h>
#include <nccl.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/dist/nccl_library.h"
#ifdef SF_WITH_KERNELS
#include "core/dist/peer_copies.hpp"
#endif

namespace {

using Clock = std::chrono::steady_clock;

void check(cudaError_t code, const char* doing) {
  if (code != cudaSuccess) {
    throw std::runtime_error(std::string(doing) + ": " + cudaGetErrorString(code));
  }
}

std::string text_of(ncclResult_t code, ncclComm_t communicator) {
  std::string text = ncclGetErrorString(code);
  const char* more = ncclGetLastError(communicator);
  return more != nullptr && more[0] != 0 ? text + " (" + more + ")" : text;
}

// Events are made once and used again: a window issues some dozens of collectives.
class EventPool {
 public:
  cudaEvent_t take() {
    {
      const std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        const cudaEvent_t event = free_.back();
        free_.pop_back();
        return event;
      }
    }
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
    return event;
  }
  void give_back(cudaEvent_t event) {
    const std::lock_guard lock(mutex_);
    free_.push_back(event);
  }

 private:
  std::mutex mutex_;
  std::vector<cudaEvent_t> free_;
};

}  // namespace

struct sf_nccl {
  ncclComm_t communicator = nullptr;
  cudaStream_t stream = nullptr;
  int device = 0, rank = 0, size = 1;
  std::chrono::milliseconds limit{0};
  EventPool events;
  // Asking a non-blocking communicator how it is also finishes the job of its last call, so two threads must not ask at once.
  std::mutex calls;
  std::atomic<bool> aborted = false;
#ifdef SF_WITH_KERNELS
  std::unique_ptr<sf::PeerCopies> peers;
#endif
};

struct sf_nccl_work {
  sf_nccl* owner = nullptr;
  cudaEvent_t done = nullptr;
};

namespace {

void put(const std::exception& error, char* problem, size_t bytes) { std::snprintf(problem, bytes, "%s", error.what()); }

template <class Body>
int guarded(char* problem, size_t bytes, Body&& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    put(error, problem, bytes);
    return 1;
  }
}

// A non-blocking call may still be at work when it returns; the next one must not come before it is through.
void settle(sf_nccl& self, ncclResult_t code) {
  const auto end = Clock::now() + self.limit;
  while (code == ncclInProgress) {
    if (self.aborted) {
      throw std::runtime_error("aborted");
    }
    if (Clock::now() > end) {
      throw std::runtime_error("not all ranks took part within the time limit");
    }
    std::this_thread::yield();
    if (const ncclResult_t asked = ncclCommGetAsyncError(self.communicator, &code); asked != ncclSuccess) {
      code = asked;
    }
  }
  if (code != ncclSuccess) {
    throw std::runtime_error(text_of(code, self.communicator));
  }
}

ncclDataType_t type_of(int type) {
  switch (type) {
    case SF_NCCL_FLOAT32: return ncclFloat32;
    case SF_NCCL_BFLOAT16: return ncclBfloat16;
    case SF_NCCL_FLOAT64: return ncclFloat64;
    case SF_NCCL_INT64: return ncclInt64;
    default: return ncclUint8;
  }
}

int make_id(void* id, char* problem, size_t bytes) {
  return guarded(problem, bytes, [&] {
    ncclUniqueId made;
    static_assert(sizeof made == SF_NCCL_ID_BYTES);
    if (const ncclResult_t code = ncclGetUniqueId(&made); code != ncclSuccess) {
      throw std::runtime_error(text_of(code, nullptr));
    }
    std::memcpy(id, &made, sizeof made);
  });
}

sf_nccl* open(const void* id, int rank, int size, int device, int64_t limit_ms, char* problem, size_t bytes) {
  auto self = std::make_unique<sf_nccl>();
  self->device = device;
  self->rank = rank;
  self->size = size;
  self->limit = std::chrono::milliseconds(limit_ms);
  const int failed = guarded(problem, bytes, [&] {
    check(cudaSetDevice(device), "taking the GPU");
    int least = 0, greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "asking for priorities");
    check(cudaStreamCreateWithPriority(&self->stream, cudaStreamNonBlocking, greatest), "making a stream");
    ncclUniqueId shared;
    std::memcpy(&shared, id, sizeof shared);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    settle(*self, ncclCommInitRankConfig(&self->communicator, size, shared, rank, &config));
  });
  return failed != 0 ? nullptr : self.release();
}

// Between what the caller's stream has queued and what it queues after wait().
template <class Call, class Issue>
sf_nccl_work* run(sf_nccl* self, const Call* call, char* problem, size_t bytes, Issue&& issue) {
  auto work = std::make_unique<sf_nccl_work>();
  work->owner = self;
  const int failed = guarded(problem, bytes, [&] {
    const std::lock_guard lock(self->calls);
    const cudaEvent_t ready = self->events.take();
    check(cudaEventRecord(ready, static_cast<cudaStream_t>(call->stream)), "recording an event");
    check(cudaStreamWaitEvent(self->stream, ready, 0), "waiting for an event");
    self->events.give_back(ready);  // the wait has taken what was recorded; the event may be recorded anew
    issue();
    work->done = self->events.take();
    check(cudaEventRecord(work->done, self->stream), "recording an event");
  });
  return failed != 0 ? nullptr : work.release();
}

sf_nccl_work* all_gather(sf_nccl* self, const sf_nccl_call* call, char* problem, size_t bytes) {
  return run(self, call, problem, bytes,
             [&] { settle(*self, ncclAllGather(call->in, call->out, call->count, type_of(call->type), self->communicator, self->stream)); });
}

sf_nccl_work* reduce_scatter(sf_nccl* self, const sf_nccl_call* call, char* problem, size_t bytes) {
  return run(self, call, problem, bytes,
             [&] { settle(*self, ncclReduceScatter(call->in, call->out, call->count, type_of(call->type), ncclSum, self->communicator, self->stream)); });
}

sf_nccl_work* all_reduce(sf_nccl* self, const sf_nccl_call* call, char* problem, size_t bytes) {
  const ncclRedOp_t operation = call->reduction == SF_NCCL_MAX ? ncclMax : ncclSum;
  return run(self, call, problem, bytes,
             [&] { settle(*self, ncclAllReduce(call->in, call->out, call->count, type_of(call->type), operation, self->communicator, self->stream)); });
}

sf_nccl_work* broadcast(sf_nccl* self, const sf_nccl_call* call, char* problem, size_t bytes) {
  return run(self, call, problem, bytes, [&] {
    settle(*self, ncclBroadcast(call->in, call->out, call->count, type_of(call->type), call->root, self->communicator, self->stream));
  });
}

int wait(sf_nccl_work* work, void* stream, char* problem, size_t bytes) {
  return guarded(problem, bytes, [&] { check(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), work->done, 0), "waiting for a collective"); });
}

// A thread begins on GPU 0, and a first call there would make a context of some hundred megabytes on a GPU that belongs to another rank.
void take_device(int device) {
  thread_local int taken = -1;
  if (taken != device && cudaSetDevice(device) == cudaSuccess) {
    taken = device;
  }
}

// Not ready is the one answer that means "wait": a failed device would else keep the watchdog waiting.
int is_done(sf_nccl_work* work) {
  take_device(work->owner->device);
  return cudaEventQuery(work->done) != cudaErrorNotReady ? 1 : 0;
}

void release(sf_nccl_work* work) {
  work->owner->events.give_back(work->done);
  delete work;
}

int register_buffer(sf_nccl* self, void* data, size_t size, char* problem, size_t bytes) {
  return guarded(problem, bytes, [&] {
    const std::lock_guard lock(self->calls);
    void* handle = nullptr;  // kept by NCCL until the communicator ends, as the buffer is
    settle(*self, ncclCommRegister(self->communicator, data, size, &handle));
  });
}

int problem_of(sf_nccl* self, char* problem, size_t bytes) {
  take_device(self->device);
  const std::unique_lock lock(self->calls, std::try_to_lock);
  ncclResult_t code = ncclSuccess;
  if (!lock.owns_lock() || self->aborted || ncclCommGetAsyncError(self->communicator, &code) != ncclSuccess || code == ncclSuccess || code == ncclInProgress) {
    return 0;
  }
  std::snprintf(problem, bytes, "%s", text_of(code, self->communicator).c_str());
  return 1;
}

void abort(sf_nccl* self) {
  if (!self->aborted.exchange(true)) {
    take_device(self->device);
#ifdef SF_WITH_KERNELS
    if (self->peers != nullptr) {
      self->peers->give_up();
    }
#endif
    ncclCommAbort(self->communicator);
  }
}

#ifdef SF_WITH_KERNELS

static_assert(sizeof(sf::PeerHandle) == SF_PEER_HANDLE_BYTES && sizeof(sf::PeerCopy) == sizeof(sf_peer_copy));

sf::PeerHandle handle_at(const void* bytes, int index) {
  sf::PeerHandle handle;
  std::memcpy(&handle, static_cast<const char*>(bytes) + static_cast<size_t>(index) * sizeof handle, sizeof handle);
  return handle;
}

int make_peers(sf_nccl* self, void* handle, char* problem, size_t bytes) {
  return guarded(problem, bytes, [&] {
    self->peers = std::make_unique<sf::PeerCopies>(self->rank, self->size);
    const sf::PeerHandle made = self->peers->flags();
    std::memcpy(handle, &made, sizeof made);
  });
}

int meet_peers(sf_nccl* self, const void* handles, char* problem, size_t bytes) {
  return guarded(problem, bytes, [&] {
    std::vector<void*> flags;
    for (int rank = 0; rank < self->size; ++rank) {
      flags.push_back(rank == self->rank ? nullptr : self->peers->open(handle_at(handles, rank)));
    }
    self->peers->meet(flags);
  });
}

int share_memory(sf_nccl* self, const void* data, void* handle, char* problem, size_t bytes) {
  return guarded(problem, bytes, [&] {
    const sf::PeerHandle made = self->peers->handle_of(data);
    std::memcpy(handle, &made, sizeof made);
  });
}

int open_memory(sf_nccl* self, const void* handle, void** data, char* problem, size_t bytes) {
  return guarded(problem, bytes, [&] { *data = self->peers->open(handle_at(handle, 0)); });
}

sf_nccl_work* exchange(sf_nccl* self, const sf_peer_exchange* call, char* problem, size_t bytes) {
  return run(self, call, problem, bytes, [&] {
    std::vector<sf::PeerSum> sums;
    for (int i = 0; i < call->sums_count; ++i) {
      const sf_peer_sum& sum = call->sums[i];
      sums.push_back({.sum = sum.sum, .parts = sum.parts, .count = sum.parts_count, .elements = sum.elements, .is_bfloat16 = call->type == SF_NCCL_BFLOAT16,
                      .float_part = sum.float_part});
    }
    self->peers->exchange(reinterpret_cast<const sf::PeerCopy*>(call->copies), call->copies_count, sums, self->stream);
  });
}

#else

constexpr const char* kNoPeers = "this build has no CUDA kernels";

int make_peers(sf_nccl*, void*, char* problem, size_t bytes) { return std::snprintf(problem, bytes, "%s", kNoPeers); }
int meet_peers(sf_nccl*, const void*, char* problem, size_t bytes) { return std::snprintf(problem, bytes, "%s", kNoPeers); }
int share_memory(sf_nccl*, const void*, void*, char* problem, size_t bytes) { return std::snprintf(problem, bytes, "%s", kNoPeers); }
int open_memory(sf_nccl*, const void*, void**, char* problem, size_t bytes) { return std::snprintf(problem, bytes, "%s", kNoPeers); }
sf_nccl_work* exchange(sf_nccl*, const sf_peer_exchange*, char* problem, size_t bytes) {
  std::snprintf(problem, bytes, "%s", kNoPeers);
  return nullptr;
}

#endif

int version() {
  int number = 0;
  ncclGetVersion(&number);
  return number;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const sf_nccl_api* sf_nccl_v1(void) {
  static const sf_nccl_api api = {sizeof(sf_nccl_api), version(),  make_id, open,    all_gather,      reduce_scatter, all_reduce,
                                  broadcast,           wait,       is_done, release, register_buffer, problem_of,     abort,
                                  make_peers,          meet_peers, share_memory, open_memory, exchange};
  return &api;
}
