// Collectives on GPUs: tensors and streams of LibTorch over NCCL in libsf_engine_cuda.so. No CUDA header is needed here.
#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>
#include <string>

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

std::string to_hex(const std::array<unsigned char, SF_NCCL_ID_BYTES>& bytes) {
  std::string text;
  for (const unsigned char byte : bytes) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

std::array<unsigned char, SF_NCCL_ID_BYTES> from_hex(const std::string& text) {
  std::array<unsigned char, SF_NCCL_ID_BYTES> bytes{};
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
  Work(std::shared_ptr<Issued> issued, std::vector<at::Tensor> tensors, at::Device device)
      : issued_(std::move(issued)), tensors_(std::move(tensors)), device_(device) {}
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
    tensors_.clear();
    if (failed != 0) {
      throw Error(ExitCode::kDevice, problem.data());
    }
  }

 private:
  std::shared_ptr<Issued> issued_;
  std::vector<at::Tensor> tensors_;
  at::Device device_;
};

class NcclComm final : public RankComm {
 public:
  NcclComm(RankGroup& ranks, at::Device device, const sf_nccl_api& api) : RankComm(ranks), api_(api), device_(device), main_(connect("main")) {
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

  std::string library() const override { return "NCCL " + version_text(api_.version); }

  std::unique_ptr<CommWork> all_gather(const at::Tensor& whole, const at::Tensor& part, std::string_view label, Channel channel) override {
    const std::string name = count("all_gather", label);
    check_parts(whole, part, size(), name);
    return issue(name, api_.all_gather, channel, {.out = whole.data_ptr(), .in = part.const_data_ptr(), .count = part.nbytes(), .type = SF_NCCL_BYTES}, {whole, part});
  }
  std::unique_ptr<CommWork> reduce_scatter(const at::Tensor& part, const at::Tensor& whole, std::string_view label, Channel channel) override {
    const std::string name = count("reduce_scatter", label);
    check_parts(whole, part, size(), name);
    return issue(name, api_.reduce_scatter, channel,
                 {.out = part.data_ptr(), .in = whole.const_data_ptr(), .count = static_cast<uint64_t>(part.numel()), .type = type_code(part, name)}, {part, whole});
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

  void open_reduction_channel() override {
    if (reduction_ == nullptr) {
      reduction_ = connect("reduction");
    }
  }
  void register_buffer(const at::Tensor& buffer) override {
    for (sf_nccl* channel : {main_, reduction_}) {
      Problem problem{};
      if (channel != nullptr && api_.register_buffer(channel, buffer.data_ptr(), buffer.nbytes(), problem.data(), problem.size()) != 0) {
        log_info("NCCL copies through buffers of its own, as it can't register ours: {}", problem.data());
      }
    }
  }

 private:
  using Function = sf_nccl_work* (*)(sf_nccl*, const sf_nccl_call*, char*, size_t);

  sf_nccl* connect(const std::string& channel) {
    Problem problem{};
    std::array<unsigned char, SF_NCCL_ID_BYTES> id{};
    if (rank() == 0 && api_.make_id(id.data(), problem.data(), problem.size()) != 0) {
      throw Error(ExitCode::kCommunication, format("NCCL can't make an id: {}", problem.data()), "NCCL_DEBUG=INFO says more");
    }
    id = from_hex(gather_texts(to_hex(id), "the meeting of NCCL's " + channel + " communicator").front());
    sf_nccl* opened = api_.open(id.data(), static_cast<int>(rank()), static_cast<int>(size()), device_.index(), group().limit().count(), problem.data(), problem.size());
    if (opened == nullptr) {
      group().explain("NCCL's " + channel + " communicator", 0, problem.data());
    }
    return opened;
  }

  std::unique_ptr<CommWork> issue(const std::string& name, Function function, Channel channel, sf_nccl_call call, std::vector<at::Tensor> tensors) {
    for (const at::Tensor& tensor : tensors) {
      SF_CHECK(tensor.device() == device_, "{}: a tensor on {}, the collectives are on {}", name, tensor.device().str(), device_.str());
    }
    call.stream = current_stream(device_);
    sf_nccl* self = channel == Channel::reduction && reduction_ != nullptr ? reduction_ : main_;
    Problem problem{};
    sf_nccl_work* work = function(self, &call, problem.data(), problem.size());
    if (work == nullptr) {
      group().explain(name, group().progress().issue(name), problem.data());
    }
    auto issued = std::make_shared<Issued>(api_, work);
    (void)group().progress().issue(name, [issued] { return issued->api.is_done(issued->work) != 0; });
    return std::make_unique<Work>(std::move(issued), std::move(tensors), device_);
  }

  const sf_nccl_api& api_;
  at::Device device_;
  sf_nccl* main_ = nullptr;
  sf_nccl* reduction_ = nullptr;
};

}  // namespace

std::unique_ptr<RankComm> open_nccl(RankGroup& group, at::Device device, void* engine_cuda) {
  void* symbol = engine_cuda == nullptr ? nullptr : dlsym(engine_cuda, "sf_nccl_v1");
  if (symbol == nullptr) {
    throw Error(ExitCode::kCommunication, "several ranks on GPUs need NCCL, and libsf_engine_cuda.so has none", "build it again, with tools/setup's NCCL");
  }
  return std::make_unique<NcclComm>(group, device, *reinterpret_cast<const sf_nccl_api* (*)()>(symbol)());
}

}  // namespace sf
