#include "tests/dspark/dflash_algorithm.hpp"

#include "plugins/algorithm/dflash2/dflash.hpp"

namespace sf::testing {

std::string dflash_prepare(int64_t num_anchors, Sample& sample, const SampleContext& context) {
  DflashOptions options;
  options.num_anchors = num_anchors;
  return Dflash(options).prepare(sample, context);
}

}  // namespace sf::testing
