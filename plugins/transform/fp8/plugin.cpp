#include <string>
#include <string_view>

#include "plugins/transform/fp8/fp8.hpp"
#include "sf/float8_head.hpp"
#include "sf/plugin.hpp"

namespace {

class Fp8Plugin final {
 public:
  Fp8Plugin(const sf::Host& host, const sf::Options& options) : fp8_(read(options)) {
    if (options.get<bool>("head")) {
      auto& heads = host.get_service<sf::Float8Heads>(sf::kFloat8HeadsService);
      heads.use(options.get<bool>("emulate"));
      fp8_.on_window([options, &heads] { options.report_effect("head", heads.products() > 0 ? 1 : 0); });
    }
  }

  const void* get_interface(std::string_view id) { return id == sf::kTransformInterface ? static_cast<sf::Transform*>(&fp8_) : nullptr; }

 private:
  static sf::fp8::Fp8Options read(const sf::Options& options) {
    return {.scaling = options.get<std::string>("scaling") == "row" ? sf::Float8Scaling::row : sf::Float8Scaling::tensor,
            .gradients = options.get<std::string>("gradients") == "e4m3" ? sf::Float8Format::e4m3 : sf::Float8Format::e5m2,
            .grad_input_fp8 = options.get<std::string>("grad_input") == "fp8",
            .grad_weight_fp8 = options.get<std::string>("grad_weight") == "fp8",
            .skip = options.get<std::vector<std::string>>("skip"),
            .emulate = options.get<bool>("emulate"),
            .gather = options.get<bool>("gather")};
  }

  sf::fp8::Fp8 fp8_;
};

}  // namespace

SF_PLUGIN(Fp8Plugin, SF_KIND_TRANSFORM, SF_TIER_TORCH_CXX)
