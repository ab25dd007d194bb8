// Collectives on GPUs: tensors and streams of LibTorch over NCCL in libsf_engine_cuda.so. No CUDA header is needed here.
#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <functional>
#include <string>
#include <vector>

#include "core/base/error.hpp"
#include "core/base/log.hpp"
#include "core/dist/comm_base.hpp"
#include "core/dist/nccl_library.h"

#include <dlfcn.h>

namespace sf {
namespace {

using Problem = std::array<char, 512>;

std::string version_text(int number) { return format("{}.{}.{}", number / 10000, number / 100 % 100, number % 100); }

int type_code(const at::Tensor& tensor, const std::string& name) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return SF_NCCL_FLOAT32;
    case at::kBFloat16: return SF_NCCL_BFLOAT16;
    case at::kDouble: return SF_NCCL_FLOAT64;
    case at::kLong: return SF_NCCL_INT64;
    default: SF_CHECK(false, "{}: no reduction of {}", name, c10::toString(tensor.scalar_type()));
  }
}

template <size_t N>
std::string to_hex(const std::array<unsigned char, N>& bytes) {
  std::string text;
  for (const unsigned char byte : bytes) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

template <size_t N>
std::array<unsigned char, N> from_hex(const std::string& text) {
  std::array<unsigned char, N> bytes{};
  SF_CHECK(text.size() == 2 * bytes.size(), "an id of {} digits", text.size());
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<unsigned char>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
  }
  return bytes;
}

// Shared by the caller, who waits for it, and the watchdog, who asks whether it is done.
struct Issued {
  const sf_nccl_api& api;
  sf_nccl_work* work;
  Issued(const sf_nccl_api& functions, sf_nccl_work* issued) : api(functions), work(issued) {}
  ~Issued() { api.release(work); }
  Issued(const Issued&) = delete;
  Issued& operator=(const Issued&) = delete;
};

void* current_stream(at::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle(); }

// Its tensors live until the current stream is behind the collective: then the allocator, which knows that stream alone, may use their memory again.
class Work final : public CommWork {
 public:
  /// `after` is done on the current stream behind the collective; may be empty.
  Work(std::shared_ptr<Issued> issued, std::vector<at::Tensor> tensors, at::Device device, std::function<void()> after)
      : issued_(std::move(issued)), tensors_(std::move(tensors)), device_(device), after_(std::move(after)) {}
  ~Work() override {
    if (!tensors_.empty()) {
      try {
        wait();
      } catch (const Error&) {  // the device has failed; whoever uses it next says so
      }
    }
  }
  void wait() override {
    Problem problem{};
    const int failed = issued_->api.wait(issued_->work, current_stream(device_), problem.data(), problem.size());
    if (failed == 0 && after_) {
      after_();
    }
    after_ = nullptr;
    tensors_.clear();
    if (failed != 0) {
      throw Error(ExitCode::kDevice, problem.data());
    }
  }

 private:
  std::shared_ptr<Issued> issued_;
  std::vector<at::Tensor> tensors_;
  at::Device device_;
  std::function<void()> after_;
};

using PeerHandle = std::array<unsigned char, SF_PEER_HANDLE_BYTES>;
constexpr int64_t kPeersMost = SF_PEERS_MOST;
constexpr int64_t kPeerAlignment = 16;  // bytes, of a part in the sum's kernel

class NcclComm final : public RankComm {
 public:
  NcclComm(RankGroup& ranks, at::Device device, const sf_nccl_api& api, PeerCopying peers)
      : RankComm(ranks), api_(api), device_(device), peers_(peers), main_(connect("main")) {
    if (uses_peers()) {
      meet_peers(main_);
    }
    group().watchdog().set_abort([this] {
      for (sf_nccl* channel : {reduction_, main_}) {
        if (channel != nullptr) {
          api_.abort(channel);
        }
      }
    });
    group().watchdog().set_problem([this]() -> std::string {
      Problem problem{};
      return api_.problem_of(main_, problem.data(), problem.size()) != 0 ? problem.data() : "";
    });
  }

  std::string library() const override {
    return "NCCL " + version_text(api_.version) + (uses_peers() ? ", gathers and reductions by the GPUs' copy engines" : "");
  }

