#include <bit>
#include <cstring>

#include "blake3_schedule.hpp"
#include "kvtier/blake3.hpp"

namespace kvtier::keys {

namespace {

std::uint32_t little_endian(const std::uint8_t* bytes) {
    return static_cast<std::uint32_t>(bytes[0]) | static_cast<std::uint32_t>(bytes[1]) << 8 |
           static_cast<std::uint32_t>(bytes[2]) << 16 | static_cast<std::uint32_t>(bytes[3]) << 24;
}

void mix(std::uint32_t& a, std::uint32_t& b, std::uint32_t& c, std::uint32_t& d, std::uint32_t x, std::uint32_t y) {
    a += b + x;
    d = std::rotr(d ^ a, 16);
    c += d;
    b = std::rotr(b ^ c, 12);
    a += b + y;
    d = std::rotr(d ^ a, 8);
    c += d;
    b = std::rotr(b ^ c, 7);
}

}  // namespace

void compress(ChainingValue& value, const Block& block) {
    std::array<std::uint32_t, 16> words;
    for (std::size_t word = 0; word < 16; ++word) words[word] = little_endian(block.bytes + 4 * word);
    std::array<std::uint32_t, 16> v;
    std::memcpy(v.data(), value.data(), sizeof(value));
    std::memcpy(v.data() + 8, initial_value.data(), 4 * sizeof(std::uint32_t));
    v[12] = static_cast<std::uint32_t>(block.counter);
    v[13] = static_cast<std::uint32_t>(block.counter >> 32);
    v[14] = block.length;
    v[15] = block.flags;
    for (const auto& order : schedule) {
        const auto word = [&](std::size_t place) { return words[order[place]]; };
        mix(v[0], v[4], v[8], v[12], word(0), word(1));
        mix(v[1], v[5], v[9], v[13], word(2), word(3));
        mix(v[2], v[6], v[10], v[14], word(4), word(5));
        mix(v[3], v[7], v[11], v[15], word(6), word(7));
        mix(v[0], v[5], v[10], v[15], word(8), word(9));
        mix(v[1], v[6], v[11], v[12], word(10), word(11));
        mix(v[2], v[7], v[8], v[13], word(12), word(13));
        mix(v[3], v[4], v[9], v[14], word(14), word(15));
    }
    for (std::size_t word = 0; word < 8; ++word) value[word] = v[word] ^ v[word + 8];
}

}  // namespace kvtier::keys
