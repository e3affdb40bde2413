#if defined(__x86_64__)

// GCC 12's own intrinsics for AVX-512 begin with a variable that they do not initialize.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include <bit>
#include <cstring>

#include "planes.hpp"

#define KVTIER_TARGET __attribute__((target("avx512f,avx512bw,avx512vbmi,avx512vbmi2,bmi2,popcnt")))
#define KVTIER_INLINE KVTIER_TARGET __attribute__((always_inline)) inline

namespace kvtier::codec {

namespace {

// Byte 0, 1, 2, ... of a vector.
struct Bytes {
    alignas(64) std::uint8_t at[group];
};

template <typename Function>
constexpr Bytes bytes(Function function) {
    Bytes made{};
    for (std::size_t at = 0; at < group; ++at) made.at[at] = static_cast<std::uint8_t>(function(at));
    return made;
}

KVTIER_INLINE __m512i load(const void* memory) {
    return _mm512_loadu_si512(memory);
}

KVTIER_INLINE void store(void* memory, __m512i vector) {
    _mm512_storeu_si512(memory, vector);
}

// The first `count` bytes, at most 64.
KVTIER_INLINE __mmask64 first(std::size_t count) {
    return _bzhi_u64(~std::uint64_t{0}, static_cast<unsigned>(count));
}

// Byte i of each of 16 words, one plane after the other; and its inverse.
constexpr Bytes by_plane = bytes([](std::size_t at) { return at % 16 * 4 + at / 16; });
constexpr Bytes by_word = bytes([](std::size_t at) { return at % 4 * 16 + at / 4; });

// Four rows of four parts of 16 bytes become four columns.
KVTIER_INLINE void transpose(__m512i* rows) {
    const __m512i a = _mm512_shuffle_i32x4(rows[0], rows[1], 0x88), b = _mm512_shuffle_i32x4(rows[0], rows[1], 0xdd);
    const __m512i c = _mm512_shuffle_i32x4(rows[2], rows[3], 0x88), d = _mm512_shuffle_i32x4(rows[2], rows[3], 0xdd);
    rows[0] = _mm512_shuffle_i32x4(a, c, 0x88);
    rows[1] = _mm512_shuffle_i32x4(b, d, 0x88);
    rows[2] = _mm512_shuffle_i32x4(a, c, 0xdd);
    rows[3] = _mm512_shuffle_i32x4(b, d, 0xdd);
}

KVTIER_TARGET void split(const std::uint8_t* words, std::size_t at, std::size_t count, std::uint8_t* const* planes) {
    for (; at + group <= count; at += group) {
        __m512i rows[planes_count];
#pragma GCC unroll 4
        for (std::size_t row = 0; row < planes_count; ++row) {
            // Hardware prefetchers stop at the end of a page.
            __builtin_prefetch(words + 4 * at + 64 * row + 4096);
            rows[row] = _mm512_permutexvar_epi8(load(by_plane.at), _mm512_rol_epi32(load(words + 4 * at + 64 * row), 1));
        }
        transpose(rows);
#pragma GCC unroll 4
        for (std::size_t row = 0; row < planes_count; ++row) store(planes[row] + at, rows[row]);
    }
    portable_kernels.split(words, at, count, planes);
}

KVTIER_TARGET void merge(const std::uint8_t* const* planes, std::size_t at, std::size_t count, std::uint8_t* words) {
    for (; at + group <= count; at += group) {
        __m512i rows[planes_count];
#pragma GCC unroll 4
        for (std::size_t row = 0; row < planes_count; ++row) rows[row] = load(planes[row] + at);
        transpose(rows);
#pragma GCC unroll 4
        for (std::size_t row = 0; row < planes_count; ++row) {
            const __m512i merged = _mm512_permutexvar_epi8(load(by_word.at), rows[row]);
            store(words + 4 * at + 64 * row, _mm512_ror_epi32(merged, 1));
        }
    }
    portable_kernels.merge(planes, at, count, words);
}

// Eight codes of one byte each become `bits` bytes at the start of each word, then all of them consecutive.
KVTIER_TARGET std::size_t pack(const std::uint8_t* plane, std::size_t count, unsigned bits,
                               const std::uint8_t* codes_of, std::uint8_t* codes, std::uint8_t* escapes) {
    const std::uint8_t* const begin = escapes;
    const __m512i escape = _mm512_set1_epi8(static_cast<char>((1u << bits) - 1));
    const __m512i table[4] = {load(codes_of), load(codes_of + 64), load(codes_of + 128), load(codes_of + 192)};
    const __m512i pairs = _mm512_set1_epi16(static_cast<short>(1u | 1u << (8 + bits)));
    const __m512i fours = _mm512_set1_epi32(static_cast<int>(1u | 1u << (16 + 2 * bits)));
    const __m512i low = _mm512_set1_epi64(static_cast<long long>((std::uint64_t{1} << (4 * bits)) - 1));
    const __m128i down = _mm_cvtsi32_si128(static_cast<int>(32 - 4 * bits));
    Bytes order{};
    for (std::size_t at = 0; at < 8 * bits; ++at) order.at[at] = static_cast<std::uint8_t>(at / bits * 8 + at % bits);
    const __m512i joined = load(order.at);
    for (std::size_t at = 0; at < count; at += group, codes += 8 * bits) {
        const __m512i symbols = load(plane + at);
        const __m512i lower = _mm512_permutex2var_epi8(table[0], symbols, table[1]);
        const __m512i upper = _mm512_permutex2var_epi8(table[2], symbols, table[3]);
        const __m512i found = _mm512_mask_blend_epi8(_mm512_movepi8_mask(symbols), lower, upper);
        const __mmask64 escaped = _mm512_cmpeq_epi8_mask(found, escape);
        store(escapes, _mm512_maskz_compress_epi8(escaped, symbols));
        escapes += std::popcount(escaped);
        const __m512i two = _mm512_maddubs_epi16(pairs, found);
        const __m512i four = _mm512_madd_epi16(two, fours);
        const __m512i high = _mm512_andnot_si512(low, _mm512_srl_epi64(four, down));
        const __m512i eight = _mm512_or_si512(_mm512_and_si512(four, low), high);
        store(codes, _mm512_permutexvar_epi8(joined, eight));
    }
    return static_cast<std::size_t>(escapes - begin);
}

KVTIER_TARGET std::ptrdiff_t unpack(const std::uint8_t* codes, std::size_t count, unsigned bits,
                                    const std::uint8_t* symbols, std::span<const std::uint8_t> escapes,
                                    std::uint8_t* plane) {
    const __m512i escape = _mm512_set1_epi8(static_cast<char>((1u << bits) - 1));
    const __m512i table[2] = {load(symbols), load(symbols + 64)};
    Bytes order{}, shifts{};
    for (std::size_t at = 0; at < group; ++at) {
        order.at[at] = static_cast<std::uint8_t>(at / 8 * bits + at % 8);
        shifts.at[at] = static_cast<std::uint8_t>(at % 8 * bits);
    }
    const __m512i parted = load(order.at), shifted = load(shifts.at);
    const __mmask64 read = first(8 * bits);
    std::size_t used = 0;
    for (std::size_t at = 0; at < count; at += group, codes += 8 * bits) {
        const __m512i packed = _mm512_permutexvar_epi8(parted, _mm512_maskz_loadu_epi8(read, codes));
        const __m512i found = _mm512_and_si512(_mm512_multishift_epi64_epi8(shifted, packed), escape);
        __m512i values = _mm512_permutex2var_epi8(table[0], found, table[1]);
        const __mmask64 escaped = _mm512_cmpeq_epi8_mask(found, escape);
        const auto here = static_cast<std::size_t>(std::popcount(escaped));
        if (here > escapes.size() - used) return -1;
        const __m512i exact = _mm512_maskz_loadu_epi8(first(here), escapes.data() + used);
        values = _mm512_mask_expand_epi8(values, escaped, exact);
        used += here;
        store(plane + at, values);
    }
    return static_cast<std::ptrdiff_t>(used);
}

}  // namespace

const Kernels avx512_kernels{split, merge, pack, unpack};

}  // namespace kvtier::codec

#pragma GCC diagnostic pop

#endif
