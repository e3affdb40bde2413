// XXH3-128, the checksum in chunk headers.
#pragma once

#include <array>
#include <cstddef>
#include <span>

namespace kvtier {

// Shorter inputs use other variants of the hash, which are not implemented.
inline constexpr std::size_t min_checksummed = 241;

// Return the XXH3-128 of `bytes` with seed 0, in canonical (big-endian) form, at about 20 GB/s. Throws
// std::invalid_argument for fewer than `min_checksummed` bytes. `vectors`: use SIMD if available; the digest is the
// same.
std::array<std::byte, 16> xxh3_128(std::span<const std::byte> bytes, bool vectors = true);

}  // namespace kvtier
