// A plugin that does everything right. Its interface hands out the calls that it has seen.
#include <string>

#include "sf/plugin.hpp"

namespace {

class FakeOk {
 public:
  FakeOk(const sf::Host& host, const sf::Options& options) : host_(host) {
    calls_ = "create(" + std::to_string(options.get<int64_t>("threads")) + ", " +
             options.get<std::string>("label") + ")";
    host_.log(sf::Level::kDebug, "created with label '" + options.get<std::string>("label") + "'");
  }
  void start() { calls_ += " start"; }
  void stop() {
    calls_ += " stop";
    host_.log(sf::Level::kDebug, calls_);
  }
  const void* get_interface(std::string_view id) {
    return id == "sf.checkpoint-writer/1" ? calls_.c_str() : nullptr;
  }

 private:
  sf::Host host_;
  std::string calls_;
};

}  // namespace

SF_PLUGIN(FakeOk, SF_KIND_CHECKPOINT, SF_TIER_C)