  std::unique_ptr<CommWork> all_gather(const at::Tensor& whole, const at::Tensor& part, std::string_view label, Channel channel) override {
    const std::string name = count("all_gather", label);
    check_parts(whole, part, size(), name);
    if (const Shared* shared = shared_memory_of(part)) {
      std::vector<PartRun> runs;
      for (int64_t peer = 0; peer < size(); ++peer) {
        runs.push_back({.memory = whole.view({-1}).narrow(0, peer * part.numel(), part.numel()), .place = peer * part.numel()});
      }
      return gather_from_peers(name, runs, part, *shared, channel);
    }
    return issue(name, api_.all_gather, channel, {.out = whole.data_ptr(), .in = part.const_data_ptr(), .count = part.nbytes(), .type = SF_NCCL_BYTES}, {whole, part});
  }
  std::unique_ptr<CommWork> all_gather_to(const std::vector<PartRun>& runs, const at::Tensor& staging, const at::Tensor& part, std::string_view label,
                                          Channel channel) override {
    const std::string name = count("all_gather", label);
    check_runs(runs, size() * part.numel(), part.numel(), -1, part.scalar_type(), name);
    if (const Shared* shared = shared_memory_of(part)) {
      return gather_from_peers(name, runs, part, *shared, channel);
    }
    SF_CHECK(staging.defined(), "{}: what other ranks have no access to comes through a buffer, and none is given", name);
    check_parts(staging, part, size(), name);
    return issue(name, api_.all_gather, channel, {.out = staging.data_ptr(), .in = part.const_data_ptr(), .count = part.nbytes(), .type = SF_NCCL_BYTES}, {staging, part},
                 [runs, staging] {
                   at::NoGradGuard no_grad;
                   copy_to_runs(runs, staging);
                 });
  }
  std::unique_ptr<CommWork> reduce_scatter(const at::Tensor& part, const at::Tensor& whole, std::string_view label, Channel channel) override {
    return reduce_scatter_from({}, part, whole, label, channel);
  }
  std::unique_ptr<CommWork> reduce_scatter_from(const std::vector<PartRun>& own, const at::Tensor& part, const at::Tensor& whole, std::string_view label,
                                                Channel channel) override {
    const std::string name = count("reduce_scatter", label);
    check_parts(whole, part, size(), name, /*may_be_wide=*/true);
    check_runs(own, whole.numel(), part.numel(), rank(), at::kFloat, name);
    const bool can_be_summed = part.scalar_type() == at::kFloat && static_cast<int64_t>(whole.nbytes()) / size() % kPeerAlignment == 0;
    const Shared* shared = can_be_summed ? shared_memory_of(whole) : nullptr;
    const bool are_aligned = std::all_of(own.begin(), own.end(), [&](const PartRun& run) {
      return reinterpret_cast<uintptr_t>(run.memory.const_data_ptr()) % kPeerAlignment == 0 && run.place * static_cast<int64_t>(whole.element_size()) % kPeerAlignment == 0;
    });
    const bool is_added_as_it_is = shared != nullptr && are_aligned;
    if (!is_added_as_it_is) {
      at::NoGradGuard no_grad;
      copy_from_runs(whole, own);
    }
    if (shared != nullptr) {
      return sum_from_peers(name, is_added_as_it_is ? own : std::vector<PartRun>(), part, whole, *shared, channel);
    }
    const at::Tensor narrow = part.scalar_type() == whole.scalar_type() ? part : at::empty(part.sizes(), whole.options());
    return issue(name, api_.reduce_scatter, channel,
                 {.out = narrow.data_ptr(), .in = whole.const_data_ptr(), .count = static_cast<uint64_t>(part.numel()), .type = type_code(narrow, name)},
                 {part, whole, narrow}, narrow.is_same(part) ? std::function<void()>() : [part, narrow] {
                   at::NoGradGuard no_grad;
                   part.copy_(narrow);
                 });
  }
  std::unique_ptr<CommWork> all_reduce(const at::Tensor& tensor, Reduction reduction, std::string_view label, Channel channel) override {
    const std::string name = count("all_reduce", label);
    SF_CHECK(tensor.is_contiguous(), "{}: tensors of a collective are contiguous", name);
    return issue(name, api_.all_reduce, channel,
                 {.out = tensor.data_ptr(), .in = tensor.const_data_ptr(), .count = static_cast<uint64_t>(tensor.numel()), .type = type_code(tensor, name),
                  .reduction = reduction == Reduction::max ? SF_NCCL_MAX : SF_NCCL_SUM}, {tensor});
  }
  std::unique_ptr<CommWork> broadcast(const at::Tensor& tensor, int64_t root, std::string_view label, Channel channel) override {
    const std::string name = count("broadcast", label);
    SF_CHECK(tensor.is_contiguous(), "{}: tensors of a collective are contiguous", name);
    return issue(name, api_.broadcast, channel,
                 {.out = tensor.data_ptr(), .in = tensor.const_data_ptr(), .count = tensor.nbytes(), .type = SF_NCCL_BYTES, .root = static_cast<int>(root)}, {tensor});
  }

