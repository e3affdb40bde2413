#include "kvtier/slices.hpp"

#include <stdexcept>

namespace kvtier::memory {

std::vector<Number> share(std::span<const Number> places, Handles handles, std::span<const std::uint32_t> rows) {
    std::vector<Number> shared;
    shared.reserve(rows.size());
    for (const std::uint32_t row : rows) {
        const Number place = row < places.size() ? places[row] : 0;
        if (place == 0) break;
        if (place < 0 || static_cast<std::size_t>(place) > handles.size() ||
            handles[static_cast<std::size_t>(place) - 1] < 1) {
            throw std::out_of_range("a slice has no handle");
        }
        shared.push_back(place - 1);
    }
    for (const Number number : shared) ++handles[static_cast<std::size_t>(number)];
    return shared;
}

std::vector<Number> release(Handles handles, std::span<const std::uint32_t> slices) {
    std::vector<Number> free;
    std::size_t done = 0;
    for (; done < slices.size(); ++done) {
        const std::size_t number = slices[done];
        if (number >= handles.size() || handles[number] < 1) break;
        if (--handles[number] == 0) free.push_back(static_cast<Number>(number));
    }
    if (done == slices.size()) return free;
    while (done > 0) ++handles[slices[--done]];
    throw std::out_of_range("a slice has no handle");
}

}  // namespace kvtier::memory
