// Opening, creating, starting and closing real libraries.
#include <memory>

#include "core/base/log.hpp"
#include "core/plugin/loader.hpp"
#include "core/plugin/registry.hpp"
#include "tests/plugin/fake_files.hpp"

using namespace sf;

namespace {

PlanValues values_of(const Manifest& manifest, const std::vector<std::string>& sets) {
  Diagnostics problems;
  Schema schema;
  schema.add(manifest, problems);
  RawValues raw;
  apply_overrides(sets, raw, problems);
  PlanValues values = schema.resolve(raw, {}, false, problems);
  REQUIRE_MESSAGE(!problems.has_errors(), problems.text());
  return values;
}

// A registry with fake_ok opened, and the log lines of its life.
struct Life {
  PluginRegistry registry;
  Diagnostics problems;
  std::vector<std::string> lines;
  int service = 1;

  explicit Life(const std::vector<std::string>& sets) {
    redirect_log([this](Level, std::string_view line) { lines.emplace_back(line); });
    PluginFile file = inspect_plugin(good_plugins() / "fake_ok.so", "test", torch_host());
    const sf_plugin* entry = open_plugin(file, problems);
    REQUIRE_MESSAGE(entry != nullptr, problems.text());
    HostServices services{.find = [this](std::string_view id) -> const void* {
                            return id == "test.service/1" ? &service : nullptr;
                          },
                          .stop_requested = {}};
    registry.add(
        {.name = "fake_ok",
         .version = "0.1.0",
         .sha256 = "",
         .kind = SF_KIND_CHECKPOINT,
         .plugin = entry,
         .host = std::make_unique<HostTable>("fake_ok", services),
         .options = std::make_unique<BackendOptions>(*file.manifest, values_of(*file.manifest, sets))});
  }
  ~Life() {
    registry.close();
    redirect_log({});
  }
};

}  // namespace

TEST_CASE("life: a plugin reads its options, finds a service, and sees create, start and stop in order") {
  Life life({"plugin.fake_ok.threads=3", "plugin.fake_ok.label=\"hello\"", "plugin.fake_ok.lengths=[7, 8]"});
  REQUIRE_MESSAGE(life.registry.create(life.problems), life.problems.text());
  REQUIRE(life.registry.start(life.problems));
  life.registry.check_claims(life.problems);
  life.registry.check_effects(life.problems);
  CHECK_MESSAGE(life.problems.all().empty(), life.problems.text());
  life.registry.close();
  life.registry.close();  // once is enough, twice is harmless
  CHECK(life.lines ==
        std::vector<std::string>{"fake_ok: created",
                                 "fake_ok: create threads=3 label=hello lengths= 7 8 service, start, stop"});
}

TEST_CASE("life: a plugin's lines begin with its name; debug and error lines end with the place in its source") {
  std::vector<std::string> lines;
  redirect_log([&](Level, std::string_view line) { lines.emplace_back(line); });
  set_log_level(Level::kDebug);
  const HostTable table("acme_draft", {});
  for (const std::int32_t level : {SF_LOG_DEBUG + 0, SF_LOG_INFO + 0, SF_LOG_WARN + 0, SF_LOG_ERROR + 0, 99}) {
    table.table()->log(table.table()->ctx, nullptr, level, "/home/a/src/plugin.cpp", 12, "three heads");
  }
  set_log_level(Level::kInfo);
  redirect_log({});
  const std::string plain = "acme_draft: three heads", placed = plain + " (plugin.cpp:12)";
  CHECK(lines == std::vector<std::string>{placed, plain, plain, placed, placed});
}

TEST_CASE("life: what is thrown in create becomes an error with the plugin's name and hint") {
  Life life({"plugin.fake_ok.fail_in=create"});
  CHECK_FALSE(life.registry.create(life.problems));
  CHECK(life.problems.text() ==
        "error[plugin/create-failed] plugin \"fake_ok\" can't be created: told to fail in create\n  fix:  "
        "set plugin.fake_ok.fail_in = \"nothing\"\n");
}

TEST_CASE("life: after a failed start the plugin is stopped and destroyed") {
  Life life({"plugin.fake_ok.fail_in=start"});
  REQUIRE(life.registry.create(life.problems));
  CHECK_FALSE(life.registry.start(life.problems));
  CHECK(life.problems.contains("plugin/start-failed"));
  life.registry.close();
  CHECK(life.lines.back().find("start, stop") != std::string::npos);
}