  bool gathers_straight() const override { return uses_peers(); }

  void open_reduction_channel() override {
    if (reduction_ == nullptr) {
      reduction_ = connect("reduction");
      if (uses_peers()) {
        meet_peers(reduction_);
      }
    }
  }
  void register_buffer(const at::Tensor& buffer) override {
    for (sf_nccl* channel : {main_, reduction_}) {
      Problem problem{};
      if (channel != nullptr && api_.register_buffer(channel, buffer.data_ptr(), buffer.nbytes(), problem.data(), problem.size()) != 0) {
        log_info("NCCL copies through buffers of its own, as it can't register ours: {}", problem.data());
      }
    }
    if (uses_peers()) {
      share(buffer);
    }
  }

 private:
  using Function = sf_nccl_work* (*)(sf_nccl*, const sf_nccl_call*, char*, size_t);

  // A registered buffer, and where those of the other ranks lie in this process.
  struct Shared {
    const char* begin = nullptr;
    size_t bytes = 0;
    std::vector<const char*> of_rank;
  };

  sf_nccl* connect(const std::string& channel) {
    Problem problem{};
    std::array<unsigned char, SF_NCCL_ID_BYTES> id{};
    if (rank() == 0 && api_.make_id(id.data(), problem.data(), problem.size()) != 0) {
      throw Error(ExitCode::kCommunication, format("NCCL can't make an id: {}", problem.data()), "NCCL_DEBUG=INFO says more");
    }
    id = from_hex<SF_NCCL_ID_BYTES>(gather_texts(to_hex(id), "the meeting of NCCL's " + channel + " communicator").front());
    sf_nccl* opened = api_.open(id.data(), static_cast<int>(rank()), static_cast<int>(size()), device_.index(), group().limit().count(), problem.data(), problem.size());
    if (opened == nullptr) {
      group().explain("NCCL's " + channel + " communicator", 0, problem.data());
    }
    return opened;
  }

  [[nodiscard]] bool uses_peers() const { return peers_ != PeerCopying::off; }

  // The same on all ranks: what was asked for can't be had, or NCCL does all of it from here on. Before any window.
  void do_without_peers(const std::string& why) {
    if (peers_ == PeerCopying::required) {
      throw Error(ExitCode::kCommunication, "training.peer_copies = \"on\", and " + why, "training.peer_copies = \"off\" leaves gathers and reductions to NCCL");
    }
    if (rank() == 0) {
      log_info("gathers and reductions go by NCCL and not by the GPUs' copy engines, as {}", why);
    }
    peers_ = PeerCopying::off;
    shared_.clear();
  }

  // One text of each rank that holds a handle, or why there is none: then the result is empty on all ranks.
  std::vector<PeerHandle> exchange_handles(const PeerHandle& own, int failed, const Problem& problem, std::string_view what) {
    std::vector<PeerHandle> handles;
    for (const std::string& text : gather_texts(failed != 0 ? format("-{}", problem.data()) : to_hex(own), what)) {
      if (text.starts_with("-")) {
        do_without_peers(format("{} failed on rank {}: {}", what, handles.size(), text.substr(1)));
        return {};
      }
      handles.push_back(from_hex<SF_PEER_HANDLE_BYTES>(text));
    }
    return handles;
  }
  void all_could(int failed, const Problem& problem, std::string_view what) { (void)exchange_handles(PeerHandle{}, failed, problem, what); }

