// BLAKE3's message schedule (section 2.2 of its paper).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace kvtier::keys {

inline constexpr std::size_t rounds = 7;

// The index of the message word for each step of each round: each round permutes the order of the previous one.
using Schedule = std::array<std::array<std::uint8_t, 16>, rounds>;

constexpr Schedule make_schedule() {
    constexpr std::array<std::uint8_t, 16> permutation{2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8};
    Schedule schedule{};
    for (std::size_t word = 0; word < 16; ++word) schedule[0][word] = static_cast<std::uint8_t>(word);
    for (std::size_t round = 1; round < rounds; ++round) {
        for (std::size_t word = 0; word < 16; ++word) {
            schedule[round][word] = schedule[round - 1][permutation[word]];
        }
    }
    return schedule;
}

inline constexpr Schedule schedule = make_schedule();

}  // namespace kvtier::keys
