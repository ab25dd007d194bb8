// Every refusal of a plugin, word by word: expected/refusals.txt, updated with SF_UPDATE_GOLDEN=1 build/bin/test_refusals. Files that can be judged without being
// opened are copies of fake_canary.so, whose static initializer would leave a file.
#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "core/plugin/loader.hpp"
#include "core/plugin/registry.hpp"
#include "core/plugin/stack.hpp"
#include "core/recipe/recipe_reader.hpp"
#include "tests/host_program.hpp"
#include "tests/plugin/fake_files.hpp"

#include <dlfcn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

using namespace sf;
using test::Answer;
using test::run_host;

namespace {

fs::path canary_plugin() { return good_plugins() / "fake_canary.so"; }

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  for (std::size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size())) {
    text.replace(at, from.size(), to);
  }
  return text;
}

// A folder for the files of one test, and the canary's file.
struct Scratch {
  TemporaryFolder folder;
  fs::path canary = folder.path / "it-ran";

  Scratch() { setenv("SF_TEST_CANARY", canary.c_str(), 1); }
  ~Scratch() { unsetenv("SF_TEST_CANARY"); }

  [[nodiscard]] fs::path write(const std::string& name, const std::string& bytes) const {
    const fs::path path = folder.path / name;
    write_plugin(path, bytes);
    return path;
  }
  [[nodiscard]] bool has_run() const { return fs::exists(canary); }

  // Without what differs between machines.
  [[nodiscard]] std::string neutral(std::string text) const {
    text = replaced(text, folder.path.string(), "FOLDER");
    text = replaced(text, fs::canonical(good_plugins()).string(), "GOOD");
    text = replaced(text, fs::canonical(bad_plugins()).string(), "BAD");
    const std::string abi = "(ABI " + std::to_string(SF_ABI_MAJOR) + "." + std::to_string(SF_ABI_MINOR) + ")";
    text = replaced(text, std::string("this host is ") + SF_SDK_VERSION + " " + abi, "this host is VERSION (ABI NUMBER)");
    text = replaced(text, abi, "(ABI NUMBER)");
    for (std::size_t at = text.find(", g++ "); at != std::string::npos; at = text.find(", g++ ", at + 6)) {
      text.replace(at + 6, text.find(')', at) - at - 6, "X");
    }
    return text;
  }
};

std::string patched(std::string bytes, std::size_t at, const std::string& with) { return bytes.replace(at, with.size(), with); }

void torch(sf_build& build) {
  build.tier = SF_TIER_TORCH_CXX;
  build.torch_version = 0x020b0000;
  build.gxx_abi = __GXX_ABI_VERSION;
  set_field(build.torch_variant, "2.11.0+cu130");
}

// Problems of the file with these bytes, as they are printed.
std::string judged(const Scratch& place, const std::string& bytes, const HostBuild& host = torch_host()) {
  return inspect_plugin(place.write("x.so", bytes), "test", host).problems.text();
}

std::string noted(const Scratch& place, const std::function<void(sf_build&)>& change, const HostBuild& host = torch_host()) {
  return judged(place, with_note(canary_plugin(), change), host);
}

std::string found_in(const SearchRequest& request, const std::string& name, const std::vector<std::string>& named = {}) {
  Diagnostics problems;
  const Catalog catalog(request, named, torch_host(), problems);
  (void)catalog.find(name, {"recipe.toml", 3, 1}, problems);
  return problems.text();
}

std::string stacked(const std::vector<std::string>& sets, const std::string& backend = "") {
  Diagnostics problems;
  const Catalog catalog({.flag_folders = {good_plugins()}, .environment = "", .built_in = {}, .allowed_unsafe = {}}, {}, torch_host(), problems);
  RawValues raw;
  apply_overrides({"algorithm.name=fake_algorithm", "backend.sharding=fake_sharding"}, raw, problems);
  apply_overrides(sets, raw, problems);
  if (!backend.empty()) {
    apply_backend_flag(backend, catalog, raw, problems);
  }
  (void)pick_stack(raw, catalog, problems);
  return problems.text();
}

std::string opened(const fs::path& path) {
  Diagnostics problems;
  (void)open_plugin(inspect_plugin(path, "test", torch_host()), problems);
  return problems.text();
}

