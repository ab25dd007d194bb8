// sf.random/1 and sf.run-files/1 as a plugin sees them.
#include <doctest/doctest.h>

#include <array>

#include "core/base/file.hpp"
#include "core/data/philox.hpp"
#include "core/data/plugin_services.hpp"
#include "tests/data/scratch.hpp"

using namespace sf;

namespace {

std::array<uint64_t, 4> drawn(const PluginServices& services, const char* stream, uint64_t row, uint64_t first) {
  const auto& random = *static_cast<const sf_random*>(services.find(SF_RANDOM));
  std::array<uint64_t, 4> out{};
  random.draw(random.ctx, stream, row, first, out.size(), out.data());
  return out;
}

}  // namespace

TEST_CASE("services: random numbers depend on seed, plugin, stream, row and place, and on nothing else") {
  const PluginServices a("a", 7, "/r"), b("b", 7, "/r"), other_seed("a", 8, "/r"), again("a", 7, "/elsewhere");
  const auto first = drawn(a, "x", 3, 0);
  CHECK(first == drawn(again, "x", 3, 0));
  CHECK(first[2] == drawn(a, "x", 3, 2)[0]);   // in any pieces
  CHECK(first != drawn(a, "y", 3, 0));
  CHECK(first != drawn(a, "x", 4, 0));
  CHECK(first != drawn(b, "x", 3, 0));
  CHECK(first != drawn(other_seed, "x", 3, 0));
  CHECK(first[1] == PhiloxStream(7, "plugin/a/x").bits(0, 3, 1));
  CHECK(a.find("sf.nothing/1") == nullptr);
}

TEST_CASE("services: a plugin writes whole files under its own name, and no others") {
  const test::Scratch scratch;
  const PluginServices services("mine", 1, scratch.path());
  const auto& files = *static_cast<const sf_run_files*>(services.find(SF_RUN_FILES));
  CHECK(files.folder == scratch.path().string());
  sf_status status{};
  for (const char* name : {"mine", "mine.csv", "mine-1", "mine_2.txt"}) {
    CHECK(files.write(files.ctx, name, "text", 4, &status) == SF_OK);
    CHECK(read_file(scratch.path() / name) == "text");
  }
  for (const char* name : {"other.csv", "minefield", "mine/x", "../mine", "", "metrics.jsonl"}) {
    CHECK(files.write(files.ctx, name, "text", 4, &status) == SF_INVALID_ARGUMENT);
  }
  CHECK(files.write(files.ctx, nullptr, "text", 4, &status) == SF_INVALID_ARGUMENT);
  CHECK(files.write(files.ctx, "mine", nullptr, 4, &status) == SF_INVALID_ARGUMENT);
  CHECK(files.write(files.ctx, "mine-1", nullptr, 0, &status) == SF_OK);
  CHECK(read_file(scratch.path() / "mine-1").empty());
  CHECK(files.write(files.ctx, "metrics.jsonl", "text", 4, &status) == SF_INVALID_ARGUMENT);
  CHECK(std::string(status.what).find("can't be called \"metrics.jsonl\"") != std::string::npos);
  const PluginServices nowhere("mine", 1, "/nonexistent");
  const auto& lost = *static_cast<const sf_run_files*>(nowhere.find(SF_RUN_FILES));
  CHECK(lost.write(lost.ctx, "mine", "text", 4, &status) == SF_IO);
}
