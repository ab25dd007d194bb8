#include "sf/plugin.hpp"

extern "C" int sf_test_function_that_no_library_has();

namespace {

class FakeMissingSymbol {
 public:
  FakeMissingSymbol(const sf::Host&, const sf::Options&) : value_(sf_test_function_that_no_library_has()) {}
  const void* get_interface(std::string_view) { return &value_; }

 private:
  int value_;
};

}  // namespace

SF_PLUGIN(FakeMissingSymbol, SF_KIND_TRACKER, SF_TIER_C)
