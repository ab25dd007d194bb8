// The kernels of a decoding step against their compositions: every kind of heads, lengths from one token on, and the cache that they write.
#include <doctest/doctest.h>

#include <ATen/ATen.h>

#include "core/kernels/decode.hpp"
#include "tests/kernels/finite_difference.hpp"
#include "tests/kernels/gpu.hpp"

#include <vector>

using sf::test::has_gpu;
using sf::test::random;
using sf::test::relative_distance;

namespace {

struct Case {
  int64_t query_heads, key_heads, head_size, pairs;
  bool has_norm;
};

sf::DecodeAttention attention_of(const Case& c, const std::vector<int64_t>& positions, int64_t room, at::Device device, at::ScalarType type) {
  const auto b = static_cast<int64_t>(positions.size());
  const auto made = [&](at::IntArrayRef shape) { return random(shape).to(device, type); };
  sf::DecodeAttention a;
  a.qkv_bx = made({b, (c.query_heads + 2 * c.key_heads) * c.head_size});
  a.query_heads = c.query_heads;
  a.key_heads = c.key_heads;
  if (c.has_norm) {
    a.query_weight_e = made({c.head_size});
    a.key_weight_e = made({c.head_size});
  }
  a.eps = 1e-6;
  const at::Tensor angle = random({b, c.pairs});
  a.cos_bf = angle.cos().to(type).to(device, at::kFloat);
  a.sin_bf = angle.sin().to(type).to(device, at::kFloat);
  a.positions_b = at::tensor(positions, at::kLong).to(device);
  a.keys_bmce = made({b, c.key_heads, room, c.head_size});
  a.values_bmce = made({b, c.key_heads, room, c.head_size});
  return a;
}

}  // namespace

TEST_CASE("cuda: attention of one new token for each sequence writes the cache and gives what its composition gives") {
  if (!has_gpu()) return;
  const at::Device gpu(at::kCUDA, 0);
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    for (const Case& c : {Case{9, 3, 64, 32, false}, Case{32, 8, 128, 64, true}, Case{4, 4, 64, 32, false}, Case{4, 2, 128, 64, false}, Case{14, 2, 64, 16, false}, Case{8, 1, 128, 32, true}}) {
      CAPTURE(c.query_heads);
      CAPTURE(c.head_size);
      const sf::DecodeAttention a = attention_of(c, {0, 1, 31, 32, 33, 200, 95, 7}, 256, gpu, type);
      sf::DecodeAttention twin = a;
      twin.keys_bmce = a.keys_bmce.clone();
      twin.values_bmce = a.values_bmce.clone();
      const at::Tensor found = sf::decode_attention(a), expected = sf::decode_attention_aten(twin);
      CHECK(at::equal(a.values_bmce, twin.values_bmce));
      const double keys = relative_distance(a.keys_bmce.cpu().to(at::kDouble), twin.keys_bmce.cpu().to(at::kDouble));
      CHECK(keys < (type == at::kFloat ? 1e-6 : 2e-4));  // a rounding of one element in some thousand
      CHECK(relative_distance(found.cpu().to(at::kDouble), expected.cpu().to(at::kDouble)) < (type == at::kFloat ? 2e-6 : 6e-3));
      CHECK(at::equal(found, sf::decode_attention(a)));
    }
  }
}

TEST_CASE("cuda: however many blocks share a sequence, short and long ones in one batch come out as from the composition") {
  if (!has_gpu()) return;
  const at::Device gpu(at::kCUDA, 0);
  const auto type = at::kBFloat16;
  for (const Case& c : {Case{32, 8, 128, 64, true}, Case{9, 3, 64, 32, false}, Case{24, 2, 128, 64, false}}) {
    for (const int64_t b : {1, 2, 5, 16, 64}) {
      CAPTURE(c.query_heads);
      CAPTURE(b);
      std::vector<int64_t> positions;
      for (int64_t i = 0; i < b; ++i) positions.push_back(i % 5 == 0 ? 699 - i : i % 5 == 1 ? i % 16 : i % 5 == 2 ? 127 + i % 3 : (i * 131) % 700);
      const sf::DecodeAttention a = attention_of(c, positions, 704, gpu, type);
      sf::DecodeAttention twin = a;
      twin.keys_bmce = a.keys_bmce.clone();
      twin.values_bmce = a.values_bmce.clone();
      const at::Tensor found = sf::decode_attention(a), expected = sf::decode_attention_aten(twin);
      CHECK(at::equal(a.values_bmce, twin.values_bmce));
      CHECK(relative_distance(a.keys_bmce.cpu().to(at::kDouble), twin.keys_bmce.cpu().to(at::kDouble)) < 2e-4);
      for (int64_t i = 0; i < b; ++i) {
        CHECK(relative_distance(found[i].cpu().to(at::kDouble), expected[i].cpu().to(at::kDouble)) < 8e-3);
      }
      CHECK(at::equal(found, sf::decode_attention(a)));
    }
  }
}

TEST_CASE("cuda: the gate of a step equals its composition") {
  if (!has_gpu()) return;
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    const at::Tensor x = random({5, 2 * 1536}).to(at::Device(at::kCUDA, 0), type);
    const at::Tensor expected = at::silu(x.narrow(1, 0, 1536)).mul_(x.narrow(1, 1536, 1536));
    CHECK(relative_distance(sf::decode_gate(x).cpu().to(at::kDouble), expected.cpu().to(at::kDouble)) < (type == at::kFloat ? 1e-6 : 1e-3));
  }
}

TEST_CASE("cuda: a step begins and ends as its compositions do") {
  if (!has_gpu()) return;
  const at::Device gpu(at::kCUDA, 0);
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    const at::Tensor ids = at::tensor({7, 0, 999, 31}, at::kLong), positions = at::tensor({0, 3, 500, 40000}, at::kLong), table = random({1000, 256}).to(type);
    const at::Tensor frequencies = at::pow(at::full({32}, 1e6, at::kFloat), at::arange(32, at::kFloat) / -32.0);
    const sf::StepStart found = sf::decode_start(ids.to(gpu), positions.to(gpu), table.to(gpu), frequencies.to(gpu), 1.0), expected = sf::decode_start(ids, positions, table, frequencies, 1.0);
    CHECK(at::equal(found.x_bh.cpu(), expected.x_bh));
    const double unit = type == at::kFloat ? 1e-6 : 4e-3;  // the last place, as two libraries' cosines may differ
    CHECK((found.cos_bf.cpu() - expected.cos_bf).abs().max().item<double>() <= unit);
    CHECK((found.sin_bf.cpu() - expected.sin_bf).abs().max().item<double>() <= unit);
    for (const int64_t v : {1, 777, 151936}) {
      at::Tensor logits = random({4, v}).to(type);
      if (v > 1) {
        logits.select(1, v / 3).fill_(50);
        logits.select(1, v - 1).fill_(50);
      }
      const at::Tensor said = at::zeros({4}, ids.options().device(gpu)), next = at::zeros_like(said), places = positions.to(gpu);
      sf::decode_choose(logits.to(gpu), said, next, places);
      CHECK(at::equal(said.cpu(), at::full({4}, v / 3, at::kLong)));
      CHECK(at::equal(next, said));
      CHECK(at::equal(places.cpu(), positions + 1));
    }
  }
}
