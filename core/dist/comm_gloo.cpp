// Collectives on the CPU: gloo moves bytes, sums are ours. Everything is done when a call returns.
#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <thread>

#include "core/base/error.hpp"
#include "core/dist/comm_base.hpp"
#include "core/dist/gloo_library.h"

#include <csignal>

#include <dlfcn.h>
#include <unistd.h>

namespace sf {
namespace {

// The watchdog speaks first; gloo's own limit is the last resort.
constexpr int64_t kLimitFactor = 2;
// A small tensor is gathered whole: one exchange instead of two.
constexpr int64_t kSmallBytes = 64 << 10;

class Done final : public CommWork {
 public:
  void wait() override {}
};

// The run's store as gloo's three functions.
struct StoreView {
  RankGroup& group;

  static int set(void* self, const char* key, const void* value, size_t bytes) {
    return guarded([&] { view(self).group.store().set(key, std::string(static_cast<const char*>(value), bytes)); });
  }
  static int get(void* self, const char* key, void* into, size_t capacity, size_t* bytes) {
    return guarded([&] {
      const std::string value = view(self).await(key);
      SF_CHECK(value.size() <= capacity, "{} bytes for key {}", value.size(), key);
      std::memcpy(into, value.data(), value.size());
      *bytes = value.size();
    });
  }
  static int wait(void* self, const char* key) {
    return guarded([&] { (void)view(self).await(key); });
  }

 private:
  static StoreView& view(void* self) { return *static_cast<StoreView*>(self); }
  template <class Body>
  static int guarded(Body&& body) {
    try {
      body();
      return 0;
    } catch (const std::exception&) {
      return 1;
    }
  }
  std::string await(const char* key) {
    const auto end = std::chrono::steady_clock::now() + group.limit();
    for (;;) {
      if (auto value = group.store().find(key)) {
        return *value;
      }
      if (group.watchdog().failure() || std::chrono::steady_clock::now() > end) {
        throw Error(ExitCode::kCommunication, std::string(key) + " is not there");
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }
};

const sf_gloo_api& open_library(const std::filesystem::path& path) {
#ifdef __SANITIZE_ADDRESS__  // its runtime refuses RTLD_DEEPBIND; tools/check puts libgloo before LibTorch instead
  constexpr int kOwnSymbols = 0;
#else
  constexpr int kOwnSymbols = RTLD_DEEPBIND;
#endif
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | kOwnSymbols);  // never closed
  void* symbol = library == nullptr ? nullptr : dlsym(library, "sf_comm_gloo_v1");
  if (symbol == nullptr) {
    throw Error(ExitCode::kCommunication, "a CPU run of several ranks needs libsf_comm_gloo.so, and it can't be opened: " + std::string(dlerror()),
                "install the gloo library (on Debian 12: apt-get install libgloo0); one rank, or ranks on GPUs, need none");
  }
  return *reinterpret_cast<const sf_gloo_api* (*)()>(symbol)();
}

// As other ranks see this machine.
std::string own_host(const World& world) {
  if (world.local_size == world.size) {
    return "127.0.0.1";
  }
  std::array<char, 256> name{};
  gethostname(name.data(), name.size() - 1);
  return name.data();
}

at::ScalarType sum_type(at::ScalarType type) {
  return type == at::kDouble || type == at::kLong ? type : at::kFloat;
}

class GlooComm final : public RankComm {
 public:
  GlooComm(RankGroup& ranks, const std::filesystem::path& path) : RankComm(ranks), api_(open_library(path)), main_(connect("gloo/main/")) {}
  ~GlooComm() override {
    for (sf_gloo* channel : {reduction_, main_}) {
      if (channel != nullptr) {
        api_.close(channel);
      }
    }
  }

  std::string library() const override { return "gloo"; }

  std::unique_ptr<CommWork> all_gather(const at::Tensor& whole, const at::Tensor& part, std::string_view label, Channel channel) override {
    const std::string name = count("all_gather", label);
    check_parts(whole, part, size(), name);
    run(name, [&](char* problem, size_t bytes) {
      return api_.all_gather(of(channel), whole.data_ptr(), part.const_data_ptr(), part.nbytes(), problem, bytes);
    }, part.nbytes());
    return std::make_unique<Done>();
  }

