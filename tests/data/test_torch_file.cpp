#include <doctest/doctest.h>

#include <cstring>
#include <string>

#include "core/data/torch_file.hpp"
#include "scratch.hpp"

using namespace sf;
using sf::test::error_of;
using sf::test::Scratch;

namespace {

const std::filesystem::path kData = std::filesystem::path(SF_TEST_DATA) / "data";

bool same(const TensorView* a, const TensorView* b) {
  return a != nullptr && b != nullptr && a->dtype == b->dtype && a->shape == b->shape &&
         a->bytes.size() == b->bytes.size() &&
         std::memcmp(a->bytes.data(), b->bytes.data(), a->bytes.size()) == 0;
}

}  // namespace

TEST_CASE("torch file: a record of torch.save has its keys, types and shapes") {
  const TorchFile file = TorchFile::open(kData / "features_eagle3" / "data_0.ckpt");
  CHECK(file.tensors().size() == 4);
  REQUIRE(file.find("input_ids") != nullptr);
  CHECK(file.find("input_ids")->dtype == Dtype::kI64);
  CHECK(file.find("input_ids")->shape == std::vector<int64_t>{52});
  CHECK(file.find("hidden_state")->dtype == Dtype::kBF16);
  CHECK(file.find("hidden_state")->shape == std::vector<int64_t>{1, 52, 64});
  CHECK(file.find("aux_hidden_state")->shape == std::vector<int64_t>{1, 52, 192});
  CHECK(file.find("nothing") == nullptr);
  int64_t id = 0;
  for (int i = 0; i < 52; ++i) {
    std::memcpy(&id, file.find("input_ids")->bytes.data() + 8 * i, 8);
    CHECK(id >= 0);
    CHECK(id < 320);
  }
}

TEST_CASE("torch file: deflated and gzipped files read as the stored one does") {
  const TorchFile stored = TorchFile::open(kData / "features_eagle3" / "data_1.ckpt");
  for (const char* name : {"deflated.ckpt", "packed.ckpt.gz"}) {
    CAPTURE(name);
    const TorchFile other = TorchFile::open(kData / "torch_files" / name);
    for (const char* key : {"input_ids", "loss_mask", "hidden_state", "aux_hidden_state"}) {
      CHECK(same(stored.find(key), other.find(key)));
    }
  }
}

TEST_CASE("torch file: a view outlives the file object") {
  TensorView view = *TorchFile::open(kData / "torch_files" / "packed.ckpt.gz").find("input_ids");
  CHECK(same(&view, TorchFile::open(kData / "features_eagle3" / "data_1.ckpt").find("input_ids")));
}

TEST_CASE("torch file: a pickle that would run code is refused by name") {
  CHECK(error_of([] { (void)TorchFile::open(kData / "torch_files" / "runs_code.ckpt"); })
            .ends_with("runs_code.ckpt: the pickle asks for 'posix system', which is not allowed: only plain "
                       "tensors are read"));
}

TEST_CASE("torch file: containers that hold each other, or a long chain of them, are refused and neither leak nor crash") {
  CHECK(error_of([] { (void)TorchFile::open(kData / "torch_files" / "cyclic.ckpt"); }).find("cyclic.ckpt: ") != std::string::npos);
  CHECK(error_of([] { (void)TorchFile::open(kData / "torch_files" / "chained.ckpt"); }).ends_with("chained.ckpt: a dictionary of tensors was expected"));
}

TEST_CASE("torch file: a few kilobytes that unpack to far more values than a record has are refused before they take seconds") {
  CHECK(error_of([] { (void)TorchFile::open(kData / "torch_files" / "crowded.ckpt"); }).ends_with("crowded.ckpt: damaged pickle: too many values"));
}

TEST_CASE("torch file: a few hundred bytes that unpack to millions of references to one value are refused, too") {
  CHECK(error_of([] { (void)TorchFile::open(kData / "torch_files" / "memoized.ckpt"); }).ends_with("memoized.ckpt: damaged pickle: too many values"));
}

TEST_CASE("torch file: a tensor without elements may have any other extents") {
  const TorchFile file = TorchFile::open(kData / "torch_files" / "empty_wide.ckpt");
  REQUIRE(file.find("x") != nullptr);
  CHECK(file.find("x")->shape == std::vector<int64_t>{0, int64_t{1} << 62, int64_t{1} << 62});
  CHECK(file.find("x")->bytes.empty());
}

TEST_CASE("torch file: a pickle nested too deeply is refused and not a crash") {
  CHECK(error_of([] {
          (void)TorchFile::open(kData / "torch_files" / "nested.ckpt");
        }).ends_with("nested.ckpt: damaged pickle: nested too deeply"));
}

TEST_CASE(
    "torch file: every truncation and every single damaged byte is an error or reads as before, never a "
    "crash") {
  const Scratch scratch;
  for (const char* name :
       {"features_eagle3/data_1.ckpt", "torch_files/deflated.ckpt", "torch_files/packed.ckpt.gz"}) {
    CAPTURE(name);
    const std::string whole = read_file(kData / name);
    // A new name each time: writing over a file makes some file systems wait for the disk.
    const std::string ending = std::string(name).ends_with(".gz") ? "r.ckpt.gz" : "r.ckpt";
    for (size_t length = 0; length < whole.size(); length += whole.size() / 97 + 1) {
      const auto path = scratch.write(format("cut-{}-{}", length, ending), whole.substr(0, length));
      CHECK(error_of([&] { (void)TorchFile::open(path); }) != "no error");
    }
    for (size_t at = 0; at < whole.size(); at += 23) {
      std::string damaged = whole;
      damaged[at] = static_cast<char>(damaged[at] ^ 0x5a);
      const auto path = scratch.write(format("{}-{}", at, ending), damaged);
      (void)error_of(
          [&] { (void)TorchFile::open(path); });  // an sf::Error or none; anything else ends the test
    }
  }
}

TEST_CASE("torch file: other files are told apart") {
  const Scratch scratch;
  CHECK(error_of([&] { (void)TorchFile::open(scratch.write("a.ckpt", "")); }, &scratch) ==
        "a.ckpt: the file is empty");
  CHECK(error_of([&] { (void)TorchFile::open(scratch.write("a.ckpt", "hello, world")); }, &scratch) ==
        "a.ckpt: not a file of torch.save: it does not start as a zip archive");
  CHECK(error_of([&] { (void)TorchFile::open(scratch.write("a.ckpt.gz", "hello, world")); }, &scratch) ==
        "a.ckpt.gz: not a gzip file, or damaged");
  const std::string whole = read_file(kData / "features_eagle3" / "data_1.ckpt");
  CHECK(error_of([&] { (void)TorchFile::open(scratch.write("a.ckpt", whole.substr(0, whole.size() / 2))); },
                 &scratch) == "a.ckpt: truncated: the zip archive has no directory at its end");
}
