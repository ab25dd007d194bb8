// A plugin that does everything right unless it is told where to fail. Its interface is the text of the calls
// that it has seen.
#include <stdexcept>
#include <string>

#include "sf/plugin.hpp"

#include <unistd.h>

namespace {

class FakeOk {
 public:
  FakeOk(const sf::Host& host, const sf::Options& options)
      : host_(host), fail_in_(options.get<std::string>("fail_in")) {
    fail("create");
    while (fail_in_ == "hang") {
      usleep(100'000);
    }
    if (fail_in_ == "option") {
      (void)options.get<bool>("no_such_option");
    }
    std::string lengths;
    for (int64_t length : options.get<std::vector<int64_t>>("lengths")) {
      lengths += " " + std::to_string(length);
    }
    if (options.get<bool>("convert")) {
      options.report_effect("convert", 0);
    }
    calls_ = "create threads=" + std::to_string(options.get<int64_t>("threads")) +
             " label=" + options.get<std::string>("label") + " lengths=" + lengths;
    calls_ += host_.find_service<const char>("test.service/1") != nullptr ? " service" : "";
    host_.log(sf::Level::kInfo, "created");
  }
  void start() {
    calls_ += ", start";
    fail("start");
  }
  void stop() {
    host_.log(sf::Level::kInfo, calls_ + ", stop");
    fail("stop");
  }
  const void* get_interface(std::string_view id) {
    return id == "sf.checkpoint-writer/1" && fail_in_ != "interface" ? calls_.c_str() : nullptr;
  }

 private:
  void fail(const std::string& call) const {
    if (fail_in_ == call) {
      throw sf::Error(sf::ExitCode::kDevice, "told to fail in " + call,
                      "set plugin.fake_ok.fail_in = \"nothing\"");
    }
  }

  sf::Host host_;
  std::string fail_in_;
  std::string calls_;
};

}  // namespace

SF_PLUGIN(FakeOk, SF_KIND_CHECKPOINT, SF_TIER_C)
