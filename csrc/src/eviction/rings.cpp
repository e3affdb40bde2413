#include "kvtier/rings.hpp"

#include <stdexcept>

namespace kvtier::eviction {

Rings::Rings(std::span<Place> warmer, std::span<Place> colder, std::span<std::uint8_t> ring_of,
             std::span<std::int64_t> counts)
    : links_(warmer, colder), ring_of_(ring_of), counts_(counts) {
    if (links_.size() != counts.size() + ring_of.size()) {
        throw std::invalid_argument("the arrays of rings must have a place for each ring and row");
    }
}

void Rings::use(Rows rows, std::size_t ring) {
    if (ring >= counts_.size()) throw std::out_of_range("there is no such ring");
    for (std::size_t left = rows.size(); left > 0; --left) {
        const std::size_t row = rows[left - 1];
        if (row >= ring_of_.size() || ring_of_[row] == nowhere) continue;
        if (ring_of_[row] >= counts_.size()) throw std::out_of_range("a row is in a ring that does not exist");
        links_.unlink(counts_.size() + row);
        links_.link(counts_.size() + row, ring);
        --counts_[ring_of_[row]];
        ++counts_[ring];
        ring_of_[row] = static_cast<std::uint8_t>(ring);
    }
}

}  // namespace kvtier::eviction
