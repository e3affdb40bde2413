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

VisitRings::VisitRings(std::span<Number> newer, std::span<Number> older, std::span<Number> ring_of,
                       std::span<Number> sizes, std::span<const double> since)
    : links_(newer, older), ring_of_(ring_of), sizes_(sizes), since_(since) {
    if (links_.size() != sizes.size() + ring_of.size() || since.size() < ring_of.size()) {
        throw std::invalid_argument("the arrays of visits must have a place for each ring and visit");
    }
}

std::vector<std::int64_t> VisitRings::move_on(std::size_t ring, std::size_t at, std::span<const double> starts,
                                              double now, std::int64_t most) {
    if (at >= starts.size() || ring >= sizes_.size() || sizes_.size() - ring < starts.size() - at) {
        throw std::out_of_range("there is no such ring");
    }
    std::vector<std::int64_t> moved(starts.size());
    while (most-- > 0) {
        const std::size_t place = links_.next(ring);
        if (place == ring) break;
        if (place < sizes_.size()) throw std::out_of_range("corrupt visits: a ring has the end of another one");
        const std::size_t visit = place - sizes_.size();
        const auto later = std::upper_bound(starts.begin(), starts.end(), now - since_[visit]) - starts.begin();
        const std::size_t reached = later > 0 ? static_cast<std::size_t>(later) - 1 : 0;
        if (reached <= at) break;
        const std::size_t target = ring - at + reached;
        links_.unlink(place);
        links_.link(place, target);
        --sizes_[ring];
        ++sizes_[target];
        ring_of_[visit] = static_cast<Number>(target);
        ++moved[reached];
    }
    return moved;
}

}  // namespace kvtier::eviction
