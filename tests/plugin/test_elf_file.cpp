#include <algorithm>
#include <fstream>

#include "core/plugin/elf_file.hpp"
#include "tests/plugin/fake_files.hpp"

using namespace sf;

TEST_CASE("elf: notes, needed libraries and the one exported symbol are read from the file") {
  ElfProblem problem;
  auto elf = read_elf(good_plugins() / "fake_ok.so", problem);
  REQUIRE(elf);
  const std::string* build = elf->find_note(SF_NOTE_OWNER, SF_NOTE_BUILD);
  REQUIRE(build != nullptr);
  CHECK(build->size() == sizeof(sf_build));
  const std::string* manifest = elf->find_note(SF_NOTE_OWNER, SF_NOTE_MANIFEST);
  REQUIRE(manifest != nullptr);
  CHECK(*manifest == read_file(std::string(SF_TEST_DATA) + "/abi/fake/fake_ok.toml"));
  CHECK(elf->exported == std::vector<std::string>{"sf_plugin_entry_v1"});
  CHECK(std::find(elf->needed.begin(), elf->needed.end(), "libstdc++.so.6") != elf->needed.end());
  CHECK(elf->stays_loaded);
  CHECK(elf->run_path.empty());
}

TEST_CASE("elf: what is no shared library for this machine is refused in plain words") {
  TemporaryFolder folder;
  auto problem_of = [&](const std::string& bytes) {
    write_plugin(folder.path / "x.so", bytes);
    ElfProblem problem;
    CHECK_FALSE(read_elf(folder.path / "x.so", problem));
    return problem.id + ": " + problem.message;
  };
  CHECK(problem_of("#!/bin/sh\n") == "plugin/not-elf: is not a shared library (starts with \"#!/bin/s\")");
  CHECK(problem_of("") == "plugin/not-elf: is not a shared library (it is empty)");
  std::string good = read_file(good_plugins() / "fake_ok.so");
  std::string arm = good;
  arm[18] = static_cast<char>(183);  // e_machine
  CHECK(problem_of(arm) == "plugin/wrong-machine: is for aarch64, this host is x86-64");
  std::string program = good;
  program[16] = 2;  // e_type
  CHECK(problem_of(program) == "plugin/not-elf: is a program and not a shared library");
  CHECK(problem_of(good.substr(0, 100)).find("damaged") != std::string::npos);
  CHECK_THROWS_AS((void)read_file(folder.path / "absent.so"), Error);
}

TEST_CASE(
    "elf: no change of a byte in headers or tables makes the reader fail in another way than by refusing") {
  TemporaryFolder folder;
  std::string good = read_file(good_plugins() / "fake_sharding.so");
  std::uint32_t state = 12345;
  for (int round = 0; round < 600; ++round) {
    std::string bytes = good;
    for (int change = 0; change < 3; ++change) {
      state = state * 1664525 + 1013904223;
      std::size_t at = (state >> 8) % std::min<std::size_t>(bytes.size(), round % 2 == 0 ? 0x400 : 0x4000);
      bytes[at] = static_cast<char>(state >> 24);
    }
    if (round % 5 == 0) {
      bytes.resize((state >> 8) % bytes.size());
    }
    std::ofstream(folder.path / "x.so", std::ios::binary) << bytes;
    ElfProblem problem;
    auto elf = read_elf(folder.path / "x.so", problem);
    CHECK((elf || !problem.message.empty()));
  }
}
