// A algorithm that reads its options and offers an interface that nobody calls.
#include <string>

#include "sf/plugin.hpp"

namespace {

class FakeAlgorithm {
 public:
  FakeAlgorithm(const sf::Host&, const sf::Options& options) {
    (void)options.get<int64_t>("training.num_anchors");
  }
  const void* get_interface(std::string_view id) { return id == "sf.algorithm/1" ? this : nullptr; }
};

}  // namespace

SF_PLUGIN(FakeAlgorithm, SF_KIND_ALGORITHM, SF_TIER_C)
