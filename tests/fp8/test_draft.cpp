// fp8 over the real tape: what stays as it was, one rank against three, recompute, and its codec.
#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "core/kernels/ops.hpp"
#include "plugins/sharding/fsdp2/fsdp2.hpp"
#include "plugins/transform/fp8/fp8.hpp"
#include "sdk/testing/small_draft.hpp"
#include "sf/error.hpp"

using namespace sf;
using namespace sf::testing;
using fp8::Fp8;
using fp8::Fp8Options;
using fsdp::GroupedSharding;

namespace {

// Rows of no shape divide by 3.
DraftRun draft(at::ScalarType dtype = at::kFloat) {
  DraftRun run;
  run.shape.hidden = 32;
  run.shape.inner = 80;
  run.samples = 6;
  run.dtype = dtype;
  return run;
}

std::function<std::unique_ptr<Transform, void (*)(Transform*)>()> fp8_with(Fp8Options options) {
  options.emulate = true;
  return [=] { return std::unique_ptr<Transform, void (*)(Transform*)>(new Fp8(options), [](Transform* made) { delete static_cast<Fp8*>(made); }); };
}

// Another transform, and how many of its products found that their weight has no memory.
class Watched final : public Transform {
 public:
  Watched(std::unique_ptr<Transform, void (*)(Transform*)> inner, int64_t& without) : inner_(std::move(inner)), without_(without) {}
  virtual ~Watched() = default;

  std::vector<bool> take_over(const std::vector<LinearSpec>& linears) override { return inner_->take_over(linears); }
  TransformMemory memory() const override { return inner_->memory(); }
  void build(at::Device device, at::ScalarType dtype, Ops& ops) override { inner_->build(device, dtype, ops); }
  GatherCodec* codec() override { return inner_->codec(); }
  void begin_window() override { inner_->begin_window(); }
  void encode_weights(int64_t unit, const std::vector<at::Tensor>& whole) override { inner_->encode_weights(unit, whole); }
  std::vector<at::Tensor> linears(const std::vector<LinearProduct>& products, const at::Tensor& x) override {
    for (const LinearProduct& product : products) {
      without_ += product.weight_oi.storage().nbytes() == 0;
    }
    return inner_->linears(products, x);
  }
  at::Tensor alarms() override { return inner_->alarms(); }
  std::string alarm_text(const std::vector<double>& flags) const override { return inner_->alarm_text(flags); }
  bool replaces(int64_t unit, int64_t parameter) const override { return inner_->replaces(unit, parameter); }

 private:
  std::unique_ptr<Transform, void (*)(Transform*)> inner_;
  int64_t& without_;
};

std::function<std::unique_ptr<Transform, void (*)(Transform*)>()> watched(Fp8Options options, int64_t& without) {
  return [options, &without] {
    return std::unique_ptr<Transform, void (*)(Transform*)>(new Watched(fp8_with(options)(), without), [](Transform* made) { delete static_cast<Watched*>(made); });
  };
}

std::unique_ptr<Sharding, void (*)(Sharding*)> fsdp2(const std::string& mode) {
  return {new GroupedSharding(fsdp::fsdp2_settings({.fsdp_sharding = mode, .reduce_dtype = "float32"})),
          [](Sharding* sharding) { delete static_cast<GroupedSharding*>(sharding); }};
}

}  // namespace

TEST_CASE("fp8 draft: parameters keep their names and shapes, the listed linears round, and the rest is the same to the bit") {
  DraftRun run = draft();
  run.windows = 1;
  DraftRun rounded = run;
  rounded.make_transform = fp8_with({});
  const Outcome a = train_single(run), b = train_single(rounded);
  REQUIRE(a.weights.size() == b.weights.size());
  for (const auto& [name, weight] : a.weights) {
    CHECK(b.weights.at(name).sizes() == weight.sizes());
  }
  CHECK(b.losses[0] == doctest::Approx(a.losses[0]).epsilon(0.1));   // a sum of squares
  CHECK(b.losses[0] != a.losses[0]);

  Transforms transforms({{.name = "fp8", .transform = fp8_with({})().release()}}, draft_specs(run.shape));
  CHECK(transforms.taken_text(transforms.members()[0]) == std::vector<std::string>{"block.0 to block.2: up, down"});
  DraftRun all_skipped_but_one = run;
  all_skipped_but_one.make_transform = fp8_with({.skip = {"block.1.*", "block.2.*", "up"}});   // block.0's down alone
  const Outcome c = train_single(all_skipped_but_one);
  CHECK(c.losses[0] != a.losses[0]);
  CHECK(c.losses[0] != b.losses[0]);
}