  std::unique_ptr<CommWork> reduce_scatter(const at::Tensor& part, const at::Tensor& whole, std::string_view label, Channel channel) override {
    const std::string name = count("reduce_scatter", label);
    check_parts(whole, part, size(), name, /*may_be_wide=*/true);
    const at::Tensor pieces_wn = staging(exchanged_, whole.numel(), whole.scalar_type()).view({size(), part.numel()});
    exchange(name, pieces_wn, whole, channel);
    at::NoGradGuard no_grad;
    part.view({-1}).copy_(sum_of(pieces_wn));
    return std::make_unique<Done>();
  }

  std::unique_ptr<CommWork> all_gather_to(const std::vector<PartRun>& runs, const at::Tensor& staging, const at::Tensor& part, std::string_view label,
                                          Channel channel) override {
    check_runs(runs, staging.numel(), part.numel(), -1, part.scalar_type(), std::string(label));
    auto work = all_gather(staging, part, label, channel);
    copy_to_runs(runs, staging);
    return work;
  }

  std::unique_ptr<CommWork> reduce_scatter_from(const std::vector<PartRun>& own, const at::Tensor& part, const at::Tensor& whole, std::string_view label,
                                                Channel channel) override {
    check_runs(own, whole.numel(), part.numel(), rank(), at::kFloat, std::string(label));
    copy_from_runs(whole, own);
    return reduce_scatter(part, whole, label, channel);
  }

  std::unique_ptr<CommWork> all_reduce(const at::Tensor& tensor, Reduction reduction, std::string_view label, Channel channel) override {
    const std::string name = count("all_reduce", label);
    SF_CHECK(tensor.is_contiguous(), "{}: tensors of a collective are contiguous", name);
    at::NoGradGuard no_grad;
    const at::Tensor flat = tensor.view({-1});
    if (reduction == Reduction::max || static_cast<int64_t>(tensor.nbytes()) * size() <= kSmallBytes) {
      const at::Tensor all_wn = staging(exchanged_, flat.numel() * size(), flat.scalar_type()).view({size(), flat.numel()});
      gather(name, all_wn, flat, channel);
      flat.copy_(reduction == Reduction::max ? std::get<0>(all_wn.max(0)) : sum_of(all_wn));
      return std::make_unique<Done>();
    }
    const int64_t part = (flat.numel() + size() - 1) / size();
    const at::Tensor padded = staging(padded_, part * size(), flat.scalar_type());
    padded.slice(0, 0, flat.numel()).copy_(flat);
    padded.slice(0, flat.numel()).zero_();
    const at::Tensor pieces_wn = staging(exchanged_, part * size(), flat.scalar_type()).view({size(), part});
    exchange(name, pieces_wn, padded, channel);
    const at::Tensor own = padded.slice(0, rank() * part, (rank() + 1) * part);
    own.copy_(sum_of(pieces_wn));
    gather(name, padded, own, channel);
    flat.copy_(padded.slice(0, 0, flat.numel()));
    return std::make_unique<Done>();
  }

  std::unique_ptr<CommWork> broadcast(const at::Tensor& tensor, int64_t root, std::string_view label, Channel channel) override {
    const std::string name = count("broadcast", label);
    SF_CHECK(tensor.is_contiguous(), "{}: tensors of a collective are contiguous", name);
    run(name, [&](char* problem, size_t bytes) {
      return api_.broadcast(of(channel), tensor.data_ptr(), tensor.nbytes(), static_cast<int>(root), problem, bytes);
    }, tensor.nbytes());
    return std::make_unique<Done>();
  }

  void open_reduction_channel() override {
    if (reduction_ == nullptr) {
      reduction_ = connect("gloo/reduction/");
    }
  }
  void register_buffer(const at::Tensor&) override {}
  bool gathers_straight() const override { return false; }

