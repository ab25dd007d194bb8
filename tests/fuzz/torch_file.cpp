// The reader of .ckpt and .ckpt.gz: gzip, zip, pickle. The first byte of an input says which of the two it is.
#include "core/data/torch_file.hpp"
#include "tests/fuzz/input_file.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) {
    return 0;
  }
  const bool is_packed = data[0] == 0x1f;   // gzip's own first byte
  const std::string path = sf::fuzz::input_file(is_packed ? "x.ckpt.gz" : "x.ckpt", data, size);
  try {
    const sf::TorchFile file = sf::TorchFile::open(path);
    unsigned sum = 0;
    for (const sf::TensorView& view : file.tensors()) {
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
