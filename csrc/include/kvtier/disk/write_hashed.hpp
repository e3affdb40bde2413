// Writes an object through the page cache and hashes it meanwhile.
#pragma once

#include <cstddef>
#include <span>

#include "kvtier/checksum.hpp"

namespace kvtier::disk {

// Write `object` to a file and return the checksum of `payload`, a part of it. Each piece is copied while it is in the
// core's caches; the caller then writes the header with the checksum over the one in `object`. Blocks. Throws
// std::system_error if a write fails, std::invalid_argument as Xxh3 does.
Digest write_hashed(int descriptor, std::span<const std::byte> object, std::span<const std::byte> payload);

}  // namespace kvtier::disk