// fake_ok, told where to fail.
std::string lived(const std::vector<std::string>& sets) {
  Diagnostics problems;
  const PluginFile file = inspect_plugin(good_plugins() / "fake_ok.so", "test", torch_host());
  const sf_plugin* entry = open_plugin(file, problems);
  REQUIRE(entry != nullptr);
  Schema schema;
  schema.add(*file.manifest, problems);
  RawValues raw;
  apply_overrides(sets, raw, problems);
  PluginRegistry registry;
  registry.add({.name = "fake_ok",
                .version = "0.1.0",
                .sha256 = "",
                .kind = SF_KIND_CHECKPOINT,
                .plugin = entry,
                .host = std::make_unique<HostTable>("fake_ok", HostServices{}),
                .options = std::make_unique<BackendOptions>(*file.manifest, schema.resolve(raw, {}, false, problems))});
  if (registry.create(problems) && registry.start(problems)) {
    registry.check_claims(problems);
    registry.check_effects(problems);
  }
  registry.close();
  return problems.text();
}

struct Refusal {
  const char* title;
  std::function<std::string(const Scratch&)> make;
};

// Those whose reason can be read from the file: nothing of it may have run.
std::vector<Refusal> unopened() {
  const auto canary = [] { return read_file(canary_plugin()); };
  return {
      {"a path instead of a name", [](const Scratch&) { return found_in({.flag_folders = {good_plugins()}, .environment = "", .built_in = {}, .allowed_unsafe = {}}, "../fake_ok"); }},
      {"a name that nobody has", [](const Scratch&) { return found_in({.flag_folders = {good_plugins(), bad_plugins()}, .environment = "", .built_in = {}, .allowed_unsafe = {}}, "fake_canery"); }},
      {"two of one name", [canary](const Scratch& place) {
         (void)place.write("a.so", canary());
         (void)place.write("b.so", canary());
         return found_in({.flag_folders = {place.folder.path}, .environment = "", .built_in = {}, .allowed_unsafe = {}}, "fake_canary");
       }},
      {"a folder that everybody can write", [canary](const Scratch& place) {
         const fs::path open = place.folder.path / "open";
         fs::create_directory(open);
         write_plugin(open / "fake_canary.so", canary());
         fs::permissions(open, fs::perms(0777));
         return found_in({.flag_folders = {open}, .environment = "", .built_in = {}, .allowed_unsafe = {}}, "fake_canary");
       }},
      {"a file that everybody can write", [canary](const Scratch& place) {
         fs::permissions(place.write("fake_canary.so", canary()), fs::perms(0777));
         return found_in({.flag_folders = {place.folder.path}, .environment = "", .built_in = {}, .allowed_unsafe = {}}, "fake_canary");
       }},
      {"a relative folder", [](const Scratch&) { return found_in({.flag_folders = {"plugins"}, .environment = "", .built_in = {}, .allowed_unsafe = {}}, "fake_canary"); }},
      {"--plugin without a path", [](const Scratch&) { return found_in({.flag_folders = {good_plugins()}, .environment = "", .built_in = {}, .allowed_unsafe = {}}, "fake_canary", {"fake_canary=x.so"}); }},
      {"--plugin with another plugin's file", [](const Scratch&) { return found_in({.flag_folders = {}, .environment = "", .built_in = {}, .allowed_unsafe = {}}, "fake_canary", {"fp8=" + canary_plugin().string()}); }},
      {"no file", [](const Scratch& place) { return inspect_plugin(place.folder.path / "absent.so", "test", torch_host()).problems.text(); }},
      {"a script", [](const Scratch& place) { return judged(place, "#!/bin/sh\n"); }},
      {"an empty file", [](const Scratch& place) { return judged(place, ""); }},
      {"a program", [canary](const Scratch& place) { return judged(place, patched(canary(), 16, std::string("\2", 1))); }},
      {"an object file", [canary](const Scratch& place) { return judged(place, patched(canary(), 16, std::string("\1", 1))); }},
      {"another processor", [canary](const Scratch& place) { return judged(place, patched(canary(), 18, std::string("\xb7", 1))); }},
      {"a torn file", [canary](const Scratch& place) { return judged(place, canary().substr(0, 300)); }},
      {"a library that is no plugin", [](const Scratch&) { return inspect_plugin(bad_plugins() / "fake_no_note.so", "test", torch_host()).problems.text(); }},
      {"half a note", [](const Scratch& place) { return noted(place, [](sf_build& b) { b.struct_size = 12; }); }},
      {"another SDK", [](const Scratch& place) { return noted(place, [](sf_build& b) { set_field(b.sdk_version, "0.0.9"), b.abi_minor = 0; }); }},
      {"another LibTorch", [](const Scratch& place) { return noted(place, [](sf_build& b) { torch(b), set_field(b.torch_variant, "2.10.0+cu130"); }); }},
      {"another variant of LibTorch", [](const Scratch& place) { return noted(place, [](sf_build& b) { torch(b), set_field(b.torch_variant, "2.11.0+cpu"); }); }},
      {"a host without LibTorch", [](const Scratch& place) { return noted(place, torch, this_host("", "/nonexistent")); }},
      {"another std::string", [](const Scratch& place) { return noted(place, [](sf_build& b) { torch(b), b.flags ^= SF_BUILD_CXX11_ABI; }); }},
      {"checked containers", [](const Scratch& place) { return noted(place, [](sf_build& b) { torch(b), b.flags ^= SF_BUILD_GLIBCXX_DEBUG; }); }},
      {"a sanitizer", [](const Scratch& place) { return noted(place, [](sf_build& b) { torch(b), b.flags ^= SF_BUILD_TSAN; }); }},
      {"another CUDA", [](const Scratch& place) { return noted(place, [](sf_build& b) { torch(b), b.cuda_version = 12040; }); }},
      {"everything at once", [](const Scratch& place) {
         return noted(place, [](sf_build& b) { torch(b), set_field(b.sdk_version, "0.0.9"), set_field(b.torch_variant, "2.10.0+cpu"), b.flags ^= SF_BUILD_ASAN, set_field(b.name, "other"); });
       }},
      {"a lying name", [](const Scratch& place) { return noted(place, [](sf_build& b) { set_field(b.name, "fp8"); }); }},
      {"a lying version", [](const Scratch& place) { return noted(place, [](sf_build& b) { set_field(b.version, "9.9.9"); }); }},
      {"a lying kind", [](const Scratch& place) { return noted(place, [](sf_build& b) { b.kind = SF_KIND_TRANSFORM; }); }},
      {"a misspelt key in the manifest", [](const Scratch& place) { return judged(place, with_text(canary_plugin(), "default = 1\n", "defualt = 1\n")); }},
      {"a manifest that is no TOML", [](const Scratch& place) { return judged(place, with_text(canary_plugin(), "range = [1, 8]\n", "range = [1, 8 \n")); }},
      {"no manifest", [canary](const Scratch& place) { return judged(place, replaced(canary(), std::string("\2\0\0\0sf-plugin", 13), std::string("\7\0\0\0sf-plugin", 13))); }},
      {"linked with NCCL", [](const Scratch&) { return inspect_plugin(bad_plugins() / "fake_own_nccl.so", "test", torch_host()).problems.text(); }},
      {"a library that is not installed", [](const Scratch& place) { return judged(place, with_text(canary_plugin(), "libstdc++.so.6", "libstdc++.so.9")); }},
      {"a plugin in another's place", [](const Scratch&) { return stacked({"backend.sharding=fake_canary"}); }},
      {"a tracker where a writer belongs", [](const Scratch&) { return stacked({"backend.checkpoint=fake_canary"}); }},
      {"a plugin named twice", [](const Scratch&) { return stacked({"backend.trackers=[\"fake_canary\", \"fake_canary\"]"}); }},
      {"two of one kind in --backend", [](const Scratch&) { return stacked({}, "fake_sharding+fake_fsdp1"); }},
      {"an algorithm in --backend", [](const Scratch&) { return stacked({}, "fake_algorithm"); }},
  };
}

