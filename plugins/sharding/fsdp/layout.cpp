#include "plugins/sharding/fsdp/layout.hpp"

#include <algorithm>

namespace sf::fsdp {
namespace {

void find_gaps(Layout& layout) {
  std::sort(layout.pieces.begin(), layout.pieces.end(), [](const Piece& a, const Piece& b) { return a.place < b.place; });
  int64_t at = 0;
  for (const Piece& piece : layout.pieces) {
    if (piece.place > at) {
      layout.gaps.push_back({at, piece.place - at});
    }
    at = piece.place + piece.count;
  }
  if (at < layout.elements()) {
    layout.gaps.push_back({at, layout.elements() - at});
  }
}

}  // namespace

Layout row_layout(const std::vector<Extent>& members, int64_t ranks) {
  Layout layout{.ranks = ranks, .part = 0, .pieces = {}, .gaps = {}};
  std::vector<int64_t> places;
  for (const Extent& member : members) {
    places.push_back(layout.part);
    layout.part += aligned((member.rows + ranks - 1) / ranks * member.row_elements);
  }
  for (size_t m = 0; m < members.size(); ++m) {
    const int64_t rows = (members[m].rows + ranks - 1) / ranks;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const int64_t first = std::min(rank * rows, members[m].rows), last = std::min((rank + 1) * rows, members[m].rows);
      if (first < last && members[m].row_elements > 0) {
        layout.pieces.push_back({.member = static_cast<int64_t>(m),
                                 .begin = first * members[m].row_elements,
                                 .count = (last - first) * members[m].row_elements,
                                 .place = rank * layout.part + places[m]});
      }
    }
  }
  find_gaps(layout);
  return layout;
}

Layout flat_layout(const std::vector<Extent>& members, int64_t ranks) {
  Layout layout{.ranks = ranks, .part = 0, .pieces = {}, .gaps = {}};
  int64_t place = 0;
  for (size_t m = 0; m < members.size(); ++m) {
    if (members[m].elements() > 0) {
      layout.pieces.push_back({.member = static_cast<int64_t>(m), .begin = 0, .count = members[m].elements(), .place = place});
    }
    place += aligned(members[m].elements());
  }
  layout.part = aligned((place + ranks - 1) / ranks);
  find_gaps(layout);
  return layout;
}

std::vector<Own> own_of(const Layout& layout, int64_t members, int64_t rank) {
  std::vector<Own> own(static_cast<size_t>(members));
  const int64_t first = rank * layout.part, last = first + layout.part;
  for (const Piece& piece : layout.pieces) {
    const int64_t begin = std::max(piece.place, first), end = std::min(piece.place + piece.count, last);
    if (begin < end) {
      own[static_cast<size_t>(piece.member)] = {
          .begin = piece.begin + begin - piece.place, .end = piece.begin + end - piece.place, .place = begin - first};
    }
  }
  return own;
}

}  // namespace sf::fsdp
