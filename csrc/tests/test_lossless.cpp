#include "kvtier/lossless.hpp"

#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.hpp"
#include "guarded.hpp"

using kvtier::Vectors;
using kvtier::test::Bytes;
using kvtier::test::Guarded;
using kvtier::test::written;

namespace {

constexpr Vectors limits[] = {Vectors::none, Vectors::avx2, Vectors::avx512};

std::mt19937 random_bits(1);

Bytes noise(std::size_t length) {
    Bytes bytes(length);
    for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random_bits());
    return bytes;
}

// Values of a normal distribution, as the upper `width` bytes of a float32; with a few special values.
Bytes values(std::size_t length, std::size_t width, float scale) {
    std::normal_distribution<float> distribution(0, scale);
    Bytes bytes(length);
    for (std::size_t at = 0; at + width <= length; at += width) {
        float value = distribution(random_bits);
        if (random_bits() % 512 == 0) value = std::bit_cast<float>(static_cast<std::uint32_t>(random_bits()));
        const auto word = std::bit_cast<std::uint32_t>(value) >> (8 * (4 - width));
        std::memcpy(&bytes[at], &word, width);
    }
    return bytes;
}

// Words whose bytes take few values, other ones and another number of them in each place and each segment.
Bytes few_kinds(std::size_t length) {
    Bytes bytes(length);
    unsigned kinds[4] = {}, first[4] = {};
    for (std::size_t at = 0; at < length; ++at) {
        if (at % (32 << 10) == 0) {
            for (unsigned place = 0; place < 4; ++place) {
                kinds[place] = 1 + random_bits() % 17;
                first[place] = 0x70 + random_bits() % 4;
            }
        }
        const unsigned place = at % 4;
        // Half of them have the first value, a quarter the second, and so on.
        const auto kind = static_cast<unsigned>(std::countr_zero(random_bits() | 1u << 31)) % kinds[place];
        bytes[at] = static_cast<std::uint8_t>(first[place] + (random_bits() % 2 ? kind : random_bits() % kinds[place]));
    }
    return bytes;
}

std::vector<std::pair<std::string, Bytes>> payloads() {
    std::vector<std::pair<std::string, Bytes>> found;
    for (const std::size_t length : {0ul, 1ul, 2ul, 3ul, 63ul, 64ul, 127ul, 128ul, 129ul, 1000ul, 4096ul, 32767ul, 32768ul,
                                     32769ul, 98304ul, 100001ul, 1048589ul}) {
        const std::string suffix = " of " + std::to_string(length);
        found.emplace_back("noise" + suffix, noise(length));
        found.emplace_back("zeros" + suffix, Bytes(length));
        for (int number = 0; number < 8; ++number) found.emplace_back("few kinds" + suffix, few_kinds(length));
        for (const std::size_t width : {1ul, 2ul, 4ul}) {
            found.emplace_back("values of " + std::to_string(width) + suffix, values(length, width, 0.02F));
        }
        Bytes mixed = values(length / 2, 2, 1.0F);
        const Bytes rest = values(length - mixed.size(), 4, 100.0F);
        mixed.insert(mixed.end(), rest.begin(), rest.end());
        found.emplace_back("two types" + suffix, mixed);
    }
    return found;
}

using Encode = std::size_t(std::span<const std::uint8_t>, std::span<std::uint8_t>, Vectors);
constexpr Encode* encodes[] = {kvtier::codec::encode, kvtier::codec::encode_dense};

Bytes encoded(const Bytes& payload, Vectors limit = Vectors::avx512, Encode* encode = kvtier::codec::encode) {
    return written(payload, kvtier::codec::max_encoded(payload.size()), [&](auto source, auto target) {
        return encode(source, target, limit);
    });
}

Bytes decoded(const Bytes& stored, std::size_t length, Vectors limit = Vectors::avx512) {
    return written(stored, length, [&](auto source, auto target) {
        kvtier::codec::decode(source, target, limit);
        return length;
    });
}

}  // namespace

