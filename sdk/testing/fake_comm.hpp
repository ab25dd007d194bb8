// sdk/testing/fake_comm.hpp: ranks as threads of one process. Strict where a real library is forgiving: results appear in wait() and are NaN
// before, an input that changes between issue and wait is an error, and so are ranks that issue different collectives.
#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "sf/comm.hpp"

namespace sf::testing {

class FakeHub {
 public:
  /// `straight`: what Comm::gathers_straight says, as where ranks copy from each other; then a buffer that is given for a gather to come through is not looked at.
  explicit FakeHub(int64_t ranks, bool straight = false) : ranks_(ranks), straight_(straight) {}
  [[nodiscard]] int64_t ranks() const { return ranks_; }

 private:
  friend class FakeComm;
  friend class FakeWork;
  struct Operation {
    std::string what;
    std::vector<at::Tensor> inputs;
    std::vector<std::string> texts;
    int64_t arrived = 0;
  };
  std::shared_ptr<Operation> arrive(int64_t rank, int channel, int64_t number, const std::string& what, const at::Tensor& input,
                                    const std::string& text);
  void wait(const Operation& operation);
  void fail();

  int64_t ranks_;
  bool straight_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::pair<int, int64_t>, std::shared_ptr<Operation>> operations_;
  bool failed_ = false;

 public:
  /// Runs `body` for each rank on a thread of its own; the first exception is thrown here.
  void run(const std::function<void(class FakeComm&)>& body);
};

class FakeComm final : public Comm {
 public:
  FakeComm(FakeHub& hub, int64_t rank) : hub_(hub), rank_(rank) {}

  int64_t rank() const override { return rank_; }
  int64_t size() const override { return hub_.ranks(); }
  int64_t local_rank() const override { return rank_; }
  std::unique_ptr<CommWork> all_gather(const at::Tensor& whole, const at::Tensor& part, std::string_view label, Channel channel) override;
  std::unique_ptr<CommWork> reduce_scatter(const at::Tensor& part, const at::Tensor& whole, std::string_view label, Channel channel) override;
  std::unique_ptr<CommWork> all_gather_to(const std::vector<PartRun>& runs, const at::Tensor& staging, const at::Tensor& part, std::string_view label, Channel channel) override;
  std::unique_ptr<CommWork> reduce_scatter_from(const std::vector<PartRun>& own, const at::Tensor& part, const at::Tensor& whole, std::string_view label,
                                                Channel channel) override;
  std::unique_ptr<CommWork> all_reduce(const at::Tensor& tensor, Reduction reduction, std::string_view label, Channel channel) override;
  std::unique_ptr<CommWork> broadcast(const at::Tensor& tensor, int64_t root, std::string_view label, Channel channel) override;
  void open_reduction_channel() override { separate = true; }
  void register_buffer(const at::Tensor& buffer) override { registered.push_back(buffer); }
  bool gathers_straight() const override { return hub_.straight_; }
  std::vector<std::string> gather_texts(const std::string& text, std::string_view label) override;
  std::vector<std::pair<std::string, int64_t>> counts() const override { return {counted.begin(), counted.end()}; }

  /// Sum of counts whose name begins with `kind`.
  [[nodiscard]] int64_t count(const std::string& kind) const;
  void reset_counts() { counted.clear(); }

  std::map<std::string, int64_t> counted;
  std::vector<std::string> events;            // "issue reduce_scatter block.0", "wait reduce_scatter block.0"
  std::vector<at::Tensor> registered;
  bool separate = false;
  int64_t reductions_in_flight = 0, most_reductions_in_flight = 0;

 private:
  friend class FakeWork;
  std::unique_ptr<CommWork> issue(const char* kind, std::string_view label, Channel channel, const at::Tensor& input,
                                  const at::Tensor& output, int64_t root = 0, bool is_max = false, const std::vector<PartRun>& runs = {});

  FakeHub& hub_;
  int64_t rank_;
  int64_t next_[3] = {0, 0, 0};  // main, reduction, texts
};

}  // namespace sf::testing
