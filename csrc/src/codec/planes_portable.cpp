#include <bit>
#include <cstring>

#include "planes.hpp"

namespace kvtier::codec {

namespace {

static_assert(std::endian::native == std::endian::little, "reads little-endian values without conversion");

void split(const std::uint8_t* words, std::size_t at, std::size_t count, std::uint8_t* const* planes) {
    for (; at < count; ++at) {
        std::uint32_t word;
        std::memcpy(&word, words + 4 * at, 4);
        word = std::rotl(word, 1);
        for (std::size_t plane = 0; plane < planes_count; ++plane) {
            planes[plane][at] = static_cast<std::uint8_t>(word >> (8 * plane));
        }
    }
}

void merge(const std::uint8_t* const* planes, std::size_t at, std::size_t count, std::uint8_t* words) {
    for (; at < count; ++at) {
        std::uint32_t word = 0;
        for (std::size_t plane = 0; plane < planes_count; ++plane) {
            word |= static_cast<std::uint32_t>(planes[plane][at]) << (8 * plane);
        }
        word = std::rotr(word, 1);
        std::memcpy(words + 4 * at, &word, 4);
    }
}

// Eight codes fit into a word, and take as many bytes as a code has bits.
std::size_t pack(const std::uint8_t* plane, std::size_t count, unsigned bits, const std::uint8_t* codes_of,
                 std::uint8_t* codes, std::uint8_t* escapes) {
    const std::uint8_t* const first = escapes;
    const std::uint8_t escape = static_cast<std::uint8_t>((1u << bits) - 1);
    for (std::size_t at = 0; at < count; at += 8, codes += bits) {
        std::uint64_t word = 0;
#pragma GCC unroll 8
        for (unsigned number = 0; number < 8; ++number) {
            const std::uint8_t symbol = plane[at + number], code = codes_of[symbol];
            word |= static_cast<std::uint64_t>(code) << (number * bits);
            *escapes = symbol;
            escapes += code == escape;
        }
        std::memcpy(codes, &word, 8);
    }
    return static_cast<std::size_t>(escapes - first);
}

std::ptrdiff_t unpack(const std::uint8_t* codes, std::size_t count, unsigned bits, const std::uint8_t* symbols,
                      std::span<const std::uint8_t> escapes, std::uint8_t* plane) {
    const std::uint8_t escape = static_cast<std::uint8_t>((1u << bits) - 1);
    std::size_t used = 0;
    for (std::size_t at = 0; at < count; at += 8, codes += bits) {
        std::uint64_t word = 0;
        std::memcpy(&word, codes, bits);
#pragma GCC unroll 8
        for (unsigned number = 0; number < 8; ++number, word >>= bits) {
            const std::uint8_t code = static_cast<std::uint8_t>(word) & escape;
            plane[at + number] = symbols[code];
            if (code != escape) continue;
            if (used == escapes.size()) return -1;
            plane[at + number] = escapes[used++];
        }
    }
    return static_cast<std::ptrdiff_t>(used);
}

}  // namespace

const Kernels portable_kernels{split, merge, pack, unpack};

}  // namespace kvtier::codec