TEST(payloads_survive_with_each_instruction_set) {
    for (const auto& [name, payload] : payloads()) {
        for (Encode* encode : encodes) {
            const Bytes expected = encoded(payload, Vectors::none, encode);
            for (const Vectors limit : limits) {
                const Bytes stored = encoded(payload, limit, encode);
                const bool survives = decoded(expected, payload.size(), limit) == payload &&
                                      decoded(stored, payload.size(), limit) == payload;
                if (!survives) kvtier::test::fail(name.c_str(), 0, "other bytes come back");
                if (stored != expected) kvtier::test::fail(name.c_str(), 0, "encoded differently");
            }
        }
    }
}

TEST(exponents_take_fewer_bits) {
    const auto ratio = [](const Bytes& payload, Encode* encode = kvtier::codec::encode) {
        return static_cast<double>(payload.size()) / static_cast<double>(encoded(payload, Vectors::avx512, encode).size());
    };
    CHECK(ratio(values(1 << 20, 2, 0.02F)) > 1.4);
    CHECK(ratio(values(1 << 20, 4, 0.02F)) > 1.16);
    CHECK(ratio(Bytes(1 << 20)) > 7);
    CHECK(ratio(noise(1 << 20)) > 0.999);
    CHECK(ratio(values(1 << 20, 2, 0.02F), kvtier::codec::encode_dense) > 1.49);
    CHECK(ratio(values(1 << 20, 4, 0.02F), kvtier::codec::encode_dense) > 1.19);
    CHECK(ratio(Bytes(1 << 20), kvtier::codec::encode_dense) > 150);
    CHECK(ratio(noise(1 << 20), kvtier::codec::encode_dense) > 0.999);
}

TEST(another_length_is_refused) {
    for (const Vectors limit : limits) {
        for (Encode* encode : encodes) {
            const Bytes stored = encoded(values(100'000, 2, 1.0F), limit, encode);
            CHECK_THROWS(std::invalid_argument, decoded(stored, 99'999, limit));
            CHECK_THROWS(std::invalid_argument, decoded(stored, 100'001, limit));
            CHECK_THROWS(std::invalid_argument, decoded(stored, 0, limit));
            const Guarded source(100), target(kvtier::codec::max_encoded(100) - 1);
            CHECK_THROWS(std::invalid_argument, encode(source.all(), target.all(), limit));
        }
    }
}

// Set KVTIER_FUZZED to the number of inputs.
TEST(damaged_bytes_do_no_harm) {
    const char* chosen = std::getenv("KVTIER_FUZZED");
    const int inputs = chosen != nullptr ? std::atoi(chosen) : 20'000;
    std::vector<std::pair<std::size_t, Bytes>> stored;
    for (const auto& [name, payload] : payloads()) {
        if (payload.size() > 1000 && payload.size() <= 40'000) {
            for (Encode* encode : encodes) stored.emplace_back(payload.size(), encoded(payload, Vectors::avx512, encode));
        }
    }
    for (int input = 0; input < inputs; ++input) {
        const auto& [length, original] = stored[random_bits() % stored.size()];
        Bytes damaged = original;
        // Heads are where lengths are, so most of the damage is done there.
        for (std::uint32_t flips = random_bits() % 4; flips > 0; --flips) {
            const std::size_t within = random_bits() % 2 ? std::min<std::size_t>(damaged.size(), 24) : damaged.size();
            damaged[random_bits() % within] = static_cast<std::uint8_t>(random_bits());
        }
        if (random_bits() % 8 == 0) damaged.resize(random_bits() % (damaged.size() + 1));
        if (random_bits() % 64 == 0) damaged = noise(random_bits() % 4096);
        for (const Vectors limit : limits) {
            try {
                CHECK(decoded(damaged, length, limit).size() == length);
            } catch (const std::invalid_argument&) {
                // As good.
            }
        }
    }
}

int main() {
    return kvtier::test::run();
}
