#include "sdk/testing/fake_comm.hpp"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <stdexcept>
#include <thread>

namespace sf::testing {

namespace {

// `whole` with what the runs hold in their places.
at::Tensor with_runs(const at::Tensor& whole, const std::vector<PartRun>& runs) {
  const at::Tensor filled = whole.clone();
  for (const PartRun& run : runs) {
    filled.narrow(0, run.place, run.memory.numel()).copy_(run.memory.view({-1}));
  }
  return filled;
}

void check_reduction(const at::Tensor& part, const at::Tensor& whole, int64_t ranks, std::string_view label) {
  if (whole.numel() != ranks * part.numel() || !whole.is_contiguous() || !part.is_contiguous() ||
      (whole.scalar_type() != part.scalar_type() && !(whole.scalar_type() == at::kBFloat16 && part.scalar_type() == at::kFloat))) {
    throw std::logic_error("reduce_scatter " + std::string(label) + ": sizes or types do not fit");
  }
}

// Each contiguous, of the type, inside one rank's part; none over another.
void check_runs(const std::vector<PartRun>& runs, int64_t part, int64_t ranks, at::ScalarType type, const std::string& name) {
  std::vector<std::pair<int64_t, int64_t>> places;
  for (const PartRun& run : runs) {
    const int64_t end = run.place + run.memory.numel();
    if (!run.memory.is_contiguous() || run.memory.scalar_type() != type || run.place < 0 || end > ranks * part || (end > run.place && run.place / part != (end - 1) / part)) {
      throw std::logic_error(name + ": a run does not fit");
    }
    places.emplace_back(run.place, end);
  }
  std::sort(places.begin(), places.end());
  for (size_t i = 1; i < places.size(); ++i) {
    if (places[i].first < places[i - 1].second) {
      throw std::logic_error(name + ": runs overlap");
    }
  }
}

bool is_same(const at::Tensor& a, const at::Tensor& b) {  // NaN where NaN is, too
  return at::equal(a, b) || (a.is_floating_point() && at::equal(at::nan_to_num(a), at::nan_to_num(b)) && at::equal(at::isnan(a), at::isnan(b)));
}

}  // namespace

class FakeWork final : public CommWork {
 public:
  FakeWork(FakeComm& comm, std::shared_ptr<FakeHub::Operation> operation, std::string kind, std::string label, at::Tensor input,
           at::Tensor output, int64_t root, bool is_max, std::vector<PartRun> runs)
      : comm_(comm), operation_(std::move(operation)), kind_(std::move(kind)), label_(std::move(label)), input_(std::move(input)),
        output_(std::move(output)), root_(root), is_max_(is_max), runs_(std::move(runs)) {}

  void wait() override {
    at::NoGradGuard no_grad;
    comm_.hub_.wait(*operation_);
    comm_.events.push_back("wait " + kind_ + " " + label_);
    comm_.reductions_in_flight -= kind_ == "reduce_scatter" ? 1 : 0;
    const auto& inputs = operation_->inputs;
    if (!is_same(kind_ == "reduce_scatter" ? with_runs(input_, runs_) : input_, inputs[static_cast<size_t>(comm_.rank_)])) {
      throw std::logic_error("the input of " + kind_ + " " + label_ + " changed while it was in flight");
    }
    if (kind_ == "all_gather") {
      for (const PartRun& run : runs_) {
        if (run.memory.is_floating_point() && !at::isnan(run.memory).all().item<bool>()) {
          throw std::logic_error("memory of all_gather " + label_ + " was written while it was in flight");
        }
      }
      output_.copy_(at::cat(inputs, 0));
      for (const PartRun& run : runs_) {
        run.memory.view({-1}).copy_(output_.narrow(0, run.place, run.memory.numel()));
      }
      if (!runs_.empty()) {
        output_.fill_(NAN);
      }
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
  std::vector<PartRun> runs_;
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
  at::set_num_threads(at::get_num_threads());  // a forked child has no pool yet, and LibTorch's way of making it is not one for two threads at once
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
                                          const at::Tensor& output, int64_t root, bool is_max, const std::vector<PartRun>& runs) {
  at::NoGradGuard no_grad;
  const int number = channel == Channel::reduction && separate ? 1 : 0;
  const std::string what = std::string(kind) + " " + std::string(label);
  ++counted[what];
  events.push_back("issue " + what);
  if (what.starts_with("reduce_scatter")) {
    most_reductions_in_flight = std::max(most_reductions_in_flight, ++reductions_in_flight);
  }
  auto operation = hub_.arrive(rank_, number, next_[number]++, what + " " + std::to_string(input.numel()),
                                kind == std::string_view("reduce_scatter") ? with_runs(input, runs) : input, "");
  if (!output.is_same(input) && output.is_floating_point()) {
    output.fill_(NAN);
  }
  for (const PartRun& run : runs) {
    if (kind == std::string_view("all_gather")) {
      run.memory.fill_(NAN);
    }
  }
  return std::make_unique<FakeWork>(*this, std::move(operation), kind, std::string(label), input, output, root, is_max, runs);
}

std::unique_ptr<CommWork> FakeComm::all_gather(const at::Tensor& whole, const at::Tensor& part, std::string_view label, Channel channel) {
  if (whole.numel() != size() * part.numel() || !whole.is_contiguous() || !part.is_contiguous() || whole.scalar_type() != part.scalar_type()) {
    throw std::logic_error("all_gather " + std::string(label) + ": sizes or types do not fit");
  }
  return issue("all_gather", label, channel, part, whole);
}

std::unique_ptr<CommWork> FakeComm::reduce_scatter(const at::Tensor& part, const at::Tensor& whole, std::string_view label, Channel channel) {
  check_reduction(part, whole, size(), label);
  return issue("reduce_scatter", label, channel, whole, part);
}

std::unique_ptr<CommWork> FakeComm::all_gather_to(const std::vector<PartRun>& runs, const at::Tensor& staging, const at::Tensor& part, std::string_view label, Channel channel) {
  check_runs(runs, part.numel(), size(), part.scalar_type(), "all_gather " + std::string(label));
  const auto* data = static_cast<const char*>(part.const_data_ptr());
  const bool is_registered = std::any_of(registered.begin(), registered.end(), [&](const at::Tensor& buffer) {
    const auto* begin = static_cast<const char*>(buffer.const_data_ptr());
    return data >= begin && data + part.nbytes() <= begin + buffer.nbytes();
  });
  const bool is_straight = hub_.straight_ && is_registered;
  if (!is_straight && (!staging.defined() || staging.numel() != size() * part.numel())) {
    throw std::logic_error("all_gather " + std::string(label) + ": the buffer that it comes through is missing or does not fit");
  }
  return issue("all_gather", label, channel, part, is_straight ? at::empty({size() * part.numel()}, part.options()) : staging, 0, false, runs);
}

std::unique_ptr<CommWork> FakeComm::reduce_scatter_from(const std::vector<PartRun>& own, const at::Tensor& part, const at::Tensor& whole, std::string_view label,
                                                        Channel channel) {
  check_runs(own, part.numel(), size(), at::kFloat, "reduce_scatter " + std::string(label));
  for (const PartRun& run : own) {
    if (run.place / part.numel() != rank_) {
      throw std::logic_error("reduce_scatter " + std::string(label) + ": a run that is not of this rank's part");
    }
  }
  check_reduction(part, whole, size(), label);
  at::NoGradGuard no_grad;
  whole.narrow(0, rank_ * part.numel(), part.numel()).fill_(NAN);  // its own place in `whole` is not read
  return issue("reduce_scatter", label, channel, whole, part, 0, false, own);
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
