// The order of kvtier/eviction/lru.py, of many chunks at a time, in the two flat arrays that it keeps.
#pragma once

#include <cstdint>
#include <span>

namespace kvtier::eviction {

// A ring of places from the coldest to the warmest. Place 0 stands for both ends, the chunk in row n has place
// n + 1, and a place that is not linked holds -1. What is here holds no memory and is not thread-safe. A link
// that leads out of the arrays, or a row that does, throws `std::out_of_range` before anything is written there.
class LruRing {
   public:
    using Place = std::int32_t;
    using Rows = std::span<const std::uint32_t>;

    // Equally long arrays, at least one place each: else `std::invalid_argument`.
    LruRing(std::span<Place> warmer, std::span<Place> colder);

    // Makes a prefix the warmest, its root last. Rows that are not linked are passed over.
    void touch(Rows rows);

    // Links a chain of rows, each just colder than the one before it, the first just colder than `parent`; or
    // as the warmest, where there is none: `parent` is -1 or not linked. None of the rows may be linked yet.
    void link_chain(Rows rows, std::int64_t parent);

    // Unlinks rows. Those that are not linked are passed over.
    void unlink(Rows rows);

   private:
    bool is_linked(std::uint64_t place) const;
    void check(Place place) const;
    void link(Place place, Place warmer);
    void unlink_one(Place place);

    std::span<Place> warmer_;
    std::span<Place> colder_;
};

}  // namespace kvtier::eviction