TEST_CASE("fp8 draft: it trains") {
  DraftRun run = draft(at::kBFloat16);
  run.windows = 12;
  run.make_transform = fp8_with({});
  const Outcome found = train_single(run);
  CHECK(found.losses.back() < 0.2 * found.losses.front());
}

TEST_CASE("fp8 draft: three ranks with uneven shards give what one process gives, up to the order of sums") {
  for (const char* mode : {"SHARD_GRAD_OP", "FULL_SHARD"}) {
    CAPTURE(mode);
    DraftRun run = draft();
    run.make_transform = fp8_with({});
    run.windows = 1;   // a sum that rounds another way changes an encoded value by a whole step, so later windows are compared loosely
    const Outcome one = train_single(run);
    const Outcome three = train_ranks(run, 3, [&] { return fsdp2(mode); });
    CHECK(largest_difference(three.gradients, one.gradients) < 2e-5);
    CHECK(three.losses[0] == doctest::Approx(one.losses[0]).epsilon(1e-6));
    CHECK(three.norms[0] == doctest::Approx(one.norms[0]).epsilon(1e-5));
    run.windows = 3;
    CHECK(train_ranks(run, 3, [&] { return fsdp2(mode); }).losses[2] == doctest::Approx(train_single(run).losses[2]).epsilon(1e-2));
  }
}

TEST_CASE("fp8 draft: recompute gives the same bits, and so does a unit that is used three times") {
  DraftRun run = draft();
  run.make_transform = fp8_with({});
  DraftRun again = run;
  again.shape.recompute = {"block.*"};
  CHECK(largest_difference(train_single(again).weights, train_single(run).weights) == 0);
  DraftRun unrolled = run;
  unrolled.shape.blocks = 1;
  unrolled.shape.block_uses = 3;
  unrolled.shape.has_frozen = false;
  DraftRun unrolled_again = unrolled;
  unrolled_again.shape.recompute = {"block.*"};
  CHECK(largest_difference(train_single(unrolled_again).weights, train_single(unrolled).weights) == 0);
}

TEST_CASE("fp8 draft: a run that goes on from its own weights and moments gives the same bits: nothing of fp8 is state") {
  DraftRun run = draft();
  run.make_transform = fp8_with({});
  const Outcome whole = train_single(run);
  std::map<std::string, at::Tensor> weights;
  std::vector<std::vector<at::Tensor>> states;
  DraftRun first = run;
  first.windows = 1;
  first.at_end = [&](AdamW& optimizer, Sharding& sharding, Comm*) {
    for (const Shard& shard : sharding.shards()) {
      weights[shard.name] = shard.local.clone();
    }
    for (const ShardState& one : optimizer.states()) {
      states.push_back({one.master.clone(), one.exp_avg.clone(), one.exp_avg_sq.clone(), one.steps.clone()});
    }
  };
  (void)train_single(first);
  DraftRun second = run;
  second.first_window = 1;
  second.before_start = [&](AdamW& optimizer, Sharding& sharding, Comm*) {
    at::NoGradGuard no_grad;
    for (Shard& shard : sharding.shards()) {
      shard.local.copy_(weights.at(shard.name));
    }
    for (size_t i = 0; i < states.size(); ++i) {
      ShardState& one = optimizer.states()[i];
      one.master.copy_(states[i][0]);
      one.exp_avg.copy_(states[i][1]);
      one.exp_avg_sq.copy_(states[i][2]);
      one.steps.copy_(states[i][3]);
    }
  };
  CHECK(largest_difference(train_single(second).weights, whole.weights) == 0);
}

