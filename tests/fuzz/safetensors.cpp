// The reader of safetensors: header, extents, views.
#include "core/data/safetensors.hpp"
#include "tests/fuzz/input_file.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string path = sf::fuzz::input_file("x.safetensors", data, size);
  try {
    const sf::SafetensorsFile file = sf::SafetensorsFile::open(path);
    unsigned sum = 0;
    for (const sf::TensorView& view : file.tensors()) {   // every byte that a view promises is there
      for (const std::byte byte : view.bytes) {
        sum += static_cast<unsigned>(byte);
      }
    }
    volatile unsigned keep = sum;
    (void)keep;
  } catch (const sf::Error&) {
  }
  return 0;
}