  void meet_peers(sf_nccl* channel) {
    if (group().world().local_size != size() || size() > kPeersMost) {
      do_without_peers(format("of {} ranks {} are on this machine; they take all of them, and at most {}", size(), group().world().local_size, kPeersMost));
      return;
    }
    Problem problem{};
    PeerHandle own{};
    int failed = api_.make_peers(channel, own.data(), problem.data(), problem.size());
    const std::vector<PeerHandle> handles = exchange_handles(own, failed, problem, "sharing memory with the other ranks");
    if (handles.empty()) {
      return;
    }
    failed = api_.meet_peers(channel, handles.data(), problem.data(), problem.size());
    all_could(failed, problem, "opening the other ranks' memory");
  }

  void share(const at::Tensor& buffer) {
    Problem problem{};
    PeerHandle own{};
    int failed = api_.share_memory(main_, buffer.const_data_ptr(), own.data(), problem.data(), problem.size());
    const std::vector<PeerHandle> handles = exchange_handles(own, failed, problem, "sharing a buffer with the other ranks");
    if (handles.empty()) {
      return;
    }
    Shared shared{.begin = static_cast<const char*>(buffer.const_data_ptr()), .bytes = buffer.nbytes(), .of_rank = {}};
    for (int64_t rank = 0; rank < size() && failed == 0; ++rank) {
      void* there = buffer.data_ptr();
      if (rank != this->rank()) {
        failed = api_.open_memory(main_, handles[static_cast<size_t>(rank)].data(), &there, problem.data(), problem.size());
      }
      shared.of_rank.push_back(static_cast<const char*>(there));
    }
    all_could(failed, problem, "opening a buffer of the other ranks");
    if (uses_peers()) {
      shared_.push_back(std::move(shared));
    }
  }

  sf_nccl* of(Channel channel) const { return channel == Channel::reduction && reduction_ != nullptr ? reduction_ : main_; }

  // Null: not registered. The same on all ranks, which register the same buffers.
  const Shared* shared_memory_of(const at::Tensor& tensor) const {
    const auto* data = static_cast<const char*>(tensor.const_data_ptr());
    for (const Shared& shared : shared_) {
      if (data >= shared.begin && data + tensor.nbytes() <= shared.begin + shared.bytes) {
        return &shared;
      }
    }
    return nullptr;
  }

  // Straight to where the runs' memory is: nothing comes through a buffer. Each rank begins with the one after it, so that no memory is read by all at once.
  std::unique_ptr<CommWork> gather_from_peers(const std::string& name, const std::vector<PartRun>& runs, const at::Tensor& part, const Shared& shared, Channel channel) {
    const auto* own = static_cast<const char*>(part.const_data_ptr());
    const auto element = static_cast<int64_t>(part.element_size());
    std::vector<sf_peer_copy> copies;
    std::vector<at::Tensor> tensors = {part};
    for (int64_t step = 1; step <= size(); ++step) {
      const int64_t peer = (rank() + step) % size();
      for (const PartRun& run : runs) {
        if (run.memory.numel() == 0 || run.place / part.numel() != peer) {
          continue;
        }
        const char* from = shared.of_rank[static_cast<size_t>(peer)] + (own - shared.begin) + (run.place - peer * part.numel()) * element;
        if (from != run.memory.const_data_ptr()) {  // the own part may lie in its place already
          copies.push_back({.to = run.memory.data_ptr(), .from = from, .bytes = run.memory.nbytes()});
        }
        tensors.push_back(run.memory);
      }
    }
    return exchange(name, channel, {.copies = copies.data(), .copies_count = static_cast<int>(copies.size())}, std::move(tensors));
  }

