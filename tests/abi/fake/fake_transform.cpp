// A transform that reads its options and offers an interface that nobody calls.
#include <string>

#include "sf/plugin.hpp"

namespace {

class FakeTransform {
 public:
  FakeTransform(const sf::Host&, const sf::Options& options) { (void)options.get<bool>("gather"); }
  const void* get_interface(std::string_view id) { return id == "sf.transform/1" ? this : nullptr; }
};

}  // namespace

SF_PLUGIN(FakeTransform, SF_KIND_TRANSFORM, SF_TIER_C)
