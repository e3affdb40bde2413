// Batch operations on the rings of kvtier/catalog/policies/rings.py, in the flat arrays that hold them.
#pragma once

#include <cstdint>
#include <span>

#include "kvtier/links.hpp"

namespace kvtier::eviction {

// Several rings, each from its coldest to its warmest place. The first places are their sentinels, as many as `counts`
// has; after them come the rows. Does not own the arrays; not thread-safe.
class Rings {
   public:
    using Place = Links::Place;
    using Rows = std::span<const std::uint32_t>;

    static constexpr std::uint8_t nowhere = 255;

    // `ring_of`: the ring of each row, or `nowhere`. Throws `std::invalid_argument` if the sizes do not fit together.
    Rings(std::span<Place> warmer, std::span<Place> colder, std::span<std::uint8_t> ring_of,
          std::span<std::int64_t> counts);

    // Make a prefix the warmest of a ring, its root last. Skips rows that are in none. Throws `std::out_of_range` if
    // there is no such ring.
    void use(Rows rows, std::size_t ring);

   private:
    Links links_;
    std::span<std::uint8_t> ring_of_;
    std::span<std::int64_t> counts_;
};

}  // namespace kvtier::eviction
