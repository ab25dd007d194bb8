#include "core/plugin/stack.hpp"
#include "tests/plugin/fake_files.hpp"

using namespace sf;

namespace {

// The ids of all problems of a plugin file made of these bytes, in order, joined.
std::string ids_of(const fs::path& path, const HostBuild& host = torch_host()) {
  PluginFile file = inspect_plugin(path, "test", host);
  std::string out;
  for (const Diagnostic& diagnostic : file.problems.all()) {
    out += (out.empty() ? "" : " ") + diagnostic.id;
    CHECK_FALSE(diagnostic.message.empty());
  }
  return out;
}

}  // namespace

TEST_CASE("catalog: a good plugin fits and shows its manifest") {
  PluginFile file = inspect_plugin(good_plugins() / "fake_ok.so", "test", torch_host());
  CHECK_MESSAGE(file.fits(), file.problems.text());
  REQUIRE(file.manifest);
  CHECK(file.manifest->provides == std::vector<std::string>{"async-commit"});
  CHECK(file.name() == "fake_ok");
  CHECK(file.describe().find("(version 0.1.0, g++ ") != std::string::npos);
  CHECK(this_host("", "/nonexistent").torch_variant.empty());
}

TEST_CASE("catalog: each way to be wrong has its id") {
  TemporaryFolder folder;
  fs::path x = folder.path / "x.so";
  fs::path good = good_plugins() / "fake_ok.so";
  auto noted = [&](const std::function<void(sf_build&)>& change, const HostBuild& host = torch_host()) {
    write_plugin(x, with_note(good, change));
    return ids_of(x, host);
  };
  auto torch = [](sf_build& b) {
    b.tier = SF_TIER_TORCH_CXX;
    set_field(b.torch_variant, "2.11.0+cu130");
  };
  CHECK(noted([](sf_build&) {}) == "");
  CHECK(noted([](sf_build& b) { set_field(b.sdk_version, "0.0.9"); }) == "plugin/abi");
  CHECK(noted([](sf_build& b) { b.abi_minor = 9; }) == "plugin/abi");
  CHECK(noted([&](sf_build& b) { torch(b); }) == "");
  CHECK(noted([&](sf_build& b) { torch(b), set_field(b.torch_variant, "2.10.0+cu130"); }) ==
        "plugin/torch-version");
  CHECK(noted([&](sf_build& b) { torch(b), set_field(b.torch_variant, "2.11.0+cpu"); }) ==
        "plugin/torch-variant");
  CHECK(noted([&](sf_build& b) { torch(b); }, this_host("", "/nonexistent")) == "plugin/torch-version");
  CHECK(noted([&](sf_build& b) { torch(b), b.flags ^= SF_BUILD_CXX11_ABI; }) == "plugin/cxx-abi");
  CHECK(noted([&](sf_build& b) { torch(b), b.flags ^= SF_BUILD_GLIBCXX_DEBUG; }) == "plugin/debug-stl");
  CHECK(noted([&](sf_build& b) { torch(b), b.flags ^= SF_BUILD_ASAN; }) == "plugin/sanitizer");
  CHECK(noted([&](sf_build& b) { torch(b), b.cuda_version = 12040; }) == "plugin/cuda-major");
  CHECK(noted([&](sf_build& b) { torch(b), b.cuda_version = 13000; }) == "");
  // A plugin that gets no tensors does not care about LibTorch.
  CHECK(noted([](sf_build& b) { set_field(b.torch_variant, "1.0"); }) == "");
  CHECK(noted([](sf_build& b) { set_field(b.name, "other"); }) == "plugin/note-disagrees");
  CHECK(noted([](sf_build& b) { b.kind = SF_KIND_TRACKER; }) == "plugin/note-disagrees");
  CHECK(noted([](sf_build& b) { set_field(b.version, "9"); }) == "plugin/note-disagrees");
  CHECK(noted([](sf_build& b) { b.struct_size = 12; }) == "plugin/no-note");
  // All of them in one go.
  CHECK(noted([&](sf_build& b) {
          torch(b);
          set_field(b.sdk_version, "0.0.9");
          set_field(b.torch_variant, "2.10.0+cpu");
          b.flags ^= SF_BUILD_CXX11_ABI;
          set_field(b.name, "other");
        }) == "plugin/abi plugin/torch-version plugin/cxx-abi plugin/note-disagrees");

  write_plugin(x, with_text(good, "default = 1\n", "defualt = 1\n"));
  CHECK(ids_of(x) == "plugin/bad-manifest plugin/bad-manifest");
  write_plugin(x, with_text(good, "libstdc++.so.6", "libstdc++.so.9"));
  CHECK(ids_of(x) == "plugin/missing-library");
  write_plugin(x, "text");
  CHECK(ids_of(x) == "plugin/not-elf");
  CHECK(ids_of(folder.path / "absent.so") == "plugin/not-readable");
  CHECK(ids_of(bad_plugins() / "fake_no_note.so") == "plugin/no-note");
  CHECK(ids_of(bad_plugins() / "fake_own_nccl.so") == "plugin/own-nccl");
  CHECK(ids_of(bad_plugins() / "fake_missing_symbol.so") == "");  // only opening it will tell
}

