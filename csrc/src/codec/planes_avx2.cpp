#if defined(__x86_64__)

#include <immintrin.h>

#include <bit>
#include <cstring>

#include "planes.hpp"

#define KVTIER_TARGET __attribute__((target("avx2")))
#define KVTIER_INLINE KVTIER_TARGET __attribute__((always_inline)) inline

namespace kvtier::codec {

namespace {

// Symbols or words of one step.
constexpr std::size_t half = group / 2;
// Codes that a shuffle of 16 bytes can look up. Longer ones are those of small types.
constexpr unsigned short_bits = 4;

KVTIER_INLINE __m256i load(const void* memory) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(memory));
}

KVTIER_INLINE void store(void* memory, __m256i vector) {
    _mm256_storeu_si256(static_cast<__m256i*>(memory), vector);
}

KVTIER_INLINE __m256i twice(__m128i half_vector) {
    return _mm256_broadcastsi128_si256(half_vector);
}

// Byte i of each of four words, one plane after the other, which is its own inverse.
KVTIER_INLINE __m256i by_plane() {
    return twice(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
}

// Four rows of four parts of 4 bytes become four columns, in each half.
KVTIER_INLINE void transpose(__m256i* rows) {
    const __m256i a = _mm256_unpacklo_epi32(rows[0], rows[1]), b = _mm256_unpackhi_epi32(rows[0], rows[1]);
    const __m256i c = _mm256_unpacklo_epi32(rows[2], rows[3]), d = _mm256_unpackhi_epi32(rows[2], rows[3]);
    rows[0] = _mm256_unpacklo_epi64(a, c);
    rows[1] = _mm256_unpackhi_epi64(a, c);
    rows[2] = _mm256_unpacklo_epi64(b, d);
    rows[3] = _mm256_unpackhi_epi64(b, d);
}

KVTIER_TARGET void split(const std::uint8_t* words, std::size_t at, std::size_t count, std::uint8_t* const* planes) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (; at + half <= count; at += half) {
        __m256i rows[planes_count];
#pragma GCC unroll 4
        for (std::size_t row = 0; row < planes_count; ++row) {
            const __m256i word = load(words + 4 * at + 32 * row);
            const __m256i rotated = _mm256_or_si256(_mm256_slli_epi32(word, 1), _mm256_srli_epi32(word, 31));
            rows[row] = _mm256_shuffle_epi8(rotated, by_plane());
        }
        transpose(rows);
#pragma GCC unroll 4
        for (std::size_t row = 0; row < planes_count; ++row) {
            store(planes[row] + at, _mm256_permutevar8x32_epi32(rows[row], order));
        }
    }
    portable_kernels.split(words, at, count, planes);
}

KVTIER_TARGET void merge(const std::uint8_t* const* planes, std::size_t at, std::size_t count, std::uint8_t* words) {
    const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    for (; at + half <= count; at += half) {
        __m256i rows[planes_count];
#pragma GCC unroll 4
        for (std::size_t row = 0; row < planes_count; ++row) {
            rows[row] = _mm256_permutevar8x32_epi32(load(planes[row] + at), order);
        }
        transpose(rows);
#pragma GCC unroll 4
        for (std::size_t row = 0; row < planes_count; ++row) {
            const __m256i rotated = _mm256_shuffle_epi8(rows[row], by_plane());
            const __m256i word = _mm256_or_si256(_mm256_srli_epi32(rotated, 1), _mm256_slli_epi32(rotated, 31));
            store(words + 4 * at + 32 * row, word);
        }
    }
    portable_kernels.merge(planes, at, count, words);
}

