#if defined(__x86_64__)

#include <cstring>

#define KVTIER_TARGET "sse4.1"
#include "compress_x86.hpp"

namespace kvtier::keys {

namespace {

template <int bits>
KVTIER_INLINE __m128i rotate(__m128i words) {
    if constexpr (bits == 16) {
        return _mm_shuffle_epi8(words, _mm_setr_epi8(2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    } else if constexpr (bits == 8) {
        return _mm_shuffle_epi8(words, _mm_setr_epi8(1, 2, 3, 0, 5, 6, 7, 4, 9, 10, 11, 8, 13, 14, 15, 12));
    } else {
        return _mm_or_si128(_mm_srli_epi32(words, bits), _mm_slli_epi32(words, 32 - bits));
    }
}

// Four words of a round: quarter 0 to 3 of `halves`.
template <std::size_t round, std::size_t quarter>
KVTIER_INLINE __m128i gather(const std::uint32_t* words) {
    const auto word = [&](std::size_t at) { return static_cast<int>(words[schedule[round][halves[4 * quarter + at]]]); };
    return _mm_setr_epi32(word(0), word(1), word(2), word(3));
}

template <std::size_t round>
KVTIER_INLINE void one_round(State& s, const std::uint32_t* words) {
    mix(s, gather<round, 0>(words), gather<round, 1>(words));
    to_diagonals(s);
    mix(s, gather<round, 2>(words), gather<round, 3>(words));
    to_columns(s);
}

}  // namespace

__attribute__((target(KVTIER_TARGET))) void compress_sse41(ChainingValue& value, const Block& block) {
    std::uint32_t words[16];
    std::memcpy(words, block.bytes, sizeof(words));
    State s = begin(value, block);
    one_round<0>(s, words);
    one_round<1>(s, words);
    one_round<2>(s, words);
    one_round<3>(s, words);
    one_round<4>(s, words);
    one_round<5>(s, words);
    one_round<6>(s, words);
    end(s, value);
}

}  // namespace kvtier::keys

#endif
