// Batch operations on the LRU list of kvtier/catalog/policies/lru.py, in the two flat arrays that hold it.
#pragma once

#include <cstdint>
#include <span>

#include "kvtier/links.hpp"

namespace kvtier::eviction {

// A circular doubly linked list of places, from coldest to warmest. Place 0 is the sentinel, the chunk in row n has
// place n + 1, and an unlinked place holds -1. Does not own the arrays; not thread-safe. A link or row outside of the
// arrays throws `std::out_of_range` before anything is written there.
class LruRing {
   public:
    using Place = Links::Place;
    using Rows = std::span<const std::uint32_t>;

    // Throws `std::invalid_argument` unless both arrays have the same length, at least 1.
    LruRing(std::span<Place> warmer, std::span<Place> colder);

    // Make a prefix the warmest, its root last. Skips rows that are not linked.
    void touch(Rows rows);

    // Link a chain of rows, each just colder than the one before it, the first just colder than `parent`; or as the
    // warmest if `parent` is -1 or not linked. None of the rows may be linked yet.
    void link_chain(Rows rows, std::int64_t parent);

    // Unlink rows. Skips rows that are not linked.
    void unlink(Rows rows);

   private:
    bool is_linked(std::uint64_t place) const;

    std::span<Place> warmer_;
    std::span<Place> colder_;
    Links links_;
};

}  // namespace kvtier::eviction
