// Batch operations on the handles of kvtier/memory/slices.py, in the flat arrays that hold them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kvtier::memory {

using Number = std::int32_t;
using Handles = std::span<std::int32_t>;

// Add a handle to the slice of each leading row, up to the first row without one, and return the slices. `places`: the
// number of each row's slice plus 1, or 0. Throws `std::out_of_range` for a slice that does not exist, or has no handle;
// nothing has changed then.
std::vector<Number> share(std::span<const Number> places, Handles handles, std::span<const std::uint32_t> rows);

// Take a handle from each slice, and return those that have none left, in the same order. Throws `std::out_of_range`
// for a slice that does not exist, or has no handle; nothing has changed then.
std::vector<Number> release(Handles handles, std::span<const std::uint32_t> slices);

}  // namespace kvtier::memory
