// Batch operations on the rings of kvtier/catalog/policies/rings.py, in the flat arrays that hold them.
#pragma once

#include <cstdint>
#include <span>

namespace kvtier::eviction {

// Circular doubly linked lists of places, from coldest to warmest. The first places are the sentinels of the rings, as
// many as `counts` has; after them come the rows. Does not own the arrays; not thread-safe. A link outside of the arrays
// throws `std::out_of_range` before anything is written there.
class Rings {
   public:
    using Place = std::int32_t;
    using Rows = std::span<const std::uint32_t>;

    static constexpr std::uint8_t nowhere = 255;

    // `ring_of`: the ring of each row, or `nowhere`. Throws `std::invalid_argument` if the sizes do not fit together.
    Rings(std::span<Place> warmer, std::span<Place> colder, std::span<std::uint8_t> ring_of,
          std::span<std::int64_t> counts);

    // Make a prefix the warmest of a ring, its root last. Skips rows that are in none. Throws `std::out_of_range` if
    // there is no such ring.
    void use(Rows rows, std::size_t ring);

   private:
    std::size_t checked(Place place) const;
    void unlink(std::size_t place);
    void link(std::size_t place, std::size_t warmer);

    std::span<Place> warmer_;
    std::span<Place> colder_;
    std::span<std::uint8_t> ring_of_;
    std::span<std::int64_t> counts_;
};

}  // namespace kvtier::eviction
