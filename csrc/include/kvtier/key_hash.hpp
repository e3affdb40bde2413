// A seeded hash of chunk keys: nobody can choose keys that collide.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>

namespace kvtier {

class KeyHash {
   public:
    KeyHash() {
        std::random_device random;
        for (std::uint64_t& seed : seeds_) seed = (std::uint64_t{random()} << 32) | random();
    }

    // Of the 32 bytes from `key` on. As in wyhash (https://github.com/wangyi-fudan/wyhash): products of 64 by 64 bits,
    // folded.
    std::uint64_t operator()(const std::uint8_t* key) const {
        std::array<std::uint64_t, 4> words;
        std::memcpy(words.data(), key, sizeof(words));
        const std::uint64_t low = fold(words[0] ^ seeds_[0], words[1] ^ seeds_[1]);
        const std::uint64_t high = fold(words[2] ^ seeds_[2], words[3] ^ seeds_[3]);
        return fold(low ^ seeds_[4], high ^ seeds_[0]);
    }

   private:
    __extension__ using Product = unsigned __int128;

    static std::uint64_t fold(std::uint64_t left, std::uint64_t right) {
        const Product product = static_cast<Product>(left) * right;
        return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
    }

    std::array<std::uint64_t, 5> seeds_;
};

}  // namespace kvtier
