// SIMD over leaves: each word of the state is a vector with one lane per leaf.
//
// Included by one file per vector width, which defines KVTIER_TARGET first, and KVTIER_AVX2 if that has AVX2; the unnamed
// namespace makes the functions distinct in each. Uses the portable vector extensions of GCC and Clang, and intrinsics
// where these lack an instruction.
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>

#if defined(KVTIER_AVX2)
#include <immintrin.h>
#endif

#include "blake3_schedule.hpp"
#include "kvtier/blake3.hpp"

namespace kvtier::keys {

void hash_leaves_portable(const Leaves& leaves, ChainingValue* values);
#if defined(__x86_64__)
void hash_leaves_avx2(const Leaves& leaves, ChainingValue* values);
void hash_leaves_avx512(const Leaves& leaves, ChainingValue* values);
#endif

#if defined(KVTIER_TARGET)

#define KVTIER_INLINE KVTIER_TARGET __attribute__((always_inline)) inline

namespace {

template <std::size_t lanes>
struct Vector {
    typedef std::uint32_t Words __attribute__((vector_size(lanes * sizeof(std::uint32_t))));
    Words words;
};

template <std::size_t lanes>
KVTIER_INLINE void fill(Vector<lanes>& vector, std::uint32_t word) {
    vector.words = word - typename Vector<lanes>::Words{};
}

template <int bits, std::size_t lanes>
KVTIER_INLINE void xor_rotate(Vector<lanes>& d, const Vector<lanes>& a) {
    d.words ^= a.words;
    d.words = (d.words >> bits) | (d.words << (32 - bits));
}

#if defined(KVTIER_AVX2)
// Whole bytes of 8 lanes are rotated by one instruction instead of three; 16 lanes have an instruction for any number.
KVTIER_INLINE void xor_shuffle(Vector<8>& d, const Vector<8>& a, __m256i order) {
    const auto words = reinterpret_cast<__m256i>(d.words ^ a.words);
    d.words = reinterpret_cast<Vector<8>::Words>(_mm256_shuffle_epi8(words, order));
}

template <>
KVTIER_INLINE void xor_rotate<16>(Vector<8>& d, const Vector<8>& a) {
    xor_shuffle(d, a, _mm256_set_epi64x(0x0D0C0F0E09080B0A, 0x0504070601000302, 0x0D0C0F0E09080B0A, 0x0504070601000302));
}

template <>
KVTIER_INLINE void xor_rotate<8>(Vector<8>& d, const Vector<8>& a) {
    xor_shuffle(d, a, _mm256_set_epi64x(0x0C0F0E0D080B0A09, 0x0407060500030201, 0x0C0F0E0D080B0A09, 0x0407060500030201));
}

// Write word w of row r as word r of row w. `out` has rows of `stride` words, of which 8 are written.
KVTIER_INLINE void transpose(const std::uint32_t* const* rows, std::uint32_t* out, std::size_t stride) {
    __m256i row[8], pair[8], four[8];
#pragma GCC unroll 8
    for (int r = 0; r < 8; ++r) row[r] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[r]));
#pragma GCC unroll 4
    for (int r = 0; r < 8; r += 2) {
        pair[r] = _mm256_unpacklo_epi32(row[r], row[r + 1]);
        pair[r + 1] = _mm256_unpackhi_epi32(row[r], row[r + 1]);
    }
#pragma GCC unroll 2
    for (int r = 0; r < 8; r += 4) {
        four[r] = _mm256_unpacklo_epi64(pair[r], pair[r + 2]);
        four[r + 1] = _mm256_unpackhi_epi64(pair[r], pair[r + 2]);
        four[r + 2] = _mm256_unpacklo_epi64(pair[r + 1], pair[r + 3]);
        four[r + 3] = _mm256_unpackhi_epi64(pair[r + 1], pair[r + 3]);
    }
#pragma GCC unroll 4
    for (int w = 0; w < 4; ++w) {
        const __m256i low = _mm256_permute2x128_si256(four[w], four[w + 4], 0x20);
        const __m256i high = _mm256_permute2x128_si256(four[w], four[w + 4], 0x31);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + static_cast<std::size_t>(w) * stride), low);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + static_cast<std::size_t>(w + 4) * stride), high);
    }
}
#endif

template <std::size_t lanes>
KVTIER_INLINE void mix(Vector<lanes>& a, Vector<lanes>& b, Vector<lanes>& c, Vector<lanes>& d, const Vector<lanes>& x,
                       const Vector<lanes>& y) {
    a.words += b.words + x.words;
    xor_rotate<16>(d, a);
    c.words += d.words;
    xor_rotate<12>(b, c);
    a.words += b.words + y.words;
    xor_rotate<8>(d, a);
    c.words += d.words;
    xor_rotate<7>(b, c);
}

