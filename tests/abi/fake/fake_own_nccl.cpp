#include "sf/plugin.hpp"

extern "C" int ncclTestFunction(void);

namespace {

class FakeOwnNccl {
 public:
  FakeOwnNccl(const sf::Host&, const sf::Options&) : value_(ncclTestFunction()) {}
  const void* get_interface(std::string_view) { return &value_; }

 private:
  int value_;
};

}  // namespace

SF_PLUGIN(FakeOwnNccl, SF_KIND_TRACKER, SF_TIER_C)
