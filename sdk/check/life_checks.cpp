// The life of a plugin, whatever its kind: open, create, start, stop, destroy.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <thread>

#include "core/base/error.hpp"
#include "core/base/log.hpp"
#include "core/base/text.hpp"
#include "core/plugin/registry.hpp"
#include "sdk/check/check.hpp"
#include "sdk/testing/lone_plugin.hpp"

namespace sf::check {
namespace {

using sf::testing::LonePlugin;

LonePlugin made(const Candidate& subject) { return {subject.file, subject.entry, subject.values(), subject.services}; }

std::int64_t thread_count() {
  std::int64_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    ++count;
  }
  return count;
}

Outcome same_entry(const Candidate& subject) {
  // The library is open: asking again must give the same data, and so must a copy taken before.
  const void* const entry = subject.entry;
  std::array<std::byte, sizeof(sf_plugin)> before{};
  std::memcpy(before.data(), entry, before.size());
  LonePlugin plugin = made(subject);
  plugin.require(plugin.create(), "create");
  plugin.destroy();
  return std::memcmp(before.data(), entry, before.size()) == 0 ? passed() : failed("what the entry returned has changed");
}

Outcome create_alone(const Candidate& subject) {
  LonePlugin plugin = made(subject);
  plugin.require(plugin.create(), "create");
  plugin.destroy();
  return passed();
}

Outcome whole_life(const Candidate& subject) {
  LonePlugin plugin = made(subject);
  plugin.require(plugin.create(), "create");
  plugin.require(plugin.start(), "start");
  plugin.require(plugin.stop(), "stop");
  plugin.destroy();
  return passed();
}

Outcome stop_after_failed_start(const Candidate& subject) {
  LonePlugin plugin = made(subject);
  plugin.require(plugin.create(), "create");
  const std::int32_t code = plugin.stop();   // as when its start has failed at once
  plugin.destroy();
  return code == SF_OK || plugin.status().what[0] != 0 ? passed() : failed(format("stop returned code {} without a text", code));
}

Outcome interfaces(const Candidate& subject) {
  LonePlugin plugin = made(subject);
  plugin.require(plugin.create(), "create");
  if (plugin.get_interface("sf.no-such-interface/1") != nullptr || plugin.get_interface("") != nullptr) {
    return failed("it claims to have an interface that does not exist");
  }
  const char* own = interface_of(subject.file.build->kind);
  const void* found = plugin.get_interface(own);
  if (found == nullptr) {
    return failed(format("it offers no \"{}\"", own));
  }
  return plugin.get_interface(own) == found ? passed() : failed("asked twice it gives another interface");
}

// A host that has no services, one that answers each question with an error, and one whose services fail when they are used.
Outcome failing_services(const Candidate& subject) {
  const PluginServices nowhere(subject.file.name(), 1, "/proc/no-such-folder");
  struct Case {
    const char* name;
    HostServices services;
  };
  const std::vector<Case> cases = {
      {"without services", HostServices{}},
      {"whose get_service fails", {.find = [](std::string_view id) -> const void* { throw Error(ExitCode::kDevice, format("{} is out of order", id)); }, .stop_requested = {}}},
      {"whose run folder can't be written", {.find = [&](std::string_view id) -> const void* {
                                               const void* found = nowhere.find(id);
                                               return found != nullptr ? found : subject.services.find(id);
                                             },
                                             .stop_requested = {}}}};
  std::string remark;
  for (const Case& one : cases) {
    LonePlugin plugin(subject.file, subject.entry, subject.values(), one.services);
    const char* call = "create";
    std::int32_t code = plugin.create();
    if (code == SF_OK) {
      call = "start";
      code = plugin.start();
    }
    if (code != SF_OK && plugin.status().what[0] == 0) {
      return failed(format("under a host {} {} returned code {} without a text", one.name, call, code));
    }
    remark += code == SF_OK ? "" : format("{}under a host {} {} says: {}", remark.empty() ? "" : "; ", one.name, call, plugin.status().what);
  }
  return passed(remark);
}

// What is [any] in sf/plugin.h, on both sides.
Outcome two_threads(const Candidate& subject) {
  constexpr int kCalls = 500;
  constexpr std::string_view kLine = "a line of one of two threads";
  LonePlugin plugin = made(subject);
  plugin.require(plugin.create(), "create");
  plugin.require(plugin.start(), "start");
  const char* own = interface_of(subject.file.build->kind);
  const void* expected = plugin.get_interface(own);
  std::atomic<int> lines = 0;
  std::atomic<bool> is_wrong = false;
  redirect_log([&](Level, std::string_view text) { lines += text == subject.file.name() + ": " + std::string(kLine) ? 1 : 0; });
  const auto body = [&] {
    for (int call = 0; call < kCalls; ++call) {
      is_wrong = is_wrong || plugin.get_interface(own) != expected || plugin.get_interface("sf.no-such-interface/1") != nullptr;
      plugin.host()->log(plugin.host()->ctx, plugin.instance(), SF_LOG_INFO, __FILE__, __LINE__, kLine.data());
      is_wrong = is_wrong || plugin.host()->stop_requested(plugin.host()->ctx) != 0;
    }
  };
  std::thread other(body);
  body();
  other.join();
  plugin.require(plugin.stop(), "stop");
  redirect_log([](Level, std::string_view) {});
  if (is_wrong) {
    return failed("asked from two threads at once get_interface gives other answers");
  }
  return lines == 2 * kCalls ? passed() : failed(format("{} of {} lines came whole", lines.load(), 2 * kCalls));
}

Outcome options_read(const Candidate& subject) {
  LonePlugin plugin = made(subject);
  plugin.require(plugin.create(), "create");
  plugin.require(plugin.start(), "start");
  const std::vector<std::string> unread = plugin.unread(), &misread = plugin.options().misread();
  if (!misread.empty()) {
    return failed(format("it asks for {}, which its manifest lacks or has with another type", join(misread, ", ")));
  }
  (void)plugin.stop();
  return unread.empty() ? passed() : passed(format("warning: never read by create and start: {}; a run that sets one of them ends", join(unread, ", ")));
}

// Values at the ends of what the manifest allows, one option at a time.
std::vector<std::string> ends_of(const Manifest& manifest) {
  std::vector<std::string> sets;
  for (const Option& option : manifest.options) {
    const bool is_integer = option.type == Type::integer || option.type == Type::bytes;
    const auto number = [&](double value) { return option.type == Type::ints || option.type == Type::floats ? format("[{}]", value) : is_integer ? to_text(static_cast<std::int64_t>(value)) : to_text(value) + (value == static_cast<double>(static_cast<std::int64_t>(value)) ? ".0" : ""); };
    if (option.type == Type::boolean) {
      sets.push_back(option.key + "=true");
      sets.push_back(option.key + "=false");
    } else if (option.type == Type::choice) {
      for (const std::string& choice : option.choices) {
        sets.push_back(option.key + "=" + toml_quoted(choice));
      }
    } else if (is_integer || option.type == Type::real) {
      if (option.low && !option.low_open) {
        sets.push_back(option.key + "=" + number(*option.low));
      }
      if (option.high && !option.high_open) {
        sets.push_back(option.key + "=" + number(*option.high));
      }
    }
  }
  return sets;
}

Outcome option_ends(const Candidate& subject) {
  int tried = 0, refused = 0;
  for (const std::string& set : ends_of(subject.manifest())) {
    PlanValues values;
    try {
      values = subject.values({set});
    } catch (const Error&) {   // a rule says no, which is an answer
      ++refused;
      continue;
    }
    ++tried;
    LonePlugin plugin(subject.file, subject.entry, values, subject.services);
    const std::int32_t code = plugin.create();
    if (code == SF_INTERNAL || (code != SF_OK && plugin.status().what[0] == 0)) {
      return failed(format("with {} create returned code {}: {}", set, code, plugin.status().what));
    }
  }
  return passed(format("{} values{}", tried, refused > 0 ? format(", {} more refused by rules", refused) : ""));
}

Outcome threads_gone(const Candidate& subject) {
#ifdef __SANITIZE_THREAD__   // its runtime has a thread of its own from the first one on
  std::thread([] {}).join();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
#endif
  const std::int64_t before = thread_count();
  {
    LonePlugin plugin = made(subject);
    plugin.require(plugin.create(), "create");
    if (thread_count() > before) {
      return failed("create has started a thread; start may, create may not");
    }
    plugin.require(plugin.start(), "start");
    plugin.require(plugin.stop(), "stop");
    plugin.destroy();
  }
  for (int wait = 0; wait < 100 && thread_count() > before; ++wait) {   // a joined thread's entry may outlive it by a moment
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return thread_count() <= before ? passed() : failed(format("{} threads are left after stop", thread_count() - before));
}

}  // namespace

std::vector<Check> life_checks() {
  return {
      {"life/entry", "the entry gives static data", same_entry},
      {"life/create", "it is created with default options, and destroyed without having started", create_alone},
      {"life/whole", "create, start, stop and destroy all succeed", whole_life},
      {"life/stop", "it can be stopped after a start that failed", stop_after_failed_start},
      {"life/interface", "it offers the interface of its kind and none that it does not have", interfaces},
      {"life/services", "a host without services, or with services that fail, gets a status and no crash", failing_services},
      {"life/two-threads", "interfaces are asked for and lines are logged from two threads at once", two_threads},
      {"life/options", "every option of the manifest is read, and no other", options_read},
      {"life/ends", "values at both ends of every range, and every choice, are taken or refused with a text", option_ends},
      {"life/threads", "no thread is started by create, and none is left after stop", threads_gone},
      {"life/exit", "the process ends with 0 after stop and destroy", whole_life, true},
  };
}

}  // namespace sf::check