TEST_CASE("life: a failing stop is logged and does not keep the others from stopping") {
  Life life({"plugin.fake_ok.fail_in=stop"});
  REQUIRE(life.registry.create(life.problems));
  REQUIRE(life.registry.start(life.problems));
  life.registry.close();
  CHECK(life.lines.back() == "plugin 'fake_ok' failed to stop: told to fail in stop");
  CHECK(life.registry.entries()[0].instance == nullptr);
}

TEST_CASE(
    "life: a plugin without the interface of its kind, or that asks for an option it does not have, is "
    "refused") {
  Life interface({"plugin.fake_ok.fail_in=interface"});
  CHECK_FALSE(interface.registry.create(interface.problems));
  CHECK(interface.problems.contains("plugin/no-interface"));
  interface.registry.close();
  Life option({"plugin.fake_ok.fail_in=option"});
  CHECK_FALSE(option.registry.create(option.problems));
  CHECK(option.problems.text().find("reads option \"no_such_option\" as bool") != std::string::npos);
}

TEST_CASE("life: an option that was set and never read, or had no effect, is an error; a default is not") {
  Life life({"plugin.fake_ok.unread=true", "plugin.fake_ok.convert=true"});
  REQUIRE(life.registry.create(life.problems));
  life.registry.check_claims(life.problems);
  life.registry.check_effects(life.problems);
  CHECK(life.problems.error_count() == 2);
  CHECK(life.problems.contains("plugin/option-unclaimed"));
  CHECK(life.problems.contains("plugin/option-no-effect"));
}

TEST_CASE("loader: a missing symbol is told when opening, with the linker's own words") {
  Diagnostics problems;
  CHECK(open_plugin(inspect_plugin(bad_plugins() / "fake_missing_symbol.so", "test", torch_host()),
                    problems) == nullptr);
  REQUIRE(problems.contains("plugin/open-failed"));
  std::string text = problems.text();
  CHECK(text.find("undefined symbol: sf_test_function_that_no_library_has\n") != std::string::npos);
  CHECK(text.find("Bad file descriptor") == std::string::npos);
}

TEST_CASE("loader: a library without the entry, and one that was replaced after it was judged, are refused") {
  TemporaryFolder folder;
  write_plugin(folder.path / "no_entry.so",
               with_text(good_plugins() / "fake_ok.so", "sf_plugin_entry_v1", "sf_plugin_entry_vX"));
  Diagnostics entry;
  CHECK(open_plugin(inspect_plugin(folder.path / "no_entry.so", "test", torch_host()), entry) == nullptr);
  CHECK(entry.contains("plugin/no-entry"));

  write_plugin(folder.path / "replaced.so", read_file(good_plugins() / "fake_sharding.so"));
  PluginFile file = inspect_plugin(folder.path / "replaced.so", "test", torch_host());
  write_plugin(folder.path / "replaced.so", read_file(good_plugins() / "fake_transform.so"));
  Diagnostics replaced;
  CHECK(open_plugin(file, replaced) == nullptr);
  CHECK(replaced.contains("plugin/entry-disagrees"));
}

TEST_CASE("loader: two copies of one LibTorch in a process are noticed") {
  Diagnostics problems;
  check_copies_in(
      "7f00 r-xp 0 08:01 1 /opt/torch/lib/libc10.so\n7f01 r--p 0 08:01 1 /opt/torch/lib/libc10.so\n7f02 r-xp "
      "0 08:01 2 /opt/other/libc10.so\n"
      "7f03 r-xp 0 08:01 3 /opt/torch/lib/libc10_cuda.so\n7f04 rw-p 0 00:00 0 [heap]\n",
      problems);
  REQUIRE(problems.error_count() == 1);
  CHECK(problems.all()[0].id == "plugin/second-copy");
  CHECK(problems.all()[0].message.find("/opt/other/libc10.so and /opt/torch/lib/libc10.so") !=
        std::string::npos);
  Diagnostics here;
  check_copies(here);
  CHECK_FALSE(here.has_errors());
}

