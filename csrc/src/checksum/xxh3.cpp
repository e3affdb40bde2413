// XXH3-128 of long inputs, as specified in
// https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md

#include <bit>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "kvtier/checksum.hpp"
#include "kvtier/cpu.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvtier {

namespace {

static_assert(std::endian::native == std::endian::little, "reads little-endian words without conversion");

constexpr std::uint64_t prime32_1 = 0x9E3779B1, prime32_2 = 0x85EBCA77, prime32_3 = 0xC2B2AE3D;
constexpr std::uint64_t prime64_1 = 0x9E3779B185EBCA87, prime64_2 = 0xC2B2AE3D27D4EB4F,
                        prime64_3 = 0x165667B19E3779F9, prime64_4 = 0x85EBCA77C2B2AE63,
                        prime64_5 = 0x27D4EB2F165667C5;

constexpr std::size_t lanes = 8;
constexpr std::size_t stripe_bytes = 64;
constexpr std::size_t secret_bytes = 192;
constexpr std::size_t stripes_per_block = (secret_bytes - stripe_bytes) / 8;
constexpr std::size_t block_bytes = stripes_per_block * stripe_bytes;

// "defaultSecret" of the specification.
alignas(64) constexpr unsigned char secret[secret_bytes] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

struct alignas(64) Accumulators {
    std::uint64_t lane[lanes] = {prime32_3, prime64_1, prime64_2, prime64_3,
                                 prime64_4, prime32_2, prime64_5, prime32_1};
};

std::uint64_t word(const void* at) {
    std::uint64_t value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

// Accumulate `stripes` stripes; the secret advances by 8 bytes per stripe.
using Accumulate = void (*)(Accumulators&, const std::byte* input, const unsigned char* key,
                            std::size_t stripes);
using Scramble = void (*)(Accumulators&);

void accumulate_words(Accumulators& sum, const std::byte* input, const unsigned char* key,
                      std::size_t stripes) {
    for (; stripes > 0; --stripes, input += stripe_bytes, key += 8) {
        for (std::size_t lane = 0; lane < lanes; ++lane) {
            const std::uint64_t value = word(input + 8 * lane);
            const std::uint64_t mixed = value ^ word(key + 8 * lane);
            sum.lane[lane ^ 1] += value;
            sum.lane[lane] += (mixed & 0xFFFFFFFF) * (mixed >> 32);
        }
    }
}

void scramble_words(Accumulators& sum) {
    for (std::size_t lane = 0; lane < lanes; ++lane) {
        std::uint64_t value = sum.lane[lane];
        value ^= value >> 47;
        value ^= word(secret + secret_bytes - stripe_bytes + 8 * lane);
        sum.lane[lane] = value * prime32_1;
    }
}

#if defined(__x86_64__)

__attribute__((target("avx2"))) inline __m256i mixed_in(__m256i sum, __m256i value, __m256i key) {
    const __m256i mixed = _mm256_xor_si256(value, key);
    const __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
    const __m256i swapped = _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_add_epi64(product, _mm256_add_epi64(sum, swapped));
}

__attribute__((target("avx2"))) void accumulate_vectors(Accumulators& sum, const std::byte* input,
                                                         const unsigned char* key, std::size_t stripes) {
    auto* lanes_of = reinterpret_cast<__m256i*>(sum.lane);
    __m256i low = _mm256_load_si256(lanes_of);
    __m256i high = _mm256_load_si256(lanes_of + 1);
    for (; stripes > 0; --stripes, input += stripe_bytes, key += 8) {
        const auto* in = reinterpret_cast<const __m256i*>(input);
        const auto* with = reinterpret_cast<const __m256i*>(key);
        low = mixed_in(low, _mm256_loadu_si256(in), _mm256_loadu_si256(with));
        high = mixed_in(high, _mm256_loadu_si256(in + 1), _mm256_loadu_si256(with + 1));
    }
    _mm256_store_si256(lanes_of, low);
    _mm256_store_si256(lanes_of + 1, high);
}

__attribute__((target("avx2"))) void scramble_vectors(Accumulators& sum) {
    auto* lanes_of = reinterpret_cast<__m256i*>(sum.lane);
    const auto* key = reinterpret_cast<const __m256i*>(secret + secret_bytes - stripe_bytes);
    const __m256i prime = _mm256_set1_epi64x(static_cast<long long>(prime32_1));
    for (int half = 0; half < 2; ++half) {
        __m256i value = _mm256_load_si256(lanes_of + half);
        value = _mm256_xor_si256(value, _mm256_srli_epi64(value, 47));
        value = _mm256_xor_si256(value, _mm256_loadu_si256(key + half));
        // A 64 x 32 bit product from two 32 x 32 bit products.
        const __m256i low = _mm256_mul_epu32(value, prime);
        const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(value, 32), prime);
        _mm256_store_si256(lanes_of + half, _mm256_add_epi64(low, _mm256_slli_epi64(high, 32)));
    }
}

#endif

struct Steps {
    Accumulate accumulate;
    Scramble scramble;
};

Steps fastest([[maybe_unused]] bool vectors) {
#if defined(__x86_64__)
    if (vectors && cpu::features().avx2) return {accumulate_vectors, scramble_vectors};
#endif
    return {accumulate_words, scramble_words};
}

void take_all(Accumulators& sum, std::span<const std::byte> bytes, const Steps& steps) {
    const std::byte* input = bytes.data();
    const std::size_t blocks = (bytes.size() - 1) / block_bytes;
    for (std::size_t block = 0; block < blocks; ++block, input += block_bytes) {
        steps.accumulate(sum, input, secret, stripes_per_block);
        steps.scramble(sum);
    }
    steps.accumulate(sum, input, secret, ((bytes.size() - 1) - blocks * block_bytes) / stripe_bytes);
    // The last stripe ends at the end of the input, and may overlap the previous one.
    const std::byte* last = bytes.data() + bytes.size() - stripe_bytes;
    steps.accumulate(sum, last, secret + secret_bytes - stripe_bytes - 7, 1);
}

__extension__ using Wide = unsigned __int128;

std::uint64_t merged(const Accumulators& sum, const unsigned char* key, std::uint64_t start) {
    std::uint64_t result = start;
    for (std::size_t lane = 0; lane < lanes; lane += 2) {
        const Wide product = static_cast<Wide>(sum.lane[lane] ^ word(key + 8 * lane)) *
                             (sum.lane[lane + 1] ^ word(key + 8 * lane + 8));
        result += static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
    }
    result ^= result >> 37;
    result *= 0x165667919E3779F9;
    return result ^ (result >> 32);
}

}  // namespace

std::array<std::byte, 16> xxh3_128(std::span<const std::byte> bytes, bool vectors) {
    if (bytes.size() < min_checksummed) throw std::invalid_argument("input too short: XXH3-128 needs 241 bytes");
    Accumulators sum;
    take_all(sum, bytes, fastest(vectors));
    const std::uint64_t length = bytes.size();
    const std::uint64_t low = merged(sum, secret + 11, length * prime64_1);
    const std::uint64_t high = merged(sum, secret + secret_bytes - stripe_bytes - 11, ~(length * prime64_2));
    std::array<std::byte, 16> digest;
    for (std::size_t at = 0; at < 8; ++at) {
        digest[at] = static_cast<std::byte>(high >> (56 - 8 * at));
        digest[8 + at] = static_cast<std::byte>(low >> (56 - 8 * at));
    }
    return digest;
}

}  // namespace kvtier