// Those that show when the library is open.
std::vector<Refusal> when_opened() {
  return {
      {"a symbol that nobody has", [](const Scratch&) { return opened(bad_plugins() / "fake_missing_symbol.so"); }},
      {"no entry", [](const Scratch& place) { return opened(place.write("x.so", with_text(good_plugins() / "fake_ok.so", "sf_plugin_entry_v1", "sf_plugin_entry_vX"))); }},
      {"replaced after it was judged", [](const Scratch& place) {
         const fs::path path = place.write("fake_sharding.so", read_file(good_plugins() / "fake_sharding.so"));
         const PluginFile file = inspect_plugin(path, "test", torch_host());
         (void)place.write("fake_sharding.so", read_file(good_plugins() / "fake_transform.so"));
         Diagnostics problems;
         (void)open_plugin(file, problems);
         return problems.text();
       }},
      {"a second LibTorch", [](const Scratch&) {
         Diagnostics problems;
         check_copies_in("7f00 r-xp 0 08:01 1 /opt/torch/lib/libc10.so\n7f02 r-xp 0 08:01 2 /opt/other/libc10.so\n", problems);
         return problems.text();
       }},
      {"thrown in create", [](const Scratch&) { return lived({"plugin.fake_ok.fail_in=create"}); }},
      {"thrown in start", [](const Scratch&) { return lived({"plugin.fake_ok.fail_in=start"}); }},
      {"without the interface of its kind", [](const Scratch&) { return lived({"plugin.fake_ok.fail_in=interface"}); }},
      {"an option that its manifest lacks", [](const Scratch&) { return lived({"plugin.fake_ok.fail_in=option"}); }},
      {"an option that it never reads", [](const Scratch&) { return lived({"plugin.fake_ok.unread=true"}); }},
      {"an option without effect", [](const Scratch&) { return lived({"plugin.fake_ok.convert=true"}); }},
  };
}

}  // namespace

