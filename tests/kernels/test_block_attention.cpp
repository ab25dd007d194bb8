#include <doctest/doctest.h>

#include "core/kernels/block_attention.hpp"
#include "core/kernels/ops.hpp"
#include "tests/kernels/finite_difference.hpp"

#include <cmath>
#include <limits>

using sf::BlockAttention;
using sf::test::distance;
using sf::test::gradient_error;
using sf::test::random;
using sf::test::relative_distance;

namespace {

struct Setting {
  const char* name;
  int64_t window = 0;
  bool causal = false;
  int64_t b = 2, s = 9, w = 4, j = 3, n = 4, m = 2, e = 5;
};

// Row 0 has an anchor at 0 (no context), one at the end and a dead slot; row 1 one live block.
BlockAttention example(const Setting& set, at::ScalarType type = at::kDouble) {
  BlockAttention attention;
  const int64_t q = set.w * set.j;
  attention.query_bqne = random({set.b, q, set.n, set.e}, type);
  attention.context_key_bsme = random({set.b, set.s, set.m, set.e}, type);
  attention.context_value_bsme = random({set.b, set.s, set.m, set.e}, type);
  attention.block_key_bqme = random({set.b, q, set.m, set.e}, type);
  attention.block_value_bqme = random({set.b, q, set.m, set.e}, type);
  attention.anchors_bw = at::tensor({0, 4, 8, 0, 5, 0, 0, 0}, at::kLong).view({2, 4});
  attention.keep_bw = at::tensor({1, 1, 1, 0, 1, 0, 0, 0}, at::kLong).view({2, 4}).to(at::kBool);
  attention.block_size = set.j;
  attention.window_tokens = set.window;
  attention.causal = set.causal;
  attention.scale = 1 / std::sqrt(static_cast<double>(set.e));
  return attention;
}

// The mask as the text has it: one boolean for each row and each of the s + q keys.
at::Tensor visible(const BlockAttention& a) {
  const int64_t b = a.anchors_bw.size(0), s = a.context_key_bsme.size(1), q = a.query_bqne.size(1), j = a.block_size;
  at::Tensor seen = at::zeros({b, q, s + q}, at::kBool);
  auto out = seen.accessor<bool, 3>();
  for (int64_t r = 0; r < b; ++r) {
    for (int64_t row = 0; row < q; ++row) {
      const int64_t block = row / j, slot = row % j;
      const int64_t anchor = a.anchors_bw[r][block].item<int64_t>();
      if (!a.keep_bw[r][block].item<bool>()) {
        continue;
      }
      for (int64_t key = 0; key < s; ++key) {
        out[r][row][key] = key < anchor && (a.window_tokens == 0 || key >= anchor + slot - (a.window_tokens - 1));
      }
      for (int64_t key = 0; key < q; ++key) {
        const int64_t key_slot = key % j;
        out[r][row][s + key] = key / j == block && (!a.causal || key_slot <= slot) &&
                               (a.window_tokens == 0 || key_slot >= slot - (a.window_tokens - 1));
      }
    }
  }
  return seen;
}

at::Tensor naive(const BlockAttention& a) {
  const int64_t share = a.query_bqne.size(2) / a.context_key_bsme.size(2);
  const at::Tensor keys = at::cat({a.context_key_bsme, a.block_key_bqme}, 1).repeat_interleave(share, 2);
  const at::Tensor values = at::cat({a.context_value_bsme, a.block_value_bqme}, 1).repeat_interleave(share, 2);
  const at::Tensor scores = at::einsum("bqne,bkne->bnqk", {a.query_bqne, keys}) * a.scale;
  const at::Tensor seen = visible(a).unsqueeze(1);
  const at::Tensor shown = scores.masked_fill(seen.logical_not(), -std::numeric_limits<double>::infinity());
  const at::Tensor p = at::where(seen.any(-1, true), at::softmax(shown.masked_fill(seen.any(-1, true).logical_not(), 0), -1), at::zeros_like(scores));
  return at::einsum("bnqk,bkne->bqne", {at::where(seen, p, at::zeros_like(p)), values});
}

BlockAttention with(BlockAttention a, const std::vector<at::Tensor>& in) {
  a.query_bqne = in[0];
  a.context_key_bsme = in[1];
  a.context_value_bsme = in[2];
  a.block_key_bqme = in[3];
  a.block_value_bqme = in[4];
  return a;
}

std::vector<at::Tensor> inputs_of(const BlockAttention& a) {
  return {a.query_bqne, a.context_key_bsme, a.context_value_bsme, a.block_key_bqme, a.block_value_bqme};
}

const std::vector<Setting> kSettings = {
    {"full, both ways inside a block"},
    {"full, causal inside a block", 0, true},
    {"sliding and causal", 4, true},
    {"sliding, both ways inside a block", 4, false},
    {"window shorter than a block", 2, true},
    {"window of one token", 1, false},
};

}  // namespace

