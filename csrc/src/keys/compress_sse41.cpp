// One compression with the four columns of the state side by side in vectors of four words.
#include "kvtier/blake3.hpp"

#if defined(__x86_64__)

#include <smmintrin.h>

#include <cstring>

#include "blake3_schedule.hpp"

#define KVTIER_SSE41 __attribute__((target("sse4.1"), always_inline)) inline

namespace kvtier::keys {

namespace {

KVTIER_SSE41 __m128i rotate_16(__m128i words) {
    return _mm_shuffle_epi8(words, _mm_setr_epi8(2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
}

KVTIER_SSE41 __m128i rotate_8(__m128i words) {
    return _mm_shuffle_epi8(words, _mm_setr_epi8(1, 2, 3, 0, 5, 6, 7, 4, 9, 10, 11, 8, 13, 14, 15, 12));
}

template <int bits>
KVTIER_SSE41 __m128i rotate(__m128i words) {
    return _mm_or_si128(_mm_srli_epi32(words, bits), _mm_slli_epi32(words, 32 - bits));
}

KVTIER_SSE41 __m128i gather(const std::uint32_t* words, const std::uint8_t* order, int a, int b, int c, int d) {
    const auto word = [&](int place) { return static_cast<int>(words[order[place]]); };
    return _mm_setr_epi32(word(a), word(b), word(c), word(d));
}

struct State {
    __m128i a, b, c, d;
};

// The last thing known is always `b`: what else is added comes first. The compiler would take another order,
// since it does not see that this is one long chain; so it is kept from seeing through `early`.
KVTIER_SSE41 void add(__m128i& a, __m128i b, __m128i message) {
    __m128i early = _mm_add_epi32(a, message);
    __asm__("" : "+x"(early));
    a = _mm_add_epi32(early, b);
}

KVTIER_SSE41 void mix(State& s, __m128i x, __m128i y) {
    add(s.a, s.b, x);
    s.d = rotate_16(_mm_xor_si128(s.d, s.a));
    s.c = _mm_add_epi32(s.c, s.d);
    s.b = rotate<12>(_mm_xor_si128(s.b, s.c));
    add(s.a, s.b, y);
    s.d = rotate_8(_mm_xor_si128(s.d, s.a));
    s.c = _mm_add_epi32(s.c, s.d);
    s.b = rotate<7>(_mm_xor_si128(s.b, s.c));
}

// Columns to diagonals: `b` stays where it is, for the same reason.
KVTIER_SSE41 void to_diagonals(State& s) {
    s.a = _mm_shuffle_epi32(s.a, _MM_SHUFFLE(2, 1, 0, 3));
    s.c = _mm_shuffle_epi32(s.c, _MM_SHUFFLE(0, 3, 2, 1));
    s.d = _mm_shuffle_epi32(s.d, _MM_SHUFFLE(1, 0, 3, 2));
}

KVTIER_SSE41 void to_columns(State& s) {
    s.a = _mm_shuffle_epi32(s.a, _MM_SHUFFLE(0, 3, 2, 1));
    s.c = _mm_shuffle_epi32(s.c, _MM_SHUFFLE(2, 1, 0, 3));
    s.d = _mm_shuffle_epi32(s.d, _MM_SHUFFLE(1, 0, 3, 2));
}

template <std::size_t round>
KVTIER_SSE41 void one_round(State& s, const std::uint32_t* words) {
    static constexpr const auto& order = schedule[round];
    mix(s, gather(words, order.data(), 0, 2, 4, 6), gather(words, order.data(), 1, 3, 5, 7));
    to_diagonals(s);
    mix(s, gather(words, order.data(), 14, 8, 10, 12), gather(words, order.data(), 15, 9, 11, 13));
    to_columns(s);
}

KVTIER_SSE41 __m128i load(const void* words) {
    return _mm_loadu_si128(static_cast<const __m128i*>(words));
}

}  // namespace

__attribute__((target("sse4.1"))) void compress_sse41(ChainingValue& value, const Block& block) {
    std::uint32_t words[16];
    std::memcpy(words, block.bytes, sizeof(words));
    const auto low = static_cast<int>(static_cast<std::uint32_t>(block.counter));
    const auto high = static_cast<int>(static_cast<std::uint32_t>(block.counter >> 32));
    State s{load(value.data()), load(value.data() + 4), load(initial_value.data()),
            _mm_setr_epi32(low, high, static_cast<int>(block.length), static_cast<int>(block.flags))};
    one_round<0>(s, words);
    one_round<1>(s, words);
    one_round<2>(s, words);
    one_round<3>(s, words);
    one_round<4>(s, words);
    one_round<5>(s, words);
    one_round<6>(s, words);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(value.data()), _mm_xor_si128(s.a, s.c));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(value.data() + 4), _mm_xor_si128(s.b, s.d));
}

}  // namespace kvtier::keys

#endif
