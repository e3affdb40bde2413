#include "kvtier/lru_ring.hpp"

#include <stdexcept>

namespace kvtier::eviction {

namespace {

constexpr LruRing::Place absent = -1;
constexpr std::size_t ends = 0;
// Prefetch distance in rows: in a ring of millions, each link access misses all CPU caches.
constexpr std::size_t ahead = 8;

}  // namespace

LruRing::LruRing(std::span<Place> warmer, std::span<Place> colder)
    : warmer_(warmer), colder_(colder), links_(warmer, colder) {
    if (warmer.empty()) throw std::invalid_argument("the arrays of a ring must not be empty");
}

bool LruRing::is_linked(std::uint64_t place) const {
    return place < warmer_.size() && warmer_[place] != absent;
}

void LruRing::touch(Rows rows) {
    for (std::size_t left = rows.size(); left > 0; --left) {
        if (left > ahead) {
            const std::uint64_t soon = std::uint64_t{rows[left - 1 - ahead]} + 1;
            if (soon < warmer_.size()) {
                __builtin_prefetch(&warmer_[soon], 1);
                __builtin_prefetch(&colder_[soon], 1);
            }
        }
        const std::uint64_t place = std::uint64_t{rows[left - 1]} + 1;
        if (!is_linked(place)) continue;
        links_.unlink(place);
        links_.link(place, ends);
    }
}

void LruRing::link_chain(Rows rows, std::int64_t parent) {
    const bool known = parent >= 0 && is_linked(static_cast<std::uint64_t>(parent) + 1);
    std::size_t warmer = known ? static_cast<std::size_t>(parent) + 1 : ends;
    for (const std::uint32_t row : rows) {
        const std::uint64_t place = std::uint64_t{row} + 1;
        if (place >= warmer_.size()) throw std::out_of_range("a row is out of range of the ring's arrays");
        links_.link(place, warmer);
        warmer = place;
    }
}

void LruRing::unlink(Rows rows) {
    for (const std::uint32_t row : rows) {
        const std::uint64_t place = std::uint64_t{row} + 1;
        if (!is_linked(place)) continue;
        links_.unlink(place);
        warmer_[place] = colder_[place] = absent;
    }
}

}  // namespace kvtier::eviction
