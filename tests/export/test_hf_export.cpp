#include "core/base/error.hpp"
#include "core/base/file.hpp"
#include "core/export/hf_export.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <limits>

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

namespace sf {
namespace {

namespace fs = std::filesystem;

// A draft of two tensors, what an engine wants of it, and a place to export to.
struct TinyDraft {
  std::vector<uint16_t> fc = {0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0};  // 1 .. 6
  std::vector<uint16_t> norm = {0x3f80, 0x3f80};
  fs::path place;
  HfExport request;

  TinyDraft() {
    std::string pattern = (fs::temp_directory_path() / "sf-export-XXXXXX").string();
    REQUIRE(mkdtemp(pattern.data()) != nullptr);
    place = pattern;
    request.folder = place / "draft";
    request.contract = {
        .tensors = {{.name = "fc.weight", .shape = {2, 3}}, {.name = "norm.weight", .shape = {2}}},
        .config_keys = {"architectures", "hidden_size", "dflash_config.mask_token_id"}};
    request.config =
        Json::parse(R"({"architectures": ["DFlash2DraftModel"], "hidden_size": 2, "dtype": "bfloat16",
                                     "dflash_config": {"mask_token_id": 16, "target_layer_ids": [1, 2]}})");
    request.tensors = {{.name = "fc.weight", .shape = {2, 3}, .data = fc.data(), .bytes = 12},
                       {.name = "norm.weight", .shape = {2}, .data = norm.data(), .bytes = 4}};
    request.origin = Json::object({{"step", 40}});
  }
  ~TinyDraft() {
    std::error_code ignored;
    fs::remove_all(place, ignored);
  }

  [[nodiscard]] std::vector<std::string> problems() const {
    return contract_problems(request.contract, request.config, request.tensors, request.dtype);
  }
  // Code, what and hint of the Error that writing throws.
  [[nodiscard]] std::pair<ExitCode, std::string> error() const {
    try {
      write_hf_export(request);
    } catch (const Error& thrown) {
      return {thrown.code(), std::string(thrown.what()) + "\n" + thrown.hint()};
    }
    return {ExitCode::kOk, ""};
  }
  [[nodiscard]] std::vector<std::string> names() const {
    std::vector<std::string> out;
    for (const auto& entry : fs::directory_iterator(place)) {
      out.push_back(entry.path().filename().string());
    }
    std::sort(out.begin(), out.end());
    return out;
  }
};

TEST_CASE("export: config, weights and record are written, and the bytes are the tensors'") {
  TinyDraft draft;
  write_hf_export(draft.request);
  CHECK(draft.names() == std::vector<std::string>{"draft"});
  const fs::path folder = draft.request.folder;
  CHECK(Json::parse(read_file(folder / "config.json")) == draft.request.config);
  const std::string weights = read_file(folder / "model.safetensors");
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, weights.data(), 8);
  const Json header = Json::parse(std::string_view(weights).substr(8, header_bytes));
  CHECK(header.at("__metadata__").at("format").as_string() == "pt");  // transformers and engines ask for it
  const Json& fc = header.at("fc.weight");
  CHECK(fc.at("dtype").as_string() == "BF16");
  CHECK(fc.at("shape") == Json::array_of(std::vector<int64_t>{2, 3}));
  const auto begin = static_cast<size_t>(fc.at("data_offsets").at(size_t{0}).as_int());
  CHECK(std::memcmp(weights.data() + 8 + header_bytes + begin, draft.fc.data(), 12) == 0);
  const Json record = Json::parse(read_file(folder / "export.json"));
  CHECK(record.at("origin").at("step").as_int() == 40);
  CHECK(record.at("files").at("model.safetensors").as_string() == sha256_file(folder / "model.safetensors"));
  CHECK(record.at("files").at("config.json").as_string() == sha256_file(folder / "config.json"));
}

TEST_CASE("export: whatever an engine would misread is a problem with its name") {
  struct Case {
    const char* name;
    void (*spoil)(TinyDraft&);
    const char* expected;
  };
  const Case cases[] = {
      {"key missing", [](TinyDraft& d) { d.request.config.remove("hidden_size"); },
       "\"hidden_size\" is missing"},
      {"nested key missing",
       [](TinyDraft& d) { d.request.config.find("dflash_config")->remove("mask_token_id"); },
       "\"dflash_config.mask_token_id\" is missing"},
      {"key null", [](TinyDraft& d) { d.request.config.set("hidden_size", nullptr); },
       "\"hidden_size\" is null"},
      {"nested key in no object", [](TinyDraft& d) { d.request.config.set("dflash_config", 3); },
       "\"dflash_config.mask_token_id\" is missing"},
      {"dtype of config", [](TinyDraft& d) { d.request.config.set("dtype", "float32"); },
       "\"dtype\" is \"float32\", and the tensors are bfloat16"},
      {"old spelling of dtype", [](TinyDraft& d) { d.request.config.set("torch_dtype", "float16"); },
       "\"torch_dtype\" is \"float16\""},
      {"tensor missing", [](TinyDraft& d) { d.request.tensors.pop_back(); },
       "\"norm.weight\" [2] is missing"},
      {"tensor surplus", [](TinyDraft& d) { d.request.contract.tensors.pop_back(); },
       "\"norm.weight\" [2] is not one that the engine knows"},
      {"tensor twice", [](TinyDraft& d) { d.request.tensors.push_back(d.request.tensors[0]); },
       "is there twice"},
      {"transposed",
       [](TinyDraft& d) {
         d.request.tensors[0].shape = {3, 2};
       },
       "has shape [3, 2], expected [2, 3]"},
      {"dtype of a tensor", [](TinyDraft& d) { d.request.tensors[1].dtype = "F16"; },
       "\"norm.weight\" is F16, expected BF16"},
      {"infinite", [](TinyDraft& d) { d.fc[4] = 0x7f80; }, "\"fc.weight\" is not finite at element 4"},
      {"not a number", [](TinyDraft& d) { d.norm[0] = 0xffc1; },
       "\"norm.weight\" is not finite at element 0"},
  };
  CHECK(TinyDraft().problems().empty());
  for (const Case& one : cases) {
    CAPTURE(one.name);
    TinyDraft draft;
    one.spoil(draft);
    const std::vector<std::string> problems = draft.problems();
    REQUIRE(problems.size() == 1);
    CHECK_MESSAGE(problems[0].find(one.expected) != std::string::npos, problems[0]);
    CHECK(draft.error().first == ExitCode::kInternal);
    CHECK(draft.names().empty());  // nothing was written
  }
}