// Eight codes of one byte each become `bits` bytes at the start of each word, then all of them consecutive.
KVTIER_TARGET std::size_t pack(const std::uint8_t* plane, std::size_t count, unsigned bits,
                               const std::uint8_t* codes_of, std::uint8_t* codes, std::uint8_t* escapes) {
    if (bits > short_bits) return portable_kernels.pack(plane, count, bits, codes_of, codes, escapes);
    const std::uint8_t* const begin = escapes;
    const unsigned escape = (1u << bits) - 1;
    __m256i symbols[1 << short_bits];
    // Codes that no symbol has, in a table that is not full.
    for (auto& symbol : symbols) symbol = _mm256_setzero_si256();
    for (unsigned symbol = 0; symbol < 256; ++symbol) {
        symbols[codes_of[symbol]] = _mm256_set1_epi8(static_cast<char>(symbol));
    }
    const __m256i pairs = _mm256_set1_epi16(static_cast<short>(1u | 1u << (8 + bits)));
    const __m256i fours = _mm256_set1_epi32(static_cast<int>(1u | 1u << (16 + 2 * bits)));
    const __m256i kept = _mm256_set1_epi64x(static_cast<long long>((std::uint64_t{1} << (8 * bits)) - 1));
    const __m128i down = _mm_cvtsi32_si128(static_cast<int>(32 - 4 * bits));
    alignas(16) std::uint8_t order[16] = {};
    for (unsigned at = 0; at < 2 * bits; ++at) order[at] = static_cast<std::uint8_t>(at / bits * 8 + at % bits);
    const __m256i joined = twice(_mm_load_si128(reinterpret_cast<const __m128i*>(order)));
    for (std::size_t at = 0; at < count; at += half, codes += 4 * bits) {
        const __m256i value = load(plane + at);
        __m256i found = _mm256_set1_epi8(static_cast<char>(escape));
        // The lowest one last: symbol 0 also stands for the codes that no symbol has.
        for (unsigned code = escape; code-- > 0;) {
            const __m256i same = _mm256_cmpeq_epi8(value, symbols[code]);
            found = _mm256_blendv_epi8(found, _mm256_set1_epi8(static_cast<char>(code)), same);
        }
        const __m256i missing = _mm256_cmpeq_epi8(found, _mm256_set1_epi8(static_cast<char>(escape)));
        for (auto left = static_cast<std::uint32_t>(_mm256_movemask_epi8(missing)); left != 0; left &= left - 1) {
            *escapes++ = plane[at + static_cast<unsigned>(std::countr_zero(left))];
        }
        const __m256i four = _mm256_madd_epi16(_mm256_maddubs_epi16(pairs, found), fours);
        const __m256i eight = _mm256_and_si256(_mm256_or_si256(four, _mm256_srl_epi64(four, down)), kept);
        const __m256i packed = _mm256_shuffle_epi8(eight, joined);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), _mm256_castsi256_si128(packed));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + 2 * bits), _mm256_extracti128_si256(packed, 1));
    }
    return static_cast<std::size_t>(escapes - begin);
}

KVTIER_TARGET std::ptrdiff_t unpack(const std::uint8_t* codes, std::size_t count, unsigned bits,
                                    const std::uint8_t* symbols, std::span<const std::uint8_t> escapes,
                                    std::uint8_t* plane) {
    if (bits > short_bits) return portable_kernels.unpack(codes, count, bits, symbols, escapes, plane);
    const __m256i table = twice(_mm_loadu_si128(reinterpret_cast<const __m128i*>(symbols)));
    const __m256i escape = _mm256_set1_epi8(static_cast<char>((1u << bits) - 1));
    const __m256i wide_escape = _mm256_set1_epi32(static_cast<int>((1u << bits) - 1));
    const int step = static_cast<int>(bits);
    const __m256i shifts = _mm256_setr_epi32(0, step, 2 * step, 3 * step, 0, step, 2 * step, 3 * step);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    std::size_t used = 0;
    for (std::size_t at = 0; at < count; at += half) {
        __m256i eights[4];
#pragma GCC unroll 4
        for (auto& eight : eights) {
            // Four codes in the lower half and four in the upper one, each in a lane of its own.
            std::uint32_t word = 0;
            if (at + half < count) {
                std::memcpy(&word, codes, sizeof word);
            } else {
                std::memcpy(&word, codes, bits);
            }
            codes += bits;
            const __m128i low = _mm_set1_epi32(static_cast<int>(word)), high = _mm_set1_epi32(static_cast<int>(word >> 4 * bits));
            const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
            eight = _mm256_and_si256(_mm256_srlv_epi32(both, shifts), wide_escape);
        }
        const __m256i first = _mm256_packus_epi32(eights[0], eights[1]), second = _mm256_packus_epi32(eights[2], eights[3]);
        const __m256i found = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(first, second), order);
        store(plane + at, _mm256_shuffle_epi8(table, found));
        auto left = static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(found, escape)));
        if (static_cast<std::size_t>(std::popcount(left)) > escapes.size() - used) return -1;
        for (; left != 0; left &= left - 1) plane[at + static_cast<unsigned>(std::countr_zero(left))] = escapes[used++];
    }
    return static_cast<std::ptrdiff_t>(used);
}

}  // namespace

const Kernels avx2_kernels{split, merge, pack, unpack};

}  // namespace kvtier::codec

#endif