  // `runs`: of the own share, in float32; none: it is in `whole`.
  std::unique_ptr<CommWork> sum_from_peers(const std::string& name, const std::vector<PartRun>& runs, const at::Tensor& part, const at::Tensor& whole, const Shared& shared,
                                           Channel channel) {
    const auto* own = static_cast<const char*>(whole.const_data_ptr());
    const size_t bytes = whole.nbytes() / static_cast<size_t>(size()), place = static_cast<size_t>(rank()) * bytes;
    at::Tensor& received = of(channel) == main_ ? received_ : received_beside_;
    const int64_t elements = part.numel() * (size() - 1);
    if (!received.defined() || received.numel() < elements || received.scalar_type() != whole.scalar_type()) {
      c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index());  // what is in flight still fills the old one; once for each larger group
      received = at::empty({elements}, whole.options());
    }
    auto* free = static_cast<char*>(received.data_ptr());
    std::vector<sf_peer_copy> copies;
    std::vector<const char*> parts(static_cast<size_t>(size()), own + place);
    for (int64_t step = 1; step < size(); ++step) {
      const auto peer = static_cast<size_t>((rank() + step) % size());
      copies.push_back({.to = free, .from = shared.of_rank[peer] + (own - shared.begin) + place, .bytes = bytes});
      parts[peer] = free;
      free += bytes;
    }
    std::vector<at::Tensor> tensors = {part, whole};
    std::vector<sf_peer_sum> sums;
    if (runs.empty()) {
      sums.push_back({.sum = part.data_ptr<float>(), .parts = {}, .parts_count = static_cast<int>(size()), .float_part = -1, .elements = static_cast<uint64_t>(part.numel())});
      std::copy(parts.begin(), parts.end(), sums.back().parts);
    }
    for (const PartRun& run : runs) {
      const int64_t offset = run.place - rank() * part.numel();
      sums.push_back({.sum = part.data_ptr<float>() + offset, .parts = {}, .parts_count = static_cast<int>(size()), .float_part = static_cast<int>(rank()),
                      .elements = static_cast<uint64_t>(run.memory.numel())});
      for (size_t r = 0; r < parts.size(); ++r) {
        sums.back().parts[r] = static_cast<int64_t>(r) == rank() ? run.memory.const_data_ptr() : parts[r] + offset * static_cast<int64_t>(whole.element_size());
      }
      tensors.push_back(run.memory);
    }
    return exchange(name, channel,
                    {.copies = copies.data(), .copies_count = static_cast<int>(copies.size()), .sums = sums.data(), .sums_count = static_cast<int>(sums.size()),
                     .type = type_code(whole, name)},
                    std::move(tensors));
  }

  std::unique_ptr<CommWork> exchange(const std::string& name, Channel channel, sf_peer_exchange call, std::vector<at::Tensor> tensors) {
    return issue_with(name, std::move(tensors), {}, [&](char* problem, size_t bytes) {
      call.stream = current_stream(device_);
      return api_.exchange(of(channel), &call, problem, bytes);
    });
  }
  std::unique_ptr<CommWork> issue(const std::string& name, Function function, Channel channel, sf_nccl_call call, std::vector<at::Tensor> tensors,
                                  std::function<void()> after = {}) {
    return issue_with(name, std::move(tensors), std::move(after), [&](char* problem, size_t bytes) {
      call.stream = current_stream(device_);
      return function(of(channel), &call, problem, bytes);
    });
  }

  template <class Begin>
  std::unique_ptr<CommWork> issue_with(const std::string& name, std::vector<at::Tensor> tensors, std::function<void()> after, Begin&& begin) {
    for (const at::Tensor& tensor : tensors) {
      SF_CHECK(tensor.device() == device_, "{}: a tensor on {}, the collectives are on {}", name, tensor.device().str(), device_.str());
    }
    Problem problem{};
    sf_nccl_work* work = begin(problem.data(), problem.size());
    if (work == nullptr) {
      group().explain(name, group().progress().issue(name), problem.data());
    }
    auto issued = std::make_shared<Issued>(api_, work);
    (void)group().progress().issue(name, [issued] { return issued->api.is_done(issued->work) != 0; });
    return std::make_unique<Work>(std::move(issued), std::move(tensors), device_, std::move(after));
  }

  const sf_nccl_api& api_;
  at::Device device_;
  PeerCopying peers_;                                   // off as soon as some rank can't
  sf_nccl* main_ = nullptr;
  sf_nccl* reduction_ = nullptr;
  std::vector<Shared> shared_;
  at::Tensor received_, received_beside_;               // of a reduction: parts of the other ranks; by channel
};

}  // namespace

std::unique_ptr<RankComm> open_nccl(RankGroup& group, at::Device device, void* engine_cuda, PeerCopying peers) {
  void* symbol = engine_cuda == nullptr ? nullptr : dlsym(engine_cuda, "sf_nccl_v1");
  if (symbol == nullptr) {
    throw Error(ExitCode::kCommunication, "several ranks on GPUs need NCCL, and libsf_engine_cuda.so has none", "build it again, with tools/setup's NCCL");
  }
  return std::make_unique<NcclComm>(group, device, *reinterpret_cast<const sf_nccl_api* (*)()>(symbol)(), peers);
}

}  // namespace sf
