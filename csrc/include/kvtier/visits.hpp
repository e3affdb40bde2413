// Batch operations on the visits of kvtier/catalog/policies/visits.py, in the flat arrays that hold them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvtier/links.hpp"

namespace kvtier::eviction {

using Number = Links::Place;  // Of a visit, a row, a ring or a place.
using Rows = std::span<const std::uint32_t>;

// The consecutive rows that visits have, each the parent of the next.
std::vector<std::vector<Number>> runs(std::span<const Number> of_row, std::span<const Number> parents, Rows rows);

// Give rows to another visit. Return the visits that have none left. Throws `std::out_of_range`, before anything is
// written there, if a row is out of range or has no visit.
std::vector<Number> take(std::span<Number> of_row, std::span<Number> counts, Number visit, Rows rows);

// Visits in rings, from the oldest to the newest, as in `Rings`. Does not own the arrays.
class VisitRings {
   public:
    // `newer` and `older` are by place: the rings, then the visits. `ring_of` and `since` are by visit, `sizes` by ring.
    // Throws `std::invalid_argument` if the sizes do not fit together.
    VisitRings(std::span<Number> newer, std::span<Number> older, std::span<Number> ring_of, std::span<Number> sizes,
               std::span<const double> since);

    // Move the visits that are too old for a ring, the oldest first, at most `most`. `starts`: the age at which each
    // span starts; `ring` is that of span `at`, and is followed by those of the later spans. Return how many were
    // moved into each span. Throws `std::out_of_range` for a link or ring outside of the arrays.
    std::vector<std::int64_t> move_on(std::size_t ring, std::size_t at, std::span<const double> starts, double now,
                                      std::int64_t most);

   private:
    Links links_;
    std::span<Number> ring_of_;
    std::span<Number> sizes_;
    std::span<const double> since_;
};

}  // namespace kvtier::eviction
