// SIMD over leaves: each word of the state is a vector with one lane per leaf.
//
// Included by one file per vector width, which defines KVTIER_TARGET first; the unnamed namespace makes the functions
// distinct in each. Uses the portable vector extensions of GCC and Clang.
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>

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

// Load the words of one block of every input, from `start` on. Pads with zeros after `length` bytes.
template <std::size_t lanes>
KVTIER_INLINE void load_block(const Leaves& leaves, std::size_t start, std::size_t length, Vector<lanes>* block) {
    std::uint32_t words[block_bytes / 4][lanes];
    if (length < block_bytes) std::memset(words, 0, sizeof(words));
    for (std::size_t lane = 0; lane < lanes; ++lane) {
        const std::uint8_t* bytes = leaves.inputs[lane] + start;
        for (std::size_t word = 0; word < length / 4; ++word) std::memcpy(&words[word][lane], bytes + 4 * word, 4);
    }
    std::memcpy(block, words, sizeof(words));
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
            load_block(leaves, start, block_bytes, block);
        } else {
            load_block(leaves, start, length, block);
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
    for (std::size_t lane = 0; lane < lanes; ++lane) {
        for (std::size_t word = 0; word < 8; ++word) values[lane][word] = value[word].words[lane];
    }
}

}  // namespace

#endif

}  // namespace kvtier::keys
