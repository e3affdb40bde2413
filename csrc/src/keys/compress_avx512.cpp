#if defined(__x86_64__)

#include <immintrin.h>

#define KVTIER_TARGET "avx512f,avx512vl"
#include "compress_x86.hpp"

namespace kvtier::keys {

namespace {

template <int bits>
KVTIER_INLINE __m128i rotate(__m128i words) {
    return _mm_ror_epi32(words, bits);
}

using Order = std::array<std::uint32_t, 16>;

// A block's words as the halves of the first round take them.
constexpr Order make_first() {
    Order order{};
    for (std::size_t at = 0; at < order.size(); ++at) order[at] = halves[at];
    return order;
}

// Where each word of the next round's halves is among this round's.
constexpr Order make_next() {
    Order order{};
    for (std::size_t at = 0; at < order.size(); ++at) {
        for (std::uint32_t before = 0; before < order.size(); ++before) {
            if (halves[before] == schedule[1][halves[at]]) order[at] = before;
        }
    }
    return order;
}

alignas(64) constexpr Order first_order = make_first();
alignas(64) constexpr Order next_order = make_next();

// With masks of all ones: of the plain ones GCC 12 says that they use what is not initialized.
template <int at>
KVTIER_INLINE __m128i quarter(__m512i words) {
    return _mm512_maskz_extracti32x4_epi32(0xF, words, at);
}

KVTIER_INLINE __m512i permute(const Order& order, __m512i words) {
    return _mm512_maskz_permutexvar_epi32(0xFFFF, _mm512_load_si512(order.data()), words);
}

// In four parts, as they were written a moment ago: the processor hands over what it has not stored yet only to
// loads of the same size.
KVTIER_INLINE __m512i load_block(const std::uint8_t* bytes) {
    const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(load(bytes)), load(bytes + 16), 1);
    const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(load(bytes + 32)), load(bytes + 48), 1);
    return _mm512_maskz_inserti64x4(0xFF, _mm512_castsi256_si512(low), high, 1);
}

KVTIER_INLINE void one_round(State& s, __m512i words) {
    mix(s, quarter<0>(words), quarter<1>(words));
    to_diagonals(s);
    mix(s, quarter<2>(words), quarter<3>(words));
    to_columns(s);
}

}  // namespace

__attribute__((target(KVTIER_TARGET))) void compress_avx512(ChainingValue& value, const Block& block) {
    __m512i words = permute(first_order, load_block(block.bytes));
    State s = begin(value, block);
    one_round(s, words);
    one_round(s, words = permute(next_order, words));
    one_round(s, words = permute(next_order, words));
    one_round(s, words = permute(next_order, words));
    one_round(s, words = permute(next_order, words));
    one_round(s, words = permute(next_order, words));
    one_round(s, permute(next_order, words));
    end(s, value);
}

}  // namespace kvtier::keys

#endif