TEST_CASE("options: a claim needs the right name and the right type") {
  Diagnostics problems;
  auto manifest = parse_manifest(
      "[plugin]\nname = \"x\"\nversion = \"1\"\nkind = \"tracker\"\nsummary = \"s\"\n[options.rate]\ntype = "
      "\"float\"\ndefault = 0.5\nhelp = \"x\"\n"
      "[options.wait]\ntype = \"duration\"\ndefault = \"90s\"\nhelp = \"x\"\n[options.names]\ntype = "
      "\"strings\"\ndefault = [\"a\", \"b\"]\nhelp = \"x\"\n",
      "x", problems);
  REQUIRE_MESSAGE(manifest, problems.text());
  BackendOptions options(*manifest, values_of(*manifest, {}));
  const sf_options* table = options.table();
  double real = 0;
  std::int64_t integer = 0;
  CHECK(table->get_int(table->ctx, "rate", &integer) == SF_INTERNAL);
  CHECK_FALSE(options.is_claimed("rate"));
  CHECK(table->get_float(table->ctx, "rate", &real) == SF_OK);
  CHECK(real == 0.5);
  CHECK(options.is_claimed("rate"));
  CHECK(table->get_float(table->ctx, "wait", &real) == SF_OK);
  CHECK(real == 90);
  const sf_list* list = nullptr;
  CHECK(table->get_list(table->ctx, "rate", &list) == SF_INTERNAL);
  REQUIRE(table->get_list(table->ctx, "names", &list) == SF_OK);
  CHECK(list->count == 2);
  CHECK(std::string(list->strings[1]) == "b");
  CHECK(table->get_list(table->ctx, "nothing", &list) == SF_INTERNAL);
  CHECK(options.misread() == std::vector<std::string>{"rate", "rate", "nothing"});
  CHECK(options.effect("rate") == -1);
  CHECK(table->report_effect(table->ctx, "rate", 2) == SF_OK);
  CHECK(table->report_effect(table->ctx, "rate", 3) == SF_OK);
  CHECK(options.effect("rate") == 5);
  CHECK(table->report_effect(table->ctx, "rate", -1) == SF_INTERNAL);
}

TEST_CASE("options: an option of the host that a plugin claims is read under its own key, with claim and effect") {
  Diagnostics problems;
  auto manifest = parse_manifest(
      "[plugin]\nname = \"x\"\nversion = \"1\"\nkind = \"sharding\"\nsummary = \"s\"\nclaims = [\"training.shard_frozen_tables\"]\n", "x",
      problems);
  REQUIRE_MESSAGE(manifest, problems.text());
  Schema schema;
  schema.add(host_manifest(), problems);
  schema.add(*manifest, problems);
  RawValues raw;
  apply_overrides({"model.target_model_path=t", "algorithm.name=a", "training.shard_frozen_tables=true"}, raw, problems);
  BackendOptions options(*manifest, schema.resolve(raw, {}, false, problems));
  REQUIRE_MESSAGE(!problems.has_errors(), problems.text());
  const sf_options* table = options.table();
  options.check_claims(problems);
  CHECK(problems.contains("plugin/option-unclaimed"));
  std::int32_t value = 0;
  CHECK(table->get_bool(table->ctx, "training.shard_frozen_tables", &value) == SF_OK);
  CHECK(value == 1);
  CHECK(table->get_bool(table->ctx, "training.static_shapes", &value) == SF_INTERNAL);  // the host's own affair
  Diagnostics after;
  options.check_claims(after);
  CHECK(table->report_effect(table->ctx, "training.shard_frozen_tables", 0) == SF_OK);
  CHECK_FALSE(after.has_errors());
  options.check_effects(after);
  CHECK(options.in_effect().empty());
  REQUIRE(after.error_count() == 1);
  CHECK(after.all()[0].message == "training.shard_frozen_tables was asked for, but nothing in this model is changed by it");
  CHECK(table->report_effect(table->ctx, "training.shard_frozen_tables", 2) == SF_OK);
  CHECK(options.in_effect() == std::vector<std::string>{"training.shard_frozen_tables = true (2)"});
}

TEST_CASE("options: one that a recipe spells out with its default asks for nothing, so no effect is missed") {
  Life life({"plugin.fake_ok.convert=false"});
  REQUIRE(life.registry.create(life.problems));
  const sf_options* table = life.registry.entries()[0].options->table();
  CHECK(table->report_effect(table->ctx, "convert", 0) == SF_OK);
  life.registry.check_effects(life.problems);
  CHECK_MESSAGE(!life.problems.has_errors(), life.problems.text());
}
