#include "core/kernels/row_tiles.hpp"

namespace sf {

#if defined(__x86_64__)

extern const RowTiles row_tiles_avx2, row_tiles_avx512;  // core/kernels/row_tiles.cpp, compiled for each

const RowTiles* row_tiles() {
  static const RowTiles* const found = [] {
    if (__builtin_cpu_supports("avx512f") != 0) return &row_tiles_avx512;
    return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0 ? &row_tiles_avx2 : nullptr;
  }();
  return found;
}

#else

const RowTiles* row_tiles() { return nullptr; }

#endif

}  // namespace sf