TEST_CASE("export: float32 is checked as float32") {
  TinyDraft draft;
  std::vector<float> fc = {1, 2, 3, 4, 5, std::numeric_limits<float>::infinity()}, norm = {1, 1};
  draft.request.dtype = "F32";
  draft.request.config.set("dtype", "float32");
  draft.request.tensors = {
      {.name = "fc.weight", .dtype = "F32", .shape = {2, 3}, .data = fc.data(), .bytes = 24},
      {.name = "norm.weight", .dtype = "F32", .shape = {2}, .data = norm.data(), .bytes = 8}};
  REQUIRE(draft.problems().size() == 1);
  CHECK(draft.problems()[0].find("not finite at element 5") != std::string::npos);
  fc[5] = 6;
  CHECK(draft.error().second.empty());
}

TEST_CASE("export: all conflicts come in one message") {
  TinyDraft draft;
  draft.request.config.remove("hidden_size");
  draft.request.tensors.pop_back();
  const std::string message = draft.error().second;
  CHECK(message.find("2 conflicts") != std::string::npos);
  CHECK(message.find("hidden_size") != std::string::npos);
  CHECK(message.find("norm.weight") != std::string::npos);
}

TEST_CASE("export: an earlier export is replaced, an empty folder is filled, anything else is left alone") {
  TinyDraft draft;
  fs::create_directory(draft.request.folder);
  write_hf_export(draft.request);
  draft.request.config.set("hidden_size", 3);
  draft.request.folder = draft.place / "draft/";
  write_hf_export(draft.request);
  CHECK(Json::parse(read_file(draft.request.folder / "config.json")).at("hidden_size").as_int() == 3);
  CHECK(draft.names() == std::vector<std::string>{"draft"});

  draft.request.folder = draft.place / "thesis";
  fs::create_directory(draft.request.folder);
  atomic_write(draft.request.folder / "chapter1.txt", "mine");
  CHECK(draft.error().first == ExitCode::kUsage);
  CHECK(read_file(draft.request.folder / "chapter1.txt") == "mine");
  draft.request.folder = draft.place / "thesis/chapter1.txt";
  CHECK(draft.error().first == ExitCode::kUsage);
  CHECK(draft.names() == std::vector<std::string>{"draft", "thesis"});
}

TEST_CASE("export: what somebody has put beside an export is not taken away with it") {
  TinyDraft draft;
  write_hf_export(draft.request);
  draft.request.config.set("hidden_size", 3);
  const fs::path folder = draft.request.folder;
  atomic_write(folder / "README.md", "mine");
  fs::create_directory(folder / ".git");
  const auto [code, text] = draft.error();
  CHECK(code == ExitCode::kUsage);
  CHECK_MESSAGE(text.find("holds an earlier export and, besides, .git, README.md") != std::string::npos, text);
  CHECK(read_file(folder / "README.md") == "mine");
  CHECK(Json::parse(read_file(folder / "config.json")).at("hidden_size").as_int() == 2);
  fs::remove(folder / "README.md");
  fs::remove(folder / ".git");
  CHECK(draft.error().second.empty());
  CHECK(Json::parse(read_file(folder / "config.json")).at("hidden_size").as_int() == 3);
}

TEST_CASE("export: a full disk leaves the earlier export as it was and nothing half") {
  TinyDraft draft;
  write_hf_export(draft.request);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{.rlim_cur = 100,
                       .rlim_max = 100};  // stands for the disk: fails within model.safetensors
    setrlimit(RLIMIT_FSIZE, &limit);
    const auto [code, message] = draft.error();
    _exit(code == ExitCode::kCheckpoint && message.find("model.safetensors") != std::string::npos ? 0 : 1);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 0));
  CHECK(draft.names() == std::vector<std::string>{"draft"});
  const Json record = Json::parse(read_file(draft.request.folder / "export.json"));
  CHECK(record.at("files").at("model.safetensors").as_string() ==
        sha256_file(draft.request.folder / "model.safetensors"));
}

TEST_CASE("export: a place that can't be written to is no full disk") {
  TinyDraft draft;
  draft.request.folder = "/proc/sf-export/draft";
  const auto [code, text] = draft.error();
  CHECK(code == ExitCode::kCheckpoint);
  CHECK(text.find("may write to") != std::string::npos);
  CHECK(text.find("free some space") == std::string::npos);
}

}  // namespace
}  // namespace sf
