// Writes an object through the page cache and hashes it meanwhile.
#pragma once

#include <cstddef>
#include <span>

#include "kvtier/checksum.hpp"

namespace kvtier::disk {

// Write `object` to a file at the same offsets, all but its first page, and return the checksum of `payload`, a part of
// it. Each piece is copied while it is in the core's caches. So the caller writes the first page, with the checksum,
// last. Blocks. Throws std::system_error if a write fails, std::invalid_argument as Xxh3 does.
Digest write_hashed(int descriptor, std::span<const std::byte> object, std::span<const std::byte> payload);

}  // namespace kvtier::disk
