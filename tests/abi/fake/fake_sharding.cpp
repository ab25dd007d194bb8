// A sharding that reads its options and offers an interface that nobody calls.
#include <string>

#include "sf/plugin.hpp"

namespace {

class FakeSharding {
 public:
  FakeSharding(const sf::Host&, const sf::Options&) {}
  const void* get_interface(std::string_view id) { return id == "sf.sharding/1" ? this : nullptr; }
};

}  // namespace

SF_PLUGIN(FakeSharding, SF_KIND_SHARDING, SF_TIER_C)