 private:
  sf_gloo* connect(const char* prefix) {
    StoreView view{group()};
    const World& world = group().world();
    const std::string host = own_host(world);
    const sf_gloo_open arguments = {.rank = static_cast<int>(world.rank),
                                    .size = static_cast<int>(world.size),
                                    .host = host.c_str(),
                                    .prefix = prefix,
                                    .limit_ms = kLimitFactor * group().limit().count(),
                                    .store = {.self = &view, .set = StoreView::set, .get = StoreView::get, .wait = StoreView::wait}};
    std::array<char, 512> problem{};
    sf_gloo* opened = api_.open(&arguments, problem.data(), problem.size());
    if (opened == nullptr) {
      group().explain(prefix, 0, std::string("ranks do not reach each other: ") + problem.data());
    }
    return opened;
  }

  sf_gloo* of(Channel channel) const { return channel == Channel::reduction && reduction_ != nullptr ? reduction_ : main_; }

  // Runs one exchange under the watchdog; nothing to move is nothing to do, on every rank alike.
  template <class Body>
  void run(const std::string& name, Body&& body, size_t bytes) {
    const int64_t number = group().progress().issue(name);
    std::array<char, 512> problem{};
    const bool failed = bytes > 0 && body(problem.data(), problem.size()) != 0;
    if (failed) {
      group().explain(name, number, problem.data());
    }
    group().progress().finish(number);
  }
  void exchange(const std::string& name, const at::Tensor& pieces_wn, const at::Tensor& whole, Channel channel) {
    const size_t bytes_each = whole.nbytes() / static_cast<size_t>(size());
    run(name, [&](char* problem, size_t bytes) {
      return api_.all_to_all(of(channel), pieces_wn.data_ptr(), whole.const_data_ptr(), bytes_each, problem, bytes);
    }, bytes_each);
  }
  void gather(const std::string& name, const at::Tensor& whole, const at::Tensor& part, Channel channel) {
    run(name, [&](char* problem, size_t bytes) {
      return api_.all_gather(of(channel), whole.data_ptr(), part.const_data_ptr(), part.nbytes(), problem, bytes);
    }, part.nbytes());
  }

  // Row 0, plus row 1, plus row 2 ...: in rank order, whatever the number of threads.
  static at::Tensor sum_of(const at::Tensor& pieces_wn) {
    at::Tensor sum = pieces_wn[0].to(sum_type(pieces_wn.scalar_type()), /*non_blocking=*/false, /*copy=*/true);
    for (int64_t r = 1; r < pieces_wn.size(0); ++r) {
      sum.add_(pieces_wn[r]);
    }
    return sum;
  }

  // A piece of a buffer that grows to the largest use and stays.
  static at::Tensor staging(at::Tensor& buffer, int64_t elements, at::ScalarType type) {
    const int64_t bytes = elements * static_cast<int64_t>(c10::elementSize(type));
    if (!buffer.defined() || buffer.numel() < bytes) {
      buffer = at::empty({std::max<int64_t>(bytes, 64)}, at::TensorOptions().dtype(at::kByte));
    }
    return buffer.slice(0, 0, bytes).view(type);
  }

  const sf_gloo_api& api_;
  sf_gloo* main_ = nullptr;
  sf_gloo* reduction_ = nullptr;
  at::Tensor exchanged_, padded_;
};

// gloo writes to sockets without MSG_NOSIGNAL: a write to a rank that is gone would end this process without a word, where the error that it returns names the rank. Who has
// decided what the signal does keeps that.
void take_broken_pipes_as_errors() {
  struct sigaction action {};
  sigaction(SIGPIPE, nullptr, &action);
  if ((action.sa_flags & SA_SIGINFO) == 0 && action.sa_handler == SIG_DFL) {
    action.sa_handler = SIG_IGN;
    sigaction(SIGPIPE, &action, nullptr);
  }
}

}  // namespace

std::unique_ptr<RankComm> open_gloo(RankGroup& group, const std::filesystem::path& library) {
  take_broken_pipes_as_errors();
  return std::make_unique<GlooComm>(group, library);
}

}  // namespace sf
