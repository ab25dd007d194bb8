#include "sdk/testing/fake_comm.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <stdexcept>
#include <thread>

namespace sf::testing {

class FakeWork final : public CommWork {
 public:
  FakeWork(FakeComm& comm, std::shared_ptr<FakeHub::Operation> operation, std::string kind, std::string label, at::Tensor input,
           at::Tensor output, int64_t root, bool is_max)
      : comm_(comm), operation_(std::move(operation)), kind_(std::move(kind)), label_(std::move(label)), input_(std::move(input)),
        output_(std::move(output)), root_(root), is_max_(is_max) {}

  void wait() override {
    at::NoGradGuard no_grad;
    comm_.hub_.wait(*operation_);
    comm_.events.push_back("wait " + kind_ + " " + label_);
    comm_.reductions_in_flight -= kind_ == "reduce_scatter" ? 1 : 0;
    const auto& inputs = operation_->inputs;
    if (!at::equal(input_, inputs[static_cast<size_t>(comm_.rank_)])) {
      throw std::logic_error("the input of " + kind_ + " " + label_ + " changed while it was in flight");
    }
    if (kind_ == "all_gather") {
      output_.copy_(at::cat(inputs, 0));
    } else if (kind_ == "broadcast") {
      output_.copy_(inputs[static_cast<size_t>(root_)]);
    } else {
      at::Tensor sum = inputs[0].is_floating_point() && inputs[0].scalar_type() != at::kDouble ? inputs[0].to(at::kFloat) : inputs[0].clone();
      for (size_t rank = 1; rank < inputs.size(); ++rank) {
        sum = is_max_ ? at::maximum(sum, inputs[rank]) : sum + inputs[rank];
      }
      output_.copy_(kind_ == "reduce_scatter" ? sum.narrow(0, comm_.rank_ * output_.numel(), output_.numel()) : sum);
    }
  }

 private:
  FakeComm& comm_;
  std::shared_ptr<FakeHub::Operation> operation_;
  std::string kind_, label_;
  at::Tensor input_, output_;
  int64_t root_;
  bool is_max_;
};

std::shared_ptr<FakeHub::Operation> FakeHub::arrive(int64_t rank, int channel, int64_t number, const std::string& what, const at::Tensor& input,
                                                    const std::string& text) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& operation = operations_[{channel, number}];
  if (operation == nullptr) {
    operation = std::make_shared<Operation>();
    operation->what = what;
    operation->inputs.resize(static_cast<size_t>(ranks_));
    operation->texts.resize(static_cast<size_t>(ranks_));
  }
  if (operation->what != what) {
    failed_ = true;
    changed_.notify_all();
    throw std::logic_error("ranks disagree: " + operation->what + " and " + what);
  }
  operation->inputs[static_cast<size_t>(rank)] = input.defined() ? input.clone() : input;
  operation->texts[static_cast<size_t>(rank)] = text;
  ++operation->arrived;
  changed_.notify_all();
  return operation;
}

void FakeHub::wait(const Operation& operation) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return failed_ || operation.arrived == ranks_; });
  if (operation.arrived != ranks_) {
    throw std::runtime_error("another rank failed");
  }
}

void FakeHub::fail() {
  const std::lock_guard<std::mutex> lock(mutex_);
  failed_ = true;
  changed_.notify_all();
}

void FakeHub::run(const std::function<void(FakeComm&)>& body) {
  std::vector<std::exception_ptr> failures(static_cast<size_t>(ranks_));
  std::vector<std::unique_ptr<FakeComm>> comms;
  for (int64_t rank = 0; rank < ranks_; ++rank) {
    comms.push_back(std::make_unique<FakeComm>(*this, rank));
  }
  std::vector<int64_t> order;
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < ranks_; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(*comms[static_cast<size_t>(rank)]);
      } catch (...) {
        failures[static_cast<size_t>(rank)] = std::current_exception();
        {
          const std::lock_guard<std::mutex> lock(mutex_);
          order.push_back(rank);
        }
        fail();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  if (!order.empty()) {
    std::rethrow_exception(failures[static_cast<size_t>(order.front())]);
  }
}

std::unique_ptr<CommWork> FakeComm::issue(const char* kind, std::string_view label, Channel channel, const at::Tensor& input,
                                          const at::Tensor& output, int64_t root, bool is_max) {
  at::NoGradGuard no_grad;
  const int number = channel == Channel::reduction && separate ? 1 : 0;
  const std::string what = std::string(kind) + " " + std::string(label);
  ++counted[what];
  events.push_back("issue " + what);
  if (what.starts_with("reduce_scatter")) {
    most_reductions_in_flight = std::max(most_reductions_in_flight, ++reductions_in_flight);
  }
  auto operation = hub_.arrive(rank_, number, next_[number]++, what + " " + std::to_string(input.numel()), input, "");
  if (!output.is_same(input) && output.is_floating_point()) {
    output.fill_(NAN);
  }
  return std::make_unique<FakeWork>(*this, std::move(operation), kind, std::string(label), input, output, root, is_max);
}

std::unique_ptr<CommWork> FakeComm::all_gather(const at::Tensor& whole, const at::Tensor& part, std::string_view label, Channel channel) {
  if (whole.numel() != size() * part.numel() || !whole.is_contiguous() || !part.is_contiguous() || whole.scalar_type() != part.scalar_type()) {
    throw std::logic_error("all_gather " + std::string(label) + ": sizes or types do not fit");
  }
  return issue("all_gather", label, channel, part, whole);
}

std::unique_ptr<CommWork> FakeComm::reduce_scatter(const at::Tensor& part, const at::Tensor& whole, std::string_view label, Channel channel) {
  if (whole.numel() != size() * part.numel() || !whole.is_contiguous() || !part.is_contiguous() ||
      (whole.scalar_type() != part.scalar_type() && !(whole.scalar_type() == at::kBFloat16 && part.scalar_type() == at::kFloat))) {
    throw std::logic_error("reduce_scatter " + std::string(label) + ": sizes or types do not fit");
  }
  return issue("reduce_scatter", label, channel, whole, part);
}

std::unique_ptr<CommWork> FakeComm::all_reduce(const at::Tensor& tensor, Reduction reduction, std::string_view label, Channel channel) {
  return issue("all_reduce", label, channel, tensor, tensor, 0, reduction == Reduction::max);
}

std::unique_ptr<CommWork> FakeComm::broadcast(const at::Tensor& tensor, int64_t root, std::string_view label, Channel channel) {
  return issue("broadcast", label, channel, tensor, tensor, root);
}

std::vector<std::string> FakeComm::gather_texts(const std::string& text, std::string_view label) {
  const auto operation = hub_.arrive(rank_, 2, next_[2]++, "texts " + std::string(label), at::Tensor(), text);
  hub_.wait(*operation);
  return operation->texts;
}

int64_t FakeComm::count(const std::string& kind) const {
  int64_t sum = 0;
  for (const auto& [name, times] : counted) {
    sum += name.starts_with(kind) ? times : 0;
  }
  return sum;
}

}  // namespace sf::testing
