// The child process: it lives and dies with us, and what it can't do is said.
#include <doctest/doctest.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "core/base/error.hpp"
#include "core/prepare/text_worker.hpp"

#include <sys/wait.h>
#include <unistd.h>

using namespace sf;
namespace fs = std::filesystem;

namespace {

struct Variable {
  Variable(const char* which, const char* value) : name(which) { ::setenv(name, value, 1); }
  ~Variable() { ::unsetenv(name); }
  const char* name;
};

struct Script {
  explicit Script(const std::string& text) : path(fs::temp_directory_path() / ("sf-worker-" + std::to_string(::getpid()) + ".py")) { std::ofstream(path) << text; }
  ~Script() { fs::remove(path); }
  fs::path path;
};

std::string refusal(const fs::path& script) {
  try {
    const TextWorker worker({.script = script, .target = "/nowhere"});
  } catch (const Error& error) {
    return std::string(error.what()) + " | " + error.hint();
  }
  return "";
}

bool is_alive(pid_t id) {
  std::ifstream status("/proc/" + std::to_string(id) + "/stat");
  std::string pid, name, state;
  return static_cast<bool>(status >> pid >> name >> state) && state != "Z";
}

}  // namespace

TEST_CASE("child process: lines go in and out, and it ends with its object") {
  pid_t id = 0;
  {
    ChildProcess cat({"cat"}, {});
    id = cat.id();
    REQUIRE(cat.write("one\ntwo\n" + std::string(30000, 'x') + "\n"));
    std::string line;
    REQUIRE(cat.read_line(line));
    CHECK(line == "one");
    REQUIRE(cat.read_line(line));
    CHECK(line == "two");
    REQUIRE(cat.read_line(line));
    CHECK(line.size() == 30000);
    CHECK(is_alive(id));
  }
  CHECK_FALSE(is_alive(id));
}

TEST_CASE("child process: it is killed when its parent is killed") {
  int tell[2];
  REQUIRE(::pipe(tell) == 0);
  const pid_t parent = ::fork();
  if (parent == 0) {
    ChildProcess sleeper({"sleep", "60"}, {});
    const pid_t id = sleeper.id();
    (void)!::write(tell[1], &id, sizeof(id));
    ::raise(SIGKILL);
  }
  pid_t id = 0;
  REQUIRE(::read(tell[0], &id, sizeof(id)) == sizeof(id));
  ::waitpid(parent, nullptr, 0);
  for (int i = 0; i < 100 && is_alive(id); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK_FALSE(is_alive(id));
}

TEST_CASE("child process: how it ended is told") {
  std::string line;
  ChildProcess none({"sf-no-such-program"}, {});
  CHECK_FALSE(none.read_line(line));
  CHECK(none.how_it_ended() == "exit code 127");
  ChildProcess killed({"sh", "-c", "kill -9 $$"}, {});
  CHECK_FALSE(killed.read_line(line));
  CHECK(killed.how_it_ended().starts_with("signal 9"));
}

TEST_CASE("child process: while it is waited for, the watch is asked, and what it throws comes out; processor time is told") {
  ChildProcess busy({"sh", "-c", "while :; do :; done"}, {});
  int asked = 0;
  busy.set_watch([&] {
    ++asked;
    if (busy.processor_seconds() > 0.3) throw Stopped();
  });
  std::string line;
  CHECK_THROWS_AS((void)busy.read_line(line), Stopped);
  CHECK(asked > 1);
  // One that reads nothing: no write waits for it for ever.
  ChildProcess deaf({"sleep", "60"}, {});
  deaf.set_watch([] { throw Stopped(); });
  CHECK_THROWS_AS((void)deaf.write(std::string(8 << 20, 'x')), Stopped);
  CHECK(deaf.processor_seconds() < 1);
  (void)deaf.id();
}

namespace {

// A worker of few words: a line that says "forever" is never answered.
const char* const kStubborn = R"(import json, os, sys
say = lambda one: (sys.stdout.write(json.dumps(one) + "\n"), sys.stdout.flush())
first = json.loads(sys.stdin.readline())
say({"reading": "the chat template"})
while first["template_path"] == "forever": pass
say({"ready": {}})
while True:
    count = json.loads(sys.stdin.readline())["count"]
    lines = [sys.stdin.readline().strip() for _ in range(count)]
    for line in lines:
        while line == "forever": pass
        if line == "long":
            for i in range(4000000): pass
        say({"skip": line, "why": ""})
)";

}  // namespace

TEST_CASE("text worker: a line that is never answered is found among its neighbours, and a template that does not end is no template") {
  const Script stubborn(kStubborn);
  TextWorkerSettings settings{.script = stubborn.path, .target = "/nowhere", .seconds = 0.4};
  const auto index_of = [&](const std::vector<std::string_view>& lines) -> int64_t {
    try {
      (void)TextWorker(settings).rows(lines);
    } catch (const SlowLine& slow) {
      return static_cast<int64_t>(slow.index);
    }
    return -1;
  };
  CHECK(index_of({"one", "two", "forever", "four"}) == 2);
  CHECK(index_of({"forever"}) == 0);
  // Many that take their time together are no fault of any.
  const std::vector<TextRow> rows = TextWorker(settings).rows({"long", "one", "long", "long", "long", "long", "long", "long", "two"});
  REQUIRE(rows.size() == 9);
  CHECK(rows[1].said.at("skip").as_string() == "one");
  CHECK(rows[8].said.at("skip").as_string() == "two");

  settings.template_path = "forever";
  CHECK_THROWS_WITH_AS((void)TextWorker(settings), doctest::Contains("the chat template is still at work on a conversation of few words after 0.4 s"), Error);
  settings.seconds = 1000;
  int asked = 0;
  settings.stop_requested = [&] { return ++asked > 2; };
  CHECK_THROWS_AS((void)TextWorker(settings), Stopped);
  const Variable wrong("SF_TEXT_SECONDS", "soon");
  CHECK_THROWS_WITH_AS((void)TextWorker({.script = stubborn.path}), doctest::Contains("SF_TEXT_SECONDS is \"soon\""), Error);
}

TEST_CASE("text worker: no Python, no packages and a worker that dies are told with what to do") {
  const fs::path script = fs::path(SF_TEST_DATA).parent_path() / "core/prepare/text_worker.py";
  {
    const Variable python("SF_PYTHON", "/no/such/python");
    const std::string text = refusal(script);
    CHECK(text.find("there is no Python: \"/no/such/python\"") != std::string::npos);
    CHECK(text.find("input_ids and loss_mask") != std::string::npos);
  }
  {
    const Script bare("import sys\nsys.meta_path.insert(0, type('No', (), {'find_spec': staticmethod(lambda name, *_: (_ for _ in ()).throw(ImportError('no ' + name)) if "
                      "name in ('jinja2', 'tokenizers') else None)})())\nexec(open('" + script.string() + "').read())\n");
    const std::string text = refusal(bare.path);
    CHECK(text.find("can't import what prepare needs") != std::string::npos);
    CHECK(text.find("tools/setup") != std::string::npos);
  }
  {
    const Script dying("import os\nos.kill(os.getpid(), 9)\n");
    CHECK(refusal(dying.path).find("ended with signal 9") != std::string::npos);
  }
  CHECK(refusal("/no/such/script.py").find("this installation lacks") != std::string::npos);
}
