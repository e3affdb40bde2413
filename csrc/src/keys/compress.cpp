#include <cstring>

#include "blake3_schedule.hpp"
#include "kvtier/blake3.hpp"

namespace kvtier::keys {

namespace {

// A row of the state, which is a matrix of 4 by 4 words. Uses the portable vector extensions of GCC and Clang.
typedef std::uint32_t Row __attribute__((vector_size(16)));

template <int bits>
inline Row rotated(Row row) {
    return (row >> bits) | (row << (32 - bits));
}

// Mix the words of each column.
inline void mix(Row& a, Row& b, Row& c, Row& d, Row x, Row y) {
    a += b + x;
    d = rotated<16>(d ^ a);
    c += d;
    b = rotated<12>(b ^ c);
    a += b + y;
    d = rotated<8>(d ^ a);
    c += d;
    b = rotated<7>(b ^ c);
}

inline Row shifted_by_1(Row row) {
    return Row{row[1], row[2], row[3], row[0]};
}

inline Row shifted_by_2(Row row) {
    return Row{row[2], row[3], row[0], row[1]};
}

inline Row shifted_by_3(Row row) {
    return Row{row[3], row[0], row[1], row[2]};
}

}  // namespace

void compress(ChainingValue& value, const Block& block) {
    std::uint32_t words[16];
    std::memcpy(words, block.bytes, sizeof(words));
    Row a, b, c;
    std::memcpy(&a, value.data(), sizeof(a));
    std::memcpy(&b, value.data() + 4, sizeof(b));
    std::memcpy(&c, initial_value.data(), sizeof(c));
    const auto low = static_cast<std::uint32_t>(block.counter), high = static_cast<std::uint32_t>(block.counter >> 32);
    Row d{low, high, block.length, block.flags};
#pragma GCC unroll 7
    for (const auto& order : schedule) {
        const auto word = [&](std::size_t place) { return words[order[place]]; };
        mix(a, b, c, d, Row{word(0), word(2), word(4), word(6)}, Row{word(1), word(3), word(5), word(7)});
        // Make columns of the diagonals, and diagonals of the columns again.
        b = shifted_by_1(b);
        c = shifted_by_2(c);
        d = shifted_by_3(d);
        mix(a, b, c, d, Row{word(8), word(10), word(12), word(14)}, Row{word(9), word(11), word(13), word(15)});
        b = shifted_by_3(b);
        c = shifted_by_2(c);
        d = shifted_by_1(d);
    }
    a ^= c;
    b ^= d;
    std::memcpy(value.data(), &a, sizeof(a));
    std::memcpy(value.data() + 4, &b, sizeof(b));
}

}  // namespace kvtier::keys