TEST_CASE("block attention: each row sees exactly what the enumerated mask allows") {
  at::manual_seed(11);
  for (const Setting& set : kSettings) {
    CAPTURE(set.name);
    const BlockAttention a = example(set);
    CHECK(distance(sf::block_attention(a), naive(a)) < 1e-13);
  }
}

TEST_CASE("block attention: gradients agree with the naive formula's and with finite differences") {
  at::manual_seed(12);
  for (const Setting& set : kSettings) {
    CAPTURE(set.name);
    const BlockAttention a = example(set);
    const at::Tensor seed = random({set.b, set.w * set.j, set.n, set.e});
    std::vector<at::Tensor> leaves;
    for (const at::Tensor& input : inputs_of(a)) {
      leaves.push_back(input.detach().clone().requires_grad_());
    }
    const auto expected = torch::autograd::grad({at::mul(naive(with(a, leaves)), seed).sum()}, leaves);
    const auto found = torch::autograd::grad({at::mul(sf::block_attention(with(a, leaves)), seed).sum()}, leaves);
    for (size_t i = 0; i < leaves.size(); ++i) {
      CAPTURE(i);
      CHECK(distance(found[i], expected[i]) < 1e-12);
    }
  }
  Setting tiny{"tiny"};
  tiny.window = 3;
  tiny.causal = true;
  tiny.n = 2;
  tiny.m = 1;
  tiny.e = 3;
  const BlockAttention a = example(tiny);
  const at::Tensor seed = random({tiny.b, tiny.w * tiny.j, tiny.n, tiny.e});
  CHECK(gradient_error([&](const auto& in) { return at::mul(sf::block_attention(with(a, in)), seed).sum(); }, inputs_of(a)) < 1e-7);
}

TEST_CASE("block attention: the number of blocks in a chunk does not show in outputs or gradients") {
  at::manual_seed(13);
  const BlockAttention a = example({"sliding", 4, true});
  const at::Tensor seed = random(a.query_bqne.sizes());
  const auto run = [&](int64_t scores_max) {
    std::vector<at::Tensor> leaves;
    for (const at::Tensor& input : inputs_of(a)) {
      leaves.push_back(input.detach().clone().requires_grad_());
    }
    const at::Tensor out = sf::block_attention(with(a, leaves), scores_max);
    auto all = torch::autograd::grad({at::mul(out, seed).sum()}, leaves);
    all.push_back(out.detach());
    return all;
  };
  const auto whole = run(int64_t{1} << 40), single = run(1);
  for (size_t i = 0; i < whole.size(); ++i) {
    CHECK(distance(whole[i], single[i]) < 1e-13);
  }
}

TEST_CASE("block attention: dead blocks give exact zeros and send no gradient, even where their inputs are infinite") {
  at::manual_seed(14);
  BlockAttention a = example({"full"}, at::kFloat);
  const int64_t dead_row = 3 * 3;  // block 3 of row 0
  a.query_bqne[0].narrow(0, dead_row, 3).fill_(std::numeric_limits<float>::infinity());
  std::vector<at::Tensor> leaves;
  for (const at::Tensor& input : inputs_of(a)) {
    leaves.push_back(input.detach().clone().requires_grad_());
  }
  const at::Tensor out = sf::block_attention(with(a, leaves));
  CHECK(at::equal(out[0].narrow(0, dead_row, 3), at::zeros({3, 4, 5})));
  CHECK(at::equal(out[1].narrow(0, 3, 9), at::zeros({9, 4, 5})));
  CHECK(out.isfinite().all().item<bool>());

  // All blocks dead: zeros everywhere, gradients too.
  a = example({"full"}, at::kFloat);
  a.keep_bw = at::zeros_like(a.keep_bw);
  leaves.clear();
  for (const at::Tensor& input : inputs_of(a)) {
    leaves.push_back(input.detach().clone().requires_grad_());
  }
  const at::Tensor none = sf::block_attention(with(a, leaves));
  CHECK(none.abs().max().item<double>() == 0);
  for (const at::Tensor& gradient : torch::autograd::grad({none.sum()}, leaves)) {
    CHECK(gradient.abs().max().item<double>() == 0);
  }
}

TEST_CASE("block attention: bfloat16 stays within its rounding of the exact result") {
  at::manual_seed(15);
  const BlockAttention a = example({"full"}, at::kBFloat16);
  std::vector<at::Tensor> exact;
  for (const at::Tensor& input : inputs_of(a)) {
    exact.push_back(input.to(at::kDouble));
  }
  CHECK(relative_distance(sf::block_attention(a).to(at::kDouble), naive(with(a, exact))) < 3e-3);  // 2^-9 and some
}