template <std::size_t round, std::size_t lanes>
KVTIER_INLINE void one_round(Vector<lanes>* v, const Vector<lanes>* block) {
    constexpr auto& order = schedule[round];
    mix(v[0], v[4], v[8], v[12], block[order[0]], block[order[1]]);
    mix(v[1], v[5], v[9], v[13], block[order[2]], block[order[3]]);
    mix(v[2], v[6], v[10], v[14], block[order[4]], block[order[5]]);
    mix(v[3], v[7], v[11], v[15], block[order[6]], block[order[7]]);
    mix(v[0], v[5], v[10], v[15], block[order[8]], block[order[9]]);
    mix(v[1], v[6], v[11], v[12], block[order[10]], block[order[11]]);
    mix(v[2], v[7], v[8], v[13], block[order[12]], block[order[13]]);
    mix(v[3], v[4], v[9], v[14], block[order[14]], block[order[15]]);
}

// Load the words of a part of a block of every input, from `start` on, and pad them with zeros.
template <std::size_t lanes>
KVTIER_INLINE void load_part(const Leaves& leaves, std::size_t start, std::size_t length, Vector<lanes>* block) {
    std::uint32_t words[block_bytes / 4][lanes];
    if (length < block_bytes) std::memset(words, 0, sizeof(words));
    for (std::size_t lane = 0; lane < lanes; ++lane) {
        const std::uint8_t* bytes = leaves.inputs[lane] + start;
        for (std::size_t word = 0; word < length / 4; ++word) std::memcpy(&words[word][lane], bytes + 4 * word, 4);
    }
    std::memcpy(block, words, sizeof(words));
}

// Load the words of one block of every input, from `start` on.
template <std::size_t lanes>
KVTIER_INLINE void load_block(const Leaves& leaves, std::size_t start, Vector<lanes>* block) {
#if defined(KVTIER_AVX2)
    for (std::size_t lane = 0; lane < lanes; lane += 8) {
        for (std::size_t word = 0; word < block_bytes / 4; word += 8) {
            const std::uint32_t* rows[8];
            for (std::size_t row = 0; row < 8; ++row) {
                rows[row] = reinterpret_cast<const std::uint32_t*>(leaves.inputs[lane + row] + start) + word;
            }
            transpose(rows, reinterpret_cast<std::uint32_t*>(block + word) + lane, lanes);
        }
    }
#else
    load_part(leaves, start, block_bytes, block);
#endif
}

template <std::size_t lanes>
KVTIER_INLINE void store_values(const Vector<lanes>* value, ChainingValue* values) {
#if defined(KVTIER_AVX2)
    for (std::size_t lane = 0; lane < lanes; lane += 8) {
        const std::uint32_t* rows[8];
        for (std::size_t word = 0; word < 8; ++word) {
            rows[word] = reinterpret_cast<const std::uint32_t*>(value + word) + lane;
        }
        transpose(rows, values[lane].data(), 8);
    }
#else
    for (std::size_t lane = 0; lane < lanes; ++lane) {
        for (std::size_t word = 0; word < 8; ++word) values[lane][word] = value[word].words[lane];
    }
#endif
}

// Loops over the state are unrolled, so that it stays in registers.
template <std::size_t lanes>
KVTIER_INLINE void hash_leaves(const Leaves& leaves, ChainingValue* values) {
    Vector<lanes> value[8], v[16], block[16];
#pragma GCC unroll 8
    for (std::size_t word = 0; word < 8; ++word) fill(value[word], initial_value[word]);
    for (std::size_t start = 0; start < leaves.length; start += block_bytes) {
        const std::size_t length = std::min(block_bytes, leaves.length - start);
        if (length == block_bytes) {
            load_block(leaves, start, block);
        } else {
            load_part(leaves, start, length, block);
        }
        const bool is_last = start + length == leaves.length;
#pragma GCC unroll 8
        for (std::size_t word = 0; word < 8; ++word) v[word] = value[word];
#pragma GCC unroll 8
        for (std::size_t word = 0; word < 4; ++word) fill(v[8 + word], initial_value[word]);
        fill(v[12], static_cast<std::uint32_t>(leaves.counter));
        fill(v[13], static_cast<std::uint32_t>(leaves.counter >> 32));
        fill(v[14], static_cast<std::uint32_t>(length));
        fill(v[15], (start == 0 ? starts_leaf : no_flag) | (is_last ? ends_leaf | leaves.flags : no_flag));
        one_round<0>(v, block);
        one_round<1>(v, block);
        one_round<2>(v, block);
        one_round<3>(v, block);
        one_round<4>(v, block);
        one_round<5>(v, block);
        one_round<6>(v, block);
#pragma GCC unroll 8
        for (std::size_t word = 0; word < 8; ++word) value[word].words = v[word].words ^ v[word + 8].words;
    }
    store_values(value, values);
}

}  // namespace

#endif

}  // namespace kvtier::keys
