// XXH3-128, as chunks' headers carry it.
#pragma once

#include <array>
#include <cstddef>
#include <span>

namespace kvtier {

// What is no longer has another form of the hash, which is not made here.
inline constexpr std::size_t shortest_checksummed = 241;

// The XXH3-128 of `bytes` with seed 0, in its canonical (big-endian) form: some 20 GB/s. Throws
// std::invalid_argument for fewer bytes than `shortest_checksummed`. `vectors`: use the processor's, where it
// has them; the digest is the same.
std::array<std::byte, 16> xxh3_128(std::span<const std::byte> bytes, bool vectors = true);

}  // namespace kvtier
