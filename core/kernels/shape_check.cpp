#include "core/kernels/shape_check.hpp"

#include "core/base/error.hpp"

#include <algorithm>
#include <string>
#include <vector>

namespace sf {

void check_shape(const char* file, int line, const at::Tensor& tensor, const char* name, std::initializer_list<int64_t> expected,
                 const char* expected_text) {
  if (!tensor.defined()) {
    fail_check(file, line, sf::format("{} is undefined, expected {} = {}", name, expected_text, std::vector<int64_t>(expected)));
  }
  const at::IntArrayRef found = tensor.sizes();
  if (!std::equal(found.begin(), found.end(), expected.begin(), expected.end())) {
    fail_check(file, line,
               sf::format("{} has shape {}, expected {} = {}", name, found.vec(), expected_text, std::vector<int64_t>(expected)));
  }
}

at::ScalarType wide_type(at::ScalarType type) { return type == at::kDouble ? at::kDouble : at::kFloat; }

at::Tensor wide(const at::Tensor& tensor) { return tensor.to(wide_type(tensor.scalar_type())); }

}  // namespace sf