TEST_CASE("fp8 draft: an evaluation between windows is in full precision and changes nothing") {
  DraftRun run = draft();
  run.make_transform = fp8_with({});
  DraftRun evaluated = run;
  evaluated.evaluate_between = true;
  CHECK(largest_difference(train_single(evaluated).weights, train_single(run).weights) == 0);
}

TEST_CASE("fp8 draft: weights that lend their memory within a window come back, after an update, an evaluation and a failure, and no bit differs") {
  DraftRun run = draft(at::kBFloat16);
  run.make_transform = fp8_with({});
  run.evaluate_between = true;
  run.throw_in_window = 1;
  DraftRun lending = run;
  lending.lends_weights = true;
  int64_t without = 0;
  lending.make_transform = watched({}, without);
  const Outcome a = train_single(run), b = train_single(lending);
  CHECK(without > 0);
  CHECK(a.losses == b.losses);
  CHECK(largest_difference(b.weights, a.weights) == 0);
  for (const auto& [name, weight] : b.weights) {
    CHECK(weight.storage().nbytes() > 0);
  }
  DraftRun own = lending;   // gradients of inputs read the weights themselves: nothing is lent, and nothing fails
  without = 0;
  own.make_transform = watched({.grad_input_fp8 = false}, without);
  CHECK(train_single(own).losses.size() == a.losses.size());
  CHECK(without == 0);
}

TEST_CASE("fp8 codec: any cut of the rows decodes to what encoding the whole weight gives, and serves its products") {
  Fp8 transform({.skip = {}, .emulate = true, .gather = true});
  const LinearSpec spec{.unit = "block.0", .shard_group = "block.0", .name = "a", .unit_index = 0, .parameter = 2, .inputs = 48, .outputs = 32};
  (void)transform.take_over({spec});
  transform.build(at::kCPU, at::kFloat, cpu_ops());
  GatherCodec* codec = transform.codec();
  REQUIRE(codec != nullptr);
  CHECK(codec->carries(0, 2));
  CHECK_FALSE(codec->carries(0, 1));
  CHECK(codec->row_bytes(0, 2) == 48);
  at::manual_seed(3);
  const at::Tensor weight = at::randn({32, 48});
  const Float8Matrix expected = cpu_ops().float8_encode({.x_rc = weight, .amax = {}, .rows = true, .columns = true, .alarm = {}, .into = {}});

  for (const std::vector<int64_t>& cut : {std::vector<int64_t>{32}, {11, 11, 10}, {32, 0, 0}, {0, 31, 1}}) {
    transform.begin_window();
    std::vector<at::Tensor> parts, found;
    int64_t begin = 0;
    for (const int64_t rows : cut) {
      parts.push_back(weight.narrow(0, begin, rows).contiguous());
      found.push_back(codec->magnitudes({parts.back()}));
      begin += rows;
    }
    codec->set_magnitudes(at::stack(found).amax(0));   // what the all-reduce gives to each rank
    begin = 0;
    for (const at::Tensor& part : parts) {
      const at::Tensor padded = at::cat({part, at::zeros({2, 48})});
      const at::Tensor payload = at::full({padded.size(0), 48}, 255, at::kByte);
      codec->encode(0, 2, padded, payload);
      codec->decode(0, 2, begin, payload.narrow(0, 0, part.size(0)));
      begin += part.size(0);
    }
    codec->decoded(0, 2);
    const Float8Matrix& made = transform.linear(0).weight;
    CHECK(at::equal(made.values_rc.view(at::kByte), expected.values_rc.view(at::kByte)));
    CHECK(at::equal(transform.transposed_weight(0).values_rk.view(at::kByte), expected.values_cr.view(at::kByte)));
    CHECK(made.inverse_scale.item<float>() == expected.inverse_scale.item<float>());
    transform.encode_weights(0, {at::Tensor(), at::Tensor(), at::full({32, 48}, NAN)});   // what a carried parameter's whole tensor holds is not looked at
    CHECK(at::equal(made.values_rc.view(at::kByte), expected.values_rc.view(at::kByte)));
  }
}
