#include "kvtier/visits.hpp"

#include <algorithm>
#include <stdexcept>

namespace kvtier::eviction {

namespace {

constexpr Number none = -1;

// An index that may be trusted.
std::size_t checked(Number number, std::size_t size) {
    if (number < 0 || static_cast<std::size_t>(number) >= size) {
        throw std::out_of_range("corrupt visits: a number is out of range");
    }
    return static_cast<std::size_t>(number);
}

}  // namespace

std::vector<std::vector<Number>> runs(std::span<const Number> of_row, std::span<const Number> parents, Rows rows) {
    std::vector<std::vector<Number>> found;
    for (const std::uint32_t row : rows) {
        if (row >= of_row.size() || row >= parents.size() || of_row[row] == none) continue;
        if (found.empty() || parents[row] != found.back().back()) found.emplace_back();
        found.back().push_back(static_cast<Number>(row));
    }
    return found;
}

std::vector<Number> take(std::span<Number> of_row, std::span<Number> counts, Number visit, Rows rows) {
    std::vector<Number> emptied;
    const std::size_t taker = checked(visit, counts.size());
    for (const std::uint32_t row : rows) {
        if (row >= of_row.size()) throw std::out_of_range("a row is out of range of the visits' arrays");
        const std::size_t before = checked(of_row[row], counts.size());
        of_row[row] = visit;
        ++counts[taker];
        if (--counts[before] == 0 && before != taker) emptied.push_back(static_cast<Number>(before));
    }
    return emptied;
}

void VisitRings::check() const {
    if (newer.size() != older.size() || newer.size() != sizes.size() + ring_of.size() ||
        since.size() < ring_of.size()) {
        throw std::invalid_argument("the arrays of visits must have a place for each ring and visit");
    }
}

std::vector<std::int64_t> VisitRings::move_on(std::size_t ring, std::size_t at, std::span<const double> starts,
                                              double now, std::int64_t most) {
    if (at >= starts.size() || ring >= sizes.size() || sizes.size() - ring < starts.size() - at) {
        throw std::out_of_range("there is no such ring");
    }
    std::vector<std::int64_t> moved(starts.size());
    while (most-- > 0) {
        const std::size_t place = checked(newer[ring], newer.size());
        if (place == ring) break;
        const std::size_t visit = checked(static_cast<Number>(place) - static_cast<Number>(sizes.size()), since.size());
        const auto later = std::upper_bound(starts.begin(), starts.end(), now - since[visit]) - starts.begin();
        const std::size_t reached = later > 0 ? static_cast<std::size_t>(later) - 1 : 0;
        if (reached <= at) break;
        const std::size_t target = ring - at + reached;
        const std::size_t above = checked(newer[place], newer.size());
        const std::size_t newest = checked(older[target], newer.size());
        newer[ring] = static_cast<Number>(above);
        older[above] = static_cast<Number>(ring);
        older[place] = static_cast<Number>(newest);
        newer[place] = static_cast<Number>(target);
        newer[newest] = older[target] = static_cast<Number>(place);
        --sizes[ring];
        ++sizes[target];
        ring_of[visit] = static_cast<Number>(target);
        ++moved[reached];
    }
    return moved;
}

}  // namespace kvtier::eviction
