// One compression with the four columns of the state side by side in vectors of four words.
//
// Included by one file for each set of instructions, which says before what KVTIER_TARGET is and how to turn words
// (`rotate<bits>`): what is in an unnamed namespace here is another function in each.
#pragma once

#include <smmintrin.h>

#include "blake3_schedule.hpp"
#include "kvtier/blake3.hpp"

#define KVTIER_INLINE __attribute__((target(KVTIER_TARGET), always_inline)) inline

namespace kvtier::keys {

namespace {

template <int bits>
KVTIER_INLINE __m128i rotate(__m128i words);

struct State {
    __m128i a, b, c, d;
};

// The last thing known is always `b`: what else is added comes first. The compiler would take another order,
// since it does not see that this is one long chain; so it is kept from seeing through `early`.
KVTIER_INLINE void add(__m128i& a, __m128i b, __m128i message) {
    __m128i early = _mm_add_epi32(a, message);
    __asm__("" : "+x"(early));
    a = _mm_add_epi32(early, b);
}

KVTIER_INLINE void mix(State& s, __m128i x, __m128i y) {
    add(s.a, s.b, x);
    s.d = rotate<16>(_mm_xor_si128(s.d, s.a));
    s.c = _mm_add_epi32(s.c, s.d);
    s.b = rotate<12>(_mm_xor_si128(s.b, s.c));
    add(s.a, s.b, y);
    s.d = rotate<8>(_mm_xor_si128(s.d, s.a));
    s.c = _mm_add_epi32(s.c, s.d);
    s.b = rotate<7>(_mm_xor_si128(s.b, s.c));
}

// Columns to diagonals: `b` stays where it is, for the same reason.
KVTIER_INLINE void to_diagonals(State& s) {
    s.a = _mm_shuffle_epi32(s.a, _MM_SHUFFLE(2, 1, 0, 3));
    s.c = _mm_shuffle_epi32(s.c, _MM_SHUFFLE(0, 3, 2, 1));
    s.d = _mm_shuffle_epi32(s.d, _MM_SHUFFLE(1, 0, 3, 2));
}

KVTIER_INLINE void to_columns(State& s) {
    s.a = _mm_shuffle_epi32(s.a, _MM_SHUFFLE(0, 3, 2, 1));
    s.c = _mm_shuffle_epi32(s.c, _MM_SHUFFLE(2, 1, 0, 3));
    s.d = _mm_shuffle_epi32(s.d, _MM_SHUFFLE(1, 0, 3, 2));
}

// The order in which the two halves of a round take the words of a block: x and y of the columns, then of the
// diagonals.
inline constexpr std::array<std::uint8_t, 16> halves{0, 2, 4, 6, 1, 3, 5, 7, 14, 8, 10, 12, 15, 9, 11, 13};

KVTIER_INLINE __m128i load(const void* words) {
    return _mm_loadu_si128(static_cast<const __m128i*>(words));
}

KVTIER_INLINE State begin(const ChainingValue& value, const Block& block) {
    const auto low = static_cast<int>(static_cast<std::uint32_t>(block.counter));
    const auto high = static_cast<int>(static_cast<std::uint32_t>(block.counter >> 32));
    return {load(value.data()), load(value.data() + 4), load(initial_value.data()),
            _mm_setr_epi32(low, high, static_cast<int>(block.length), static_cast<int>(block.flags))};
}

KVTIER_INLINE void end(const State& s, ChainingValue& value) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(value.data()), _mm_xor_si128(s.a, s.c));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(value.data() + 4), _mm_xor_si128(s.b, s.d));
}

}  // namespace

}  // namespace kvtier::keys