TEST_CASE("refusals: every one reads as it did") {
  std::string text;
  for (const auto& list : {unopened(), when_opened()}) {
    for (const Refusal& refusal : list) {
      const Scratch place;
      const std::string told = refusal.make(place);
      CHECK_MESSAGE(told.starts_with("error[plugin/"), refusal.title << " is not refused: " << told);
      text += std::string("# ") + refusal.title + "\n" + place.neutral(told) + "\n";
    }
  }
  // The one refusal that is the other way round in a host with the sanitizer.
#ifdef __SANITIZE_ADDRESS__
  text = replaced(text, "without the address sanitizer, this host with\n", "with the address sanitizer, this host without\n");
#endif
#ifdef __SANITIZE_THREAD__
  text = replaced(text, "without the thread sanitizer, this host with\n", "with the thread sanitizer, this host without\n");
#endif
  const fs::path expected = fs::path(SF_TEST_DATA) / "abi" / "expected" / "refusals.txt";
  if (std::getenv("SF_UPDATE_GOLDEN") != nullptr) {
    fs::create_directories(expected.parent_path());
    atomic_write(expected, text);
  }
  const bool exists = fs::exists(expected);
  CHECK(exists);
  CHECK_MESSAGE((exists && read_file(expected) == text), expected << " is not what the program says now; SF_UPDATE_GOLDEN=1 build/bin/test_refusals updates it:\n" << text);
}

TEST_CASE("refusals: what the file tells is told before any of its code has run") {
  for (const Refusal& refusal : unopened()) {
    const Scratch place;
    (void)refusal.make(place);
    CHECK_MESSAGE(!place.has_run(), refusal.title);
  }
  // That the canary sings when it can.
  const Scratch place;
  Diagnostics problems;
  CHECK(open_plugin(inspect_plugin(place.write("fake_canary.so", read_file(canary_plugin())), "test", torch_host()), problems) != nullptr);
  CHECK(place.has_run());
}

TEST_CASE("refusals: sf-host lists fifty plugins in less than 300 ms and opens none of them") {
  const Scratch place;
  const std::string bytes = read_file(canary_plugin());
  for (int i = 0; i < 50; ++i) {
    const std::string name = "fake_cana" + std::to_string(10 + i);
    (void)place.write(name + ".so", replaced(bytes, "fake_canary", name));
  }
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  constexpr double kLimit = 3;   // a sanitizer makes everything several times slower
#else
  constexpr double kLimit = 0.3;
#endif
  double best = 10;
  for (int round = 0; round < 5 && best >= kLimit; ++round) {   // the machine may be busy with other things
    const Answer answer = run_host("plugins --plugin-path " + place.folder.path.string());
    CHECK(answer.code == 0);
    for (int i = 0; i < 50; ++i) {
      const std::size_t at = answer.out.find("fake_cana" + std::to_string(10 + i) + " ");
      REQUIRE(at != std::string::npos);
      CHECK(answer.out.substr(at, answer.out.find('\n', at) - at).find(" yes ") != std::string::npos);
    }
    best = std::min(best, answer.seconds);
  }
  CHECK_MESSAGE(best < kLimit, best << " s");
  MESSAGE("50 plugins listed in " << best << " s");
  CHECK_FALSE(place.has_run());
}

TEST_CASE("refusals: a run with a refused plugin ends with code 3, and nothing of that plugin has run") {
  const Scratch place;
  (void)place.write("fake_canary.so", with_note(canary_plugin(), [](sf_build& b) { set_field(b.sdk_version, "0.0.9"); }));
  const Answer answer = run_host("plan " + std::string(SF_TEST_DATA) + "/golden/recipes/good.toml --set 'backend.trackers=[\"fake_canary\"]' --plugin-path " +
                                 place.folder.path.string() + " --plugin fake_algorithm=" + (good_plugins() / "fake_algorithm.so").string() +
                                 " --plugin fake_sharding=" + (good_plugins() / "fake_sharding.so").string());
  CHECK_MESSAGE(answer.code == 3, answer.out);
  CHECK(answer.out.find("error[plugin/abi]") != std::string::npos);
  CHECK_FALSE(place.has_run());
}
