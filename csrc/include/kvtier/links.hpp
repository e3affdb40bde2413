// Doubly linked rings of places in two flat arrays: what `LruRing`, `Rings` and `VisitRings` have in common.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>

namespace kvtier::eviction {

// Does not own the arrays. A link outside of them throws `std::out_of_range` before anything is written there.
class Links {
   public:
    using Place = std::int32_t;

    // `next` leads from a ring's sentinel to its coldest (or oldest) place, `previous` to its warmest (or newest).
    Links(std::span<Place> next, std::span<Place> previous) : next_(next), previous_(previous) {
        if (next.size() != previous.size()) {
            throw std::invalid_argument("the two arrays of a ring must have the same length");
        }
    }

    std::size_t size() const { return next_.size(); }
    std::size_t next(std::size_t place) const { return checked(next_[place]); }

    // Link a place just before another one.
    void link(std::size_t place, std::size_t before) {
        const std::size_t after = checked(previous_[before]);
        next_[place] = static_cast<Place>(before);
        previous_[place] = static_cast<Place>(after);
        next_[after] = previous_[before] = static_cast<Place>(place);
    }

    void unlink(std::size_t place) {
        const std::size_t before = checked(next_[place]), after = checked(previous_[place]);
        next_[after] = static_cast<Place>(before);
        previous_[before] = static_cast<Place>(after);
    }

   private:
    std::size_t checked(Place place) const {
        if (place < 0 || static_cast<std::size_t>(place) >= next_.size()) {
            throw std::out_of_range("corrupt ring: a link is out of range");
        }
        return static_cast<std::size_t>(place);
    }

    std::span<Place> next_;
    std::span<Place> previous_;
};

}  // namespace kvtier::eviction
