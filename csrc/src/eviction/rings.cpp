#include "kvtier/rings.hpp"

#include <stdexcept>

namespace kvtier::eviction {

Rings::Rings(std::span<Place> warmer, std::span<Place> colder, std::span<std::uint8_t> ring_of,
             std::span<std::int64_t> counts)
    : warmer_(warmer), colder_(colder), ring_of_(ring_of), counts_(counts) {
    if (warmer.size() != colder.size() || warmer.size() != counts.size() + ring_of.size()) {
        throw std::invalid_argument("the arrays of rings must have a place for each ring and row");
    }
}

std::size_t Rings::checked(Place place) const {
    if (place < 0 || static_cast<std::size_t>(place) >= warmer_.size()) {
        throw std::out_of_range("corrupt ring: a link is out of range");
    }
    return static_cast<std::size_t>(place);
}

void Rings::unlink(std::size_t place) {
    const std::size_t above = checked(warmer_[place]), below = checked(colder_[place]);
    warmer_[below] = static_cast<Place>(above);
    colder_[above] = static_cast<Place>(below);
}

void Rings::link(std::size_t place, std::size_t warmer) {
    const std::size_t colder = checked(colder_[warmer]);
    warmer_[place] = static_cast<Place>(warmer);
    colder_[place] = static_cast<Place>(colder);
    warmer_[colder] = colder_[warmer] = static_cast<Place>(place);
}

void Rings::use(Rows rows, std::size_t ring) {
    if (ring >= counts_.size()) throw std::out_of_range("there is no such ring");
    for (std::size_t left = rows.size(); left > 0; --left) {
        const std::size_t row = rows[left - 1];
        if (row >= ring_of_.size() || ring_of_[row] == nowhere) continue;
        if (ring_of_[row] >= counts_.size()) throw std::out_of_range("a row is in a ring that does not exist");
        unlink(counts_.size() + row);
        link(counts_.size() + row, ring);
        --counts_[ring_of_[row]];
        ++counts_[ring];
        ring_of_[row] = static_cast<std::uint8_t>(ring);
    }
}

}  // namespace kvtier::eviction
