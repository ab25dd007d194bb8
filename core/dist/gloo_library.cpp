#include "core/dist/gloo_library.h"

#include <gloo/allgather.h>
#include <gloo/alltoall.h>
#include <gloo/broadcast.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/tcp/device.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

struct sf_gloo {
  std::shared_ptr<gloo::rendezvous::Context> context;
};

namespace {

constexpr size_t kValueBytes = 1 << 20;   // an address of each rank, some hundred bytes

class Store final : public gloo::rendezvous::Store {
 public:
  Store(const sf_gloo_store& store, std::string prefix) : store_(store), prefix_(std::move(prefix)) {}

  void set(const std::string& key, const std::vector<char>& data) override {
    check(store_.set(store_.self, name(key).c_str(), data.data(), data.size()), key);
  }
  std::vector<char> get(const std::string& key) override {
    std::vector<char> value(kValueBytes);
    size_t bytes = 0;
    check(store_.get(store_.self, name(key).c_str(), value.data(), value.size(), &bytes), key);
    value.resize(bytes);
    return value;
  }
  void wait(const std::vector<std::string>& keys) override {
    for (const std::string& key : keys) {
      check(store_.wait(store_.self, name(key).c_str()), key);
    }
  }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds&) override { wait(keys); }

 private:
  std::string name(const std::string& key) const { return prefix_ + key; }
  static void check(int code, const std::string& key) {
    if (code != 0) {
      throw std::runtime_error("the address of rank " + key + " is not in the run's store");
    }
  }
  const sf_gloo_store& store_;
  std::string prefix_;
};

// gloo's messages begin with its source line: "[/build/.../pair.cc:598] Connection closed by peer [127.0.0.1]:3211".
void put_problem(const std::exception& error, char* problem, size_t bytes) {
  std::string text = error.what();
  if (!text.empty() && text[0] == '[' && text.find("] ") != std::string::npos) {
    text = text.substr(text.find("] ") + 2);
  }
  std::snprintf(problem, bytes, "%s", text.c_str());
}

template <class Body>
int guarded(char* problem, size_t problem_bytes, Body&& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    put_problem(error, problem, problem_bytes);
    return 1;
  }
}

sf_gloo* open(const sf_gloo_open* arguments, char* problem, size_t problem_bytes) {
  auto self = std::make_unique<sf_gloo>();
  const int failed = guarded(problem, problem_bytes, [&] {
    auto device = gloo::transport::tcp::CreateDevice(gloo::transport::tcp::attr(arguments->host));
    Store store(arguments->store, arguments->prefix);
    self->context = std::make_shared<gloo::rendezvous::Context>(arguments->rank, arguments->size);
    self->context->setTimeout(std::chrono::milliseconds(arguments->limit_ms));
    self->context->connectFullMesh(store, device);
  });
  return failed != 0 ? nullptr : self.release();
}

void close(sf_gloo* self) { delete self; }

int all_gather(sf_gloo* self, void* whole, const void* part, size_t part_bytes, char* problem, size_t problem_bytes) {
  return guarded(problem, problem_bytes, [&] {
    auto* out = static_cast<char*>(whole);
    auto* in = static_cast<char*>(const_cast<void*>(part));  // gloo's interface knows no const
    gloo::AllgatherOptions options(self->context);
    if (in != out + static_cast<size_t>(self->context->rank) * part_bytes) {  // without an input gloo works in place
      options.setInput(in, part_bytes);
    }
    options.setOutput(out, part_bytes * static_cast<size_t>(self->context->size));
    gloo::allgather(options);
  });
}

int all_to_all(sf_gloo* self, void* out, const void* in, size_t bytes, char* problem, size_t problem_bytes) {
  return guarded(problem, problem_bytes, [&] {
    const size_t total = bytes * static_cast<size_t>(self->context->size);
    gloo::AlltoallOptions options(self->context);
    options.setInput(static_cast<char*>(const_cast<void*>(in)), total);
    options.setOutput(static_cast<char*>(out), total);
    gloo::alltoall(options);
  });
}

int broadcast(sf_gloo* self, void* data, size_t bytes, int root, char* problem, size_t problem_bytes) {
  return guarded(problem, problem_bytes, [&] {
    gloo::BroadcastOptions options(self->context);
    options.setOutput(static_cast<char*>(data), bytes);
    options.setRoot(root);
    gloo::broadcast(options);
  });
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const sf_gloo_api* sf_comm_gloo_v1(void) {
  static const sf_gloo_api api = {sizeof(sf_gloo_api), open, close, all_gather, all_to_all, broadcast};
  return &api;
}