TEST_CASE("catalog: a plugin is found by the name in its note, and a missing one is explained") {
  Diagnostics problems;
  Catalog catalog({.flag_folders = {good_plugins(), bad_plugins()},
                   .environment = "",
                   .built_in = {},
                   .allowed_unsafe = {}},
                  {}, torch_host(), problems);
  REQUIRE_MESSAGE(!problems.has_errors(), problems.text());
  CHECK(catalog.files().size() == 10);
  const PluginFile* found = catalog.find("fake_ok", {}, problems);
  REQUIRE(found != nullptr);
  CHECK(found->path == good_plugins() / "fake_ok.so");

  Diagnostics missing;
  CHECK(catalog.find("fake_kk", {"r.toml", 3, 1}, missing) == nullptr);
  std::string text = missing.text();
  CHECK(text.find("error[plugin/not-found] r.toml:3:1: no plugin \"fake_kk\"\n  did you mean \"fake_ok\"?") ==
        0);
  CHECK(text.find("skipped fake_no_note.so: plugin/no-note") != std::string::npos);

  Diagnostics refused;
  CHECK(catalog.find("fake_no_note", {}, refused) == nullptr);
  CHECK(refused.contains("plugin/no-note"));
  Diagnostics path;
  CHECK(catalog.find("../fake_ok", {}, path) == nullptr);
  CHECK(path.contains("plugin/bad-name"));
}

TEST_CASE("catalog: two files of one name are refused until one is named") {
  TemporaryFolder folder;
  write_plugin(folder.path / "copy.so", with_note(good_plugins() / "fake_ok.so", [](sf_build&) {}));
  SearchRequest request{
      .flag_folders = {good_plugins(), folder.path}, .environment = "", .built_in = {}, .allowed_unsafe = {}};
  Diagnostics problems;
  Catalog two(request, {}, torch_host(), problems);
  CHECK(two.find("fake_ok", {}, problems) == nullptr);
  CHECK(problems.contains("plugin/duplicate"));
  CHECK(problems.text().find("copy.so") != std::string::npos);

  Diagnostics fine;
  Catalog named(request, {"fake_ok=" + (folder.path / "copy.so").string()}, torch_host(), fine);
  const PluginFile* found = named.find("fake_ok", {}, fine);
  REQUIRE_MESSAGE(found != nullptr, fine.text());
  CHECK(found->path == folder.path / "copy.so");

  Diagnostics bad;
  Catalog wrong(request, {"fake_ok=copy.so", "other=" + (folder.path / "copy.so").string()}, torch_host(),
                bad);
  CHECK(bad.error_count() == 2);
  CHECK(bad.contains("plugin/bad-flag"));
}

TEST_CASE("catalog: a file that others can write is not opened") {
  TemporaryFolder folder;
  write_plugin(folder.path / "fake_ok.so", read_file(good_plugins() / "fake_ok.so"));
  fs::permissions(folder.path / "fake_ok.so", fs::perms(0777));
  Diagnostics problems;
  Catalog catalog({.flag_folders = {folder.path}, .environment = "", .built_in = {}, .allowed_unsafe = {}},
                  {}, torch_host(), problems);
  CHECK(catalog.find("fake_ok", {}, problems) == nullptr);
  CHECK(problems.contains("plugin/unsafe-path"));
}

TEST_CASE("stack: plugins go to their slots, a plugin in a wrong one is told the right one") {
  Diagnostics problems;
  Catalog catalog({.flag_folders = {good_plugins()}, .environment = "", .built_in = {}, .allowed_unsafe = {}},
                  {}, torch_host(), problems);
  RawValues raw;
  apply_overrides({"algorithm.name=fake_algorithm"}, raw, problems);
  apply_backend_flag("fake_sharding+fake_transform+fake_ok", catalog, raw, problems);
  Stack stack = pick_stack(raw, catalog, problems);
  REQUIRE_MESSAGE(!problems.has_errors(), problems.text());
  REQUIRE(stack.members.size() == 4);
  CHECK(stack.members[0].slot == "algorithm");
  CHECK(stack.members[1].name == "fake_transform");
  CHECK(stack.members[2].name == "fake_sharding");
  CHECK(stack.members[3].name == "fake_ok");
  CHECK(stack.provided() == std::set<std::string>{"async-commit", "fp8-linear", "recordable-blocks", "stable-parameters"});

  Diagnostics wrong;
  RawValues swapped;
  apply_overrides({"algorithm.name=fake_algorithm", "backend.sharding=fake_transform",
                   "backend.transforms=[\"fake_transform\", \"fake_transform\"]"},
                  swapped, wrong);
  Stack bad = pick_stack(swapped, catalog, wrong);
  CHECK_FALSE(bad.is_complete);
  CHECK(wrong.text().find(
            "error[plugin/wrong-kind] --set backend.sharding=fake_transform: backend.sharding names "
            "\"fake_transform\", which is of kind "
            "transform, expected sharding\n  fix:  write backend.transforms = [\"fake_transform\"]") !=
        std::string::npos);
  CHECK(wrong.contains("plugin/twice"));

  Diagnostics flag;
  apply_backend_flag("fake_sharding+fake_sharding+fake_algorithm+nothing", catalog, raw, flag);
  CHECK(flag.error_count() == 3);
  CHECK(flag.contains("plugin/backend-slot"));
  CHECK(flag.contains("plugin/not-found"));
}
