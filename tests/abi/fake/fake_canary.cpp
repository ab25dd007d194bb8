// A plugin whose static initializer leaves a file: opening it is enough. Everything that has to be refused unopened is tried on copies of it.
#include "sf/tracker.hpp"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

namespace {

struct Canary {
  Canary() {
    if (const char* path = getenv("SF_TEST_CANARY")) {
      close(open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
    }
  }
} canary;   // NOLINT: the point of it

class FakeCanary {
 public:
  FakeCanary(const sf::Host&, const sf::Options& options) { (void)options.get<int64_t>("amount"); }
  void begin(const sf::TrackedRun&) {}
  void record(int64_t, const std::vector<sf::Figure>&) {}
  void finish() {}
  const void* get_interface(std::string_view id) { return id == SF_TRACKER ? sf::tracker_calls<FakeCanary>() : nullptr; }
};

}  // namespace

SF_PLUGIN(FakeCanary, SF_KIND_TRACKER, SF_TIER_C)
