// plugins/sharding/fsdp: what fsdp1 and fsdp2 share: groups and layouts as numbers, the plan of uses, the reductions, and the backend over
// them. What differs is in their own folders: how a group is cut (row_layout or flat_layout) and where its whole parameters live
// (slots or a flat buffer).
//
// layout.hpp: which element of a parameter lies where in the buffer of a group. No LibTorch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sf::fsdp {

/// A parameter as the cut sees it. A scalar counts as one row.
struct Extent {
  int64_t rows = 1, row_elements = 1;
  [[nodiscard]] int64_t elements() const { return rows * row_elements; }
};

/// A run that is unbroken both in the parameter and in the group's buffer.
struct Piece {
  int64_t member = 0;  // index of the parameter in the layout
  int64_t begin = 0;   // first element in the parameter
  int64_t count = 0;
  int64_t place = 0;   // of that element in the buffer
};

struct Run {
  int64_t place = 0, count = 0;
};

/// The buffer of a group: `ranks` parts of `part` elements; rank r holds part r. Pieces are in the order of the buffer.
struct Layout {
  int64_t ranks = 1, part = 0;
  std::vector<Piece> pieces;
  std::vector<Run> gaps;  // padding, always zero

  [[nodiscard]] int64_t elements() const { return ranks * part; }
};

/// What rank `rank` holds of a parameter: elements [begin, end), the first at `place` in its part. Equal when nothing.
struct Own {
  int64_t begin = 0, end = 0, place = 0;
};
[[nodiscard]] std::vector<Own> own_of(const Layout& layout, int64_t members, int64_t rank);

/// fsdp2: c = ceil(rows / ranks) rows of each parameter on every rank, the last ranks fewer or none. In a part the parameters follow each other.
[[nodiscard]] Layout row_layout(const std::vector<Extent>& members, int64_t ranks);
/// fsdp1: the parameters follow each other, and the whole is cut into equal parts wherever that falls.
[[nodiscard]] Layout flat_layout(const std::vector<Extent>& members, int64_t ranks);

/// Parameters begin at multiples of this many elements in a buffer: 16 bytes in bfloat16, what vector loads want.
inline constexpr int64_t kAlignment = 8;
inline int64_t aligned(int64_t elements) { return (elements + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace sf::fsdp
