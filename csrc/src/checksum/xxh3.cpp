// XXH3-128 of long inputs, as specified in
// https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "kvtier/checksum.hpp"
#include "kvtier/intrinsics.hpp"

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

// Hardware prefetchers stop at the end of a page, so cold memory is requested one page ahead: 1.3 times as fast on Intel
// Sapphire Rapids, where one core then reads 10 GB/s.
inline void request_ahead(const std::byte* at) {
    __builtin_prefetch(at + 4096);
}

using Sums = std::array<std::uint64_t, lanes>;

constexpr Sums initial_sums = {prime32_3, prime64_1, prime64_2, prime64_3,
                               prime64_4, prime32_2, prime64_5, prime32_1};

std::uint64_t word(const void* at) {
    std::uint64_t value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

// Accumulate `stripes` stripes; the secret advances by 8 bytes per stripe.
void accumulate_words(Sums& sums, const std::byte* input, const unsigned char* key,
                      std::size_t stripes) {
    for (; stripes > 0; --stripes, input += stripe_bytes, key += 8) {
        for (std::size_t lane = 0; lane < lanes; ++lane) {
            const std::uint64_t value = word(input + 8 * lane);
            const std::uint64_t mixed = value ^ word(key + 8 * lane);
            sums[lane ^ 1] += value;
            sums[lane] += (mixed & 0xFFFFFFFF) * (mixed >> 32);
        }
    }
}

void scramble_words(Sums& sums) {
    for (std::size_t lane = 0; lane < lanes; ++lane) {
        std::uint64_t value = sums[lane];
        value ^= value >> 47;
        value ^= word(secret + secret_bytes - stripe_bytes + 8 * lane);
        sums[lane] = value * prime32_1;
    }
}

void add_blocks_words(Sums& sums, const std::byte* input, std::size_t blocks) {
    for (; blocks > 0; --blocks, input += block_bytes) {
        accumulate_words(sums, input, secret, stripes_per_block);
        scramble_words(sums);
    }
}

#if defined(__x86_64__)

__attribute__((target("avx2"))) inline __m256i mixed_in(__m256i sum, __m256i value, __m256i key) {
    const __m256i mixed = _mm256_xor_si256(value, key);
    const __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
    const __m256i swapped = _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_add_epi64(product, _mm256_add_epi64(sum, swapped));
}

__attribute__((target("avx2"))) inline __m256i scrambled(__m256i value, __m256i key) {
    value = _mm256_xor_si256(value, _mm256_srli_epi64(value, 47));
    value = _mm256_xor_si256(value, key);
    // A 64 x 32 bit product from two 32 x 32 bit products.
    const __m256i prime = _mm256_set1_epi64x(static_cast<long long>(prime32_1));
    const __m256i low = _mm256_mul_epu32(value, prime);
    const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(value, 32), prime);
    return _mm256_add_epi64(low, _mm256_slli_epi64(high, 32));
}

__attribute__((target("avx2"))) void add_blocks_avx2(Sums& sums, const std::byte* input, std::size_t blocks) {
    auto* halves = reinterpret_cast<__m256i*>(sums.data());
    const auto* last_key = reinterpret_cast<const __m256i*>(secret + secret_bytes - stripe_bytes);
    __m256i low = _mm256_load_si256(halves);
    __m256i high = _mm256_load_si256(halves + 1);
    for (; blocks > 0; --blocks) {
        for (std::size_t stripe = 0; stripe < stripes_per_block; ++stripe, input += stripe_bytes) {
            request_ahead(input);
            const auto* in = reinterpret_cast<const __m256i*>(input);
            const auto* key = reinterpret_cast<const __m256i*>(secret + 8 * stripe);
            low = mixed_in(low, _mm256_loadu_si256(in), _mm256_loadu_si256(key));
            high = mixed_in(high, _mm256_loadu_si256(in + 1), _mm256_loadu_si256(key + 1));
        }
        low = scrambled(low, _mm256_loadu_si256(last_key));
        high = scrambled(high, _mm256_loadu_si256(last_key + 1));
    }
    _mm256_store_si256(halves, low);
    _mm256_store_si256(halves + 1, high);
}

// All keys of a block stay in registers.
__attribute__((target("avx512f"))) void add_blocks_avx512(Sums& sums, const std::byte* input, std::size_t blocks) {
    __m512i keys[stripes_per_block];
#pragma GCC unroll 16
    for (std::size_t stripe = 0; stripe < stripes_per_block; ++stripe) {
        keys[stripe] = _mm512_loadu_si512(secret + 8 * stripe);
    }
    const __m512i last_key = _mm512_loadu_si512(secret + secret_bytes - stripe_bytes);
    const __m512i prime = _mm512_set1_epi64(static_cast<long long>(prime32_1));
    __m512i sum = _mm512_load_si512(sums.data());
    for (; blocks > 0; --blocks, input += block_bytes) {
#pragma GCC unroll 16
        for (std::size_t stripe = 0; stripe < stripes_per_block; ++stripe) {
            request_ahead(input + stripe * stripe_bytes);
            const __m512i value = _mm512_loadu_si512(input + stripe * stripe_bytes);
            const __m512i mixed = _mm512_xor_si512(value, keys[stripe]);
            const __m512i product = _mm512_mul_epu32(mixed, _mm512_srli_epi64(mixed, 32));
            const __m512i swapped = _mm512_shuffle_epi32(value, _MM_PERM_BADC);
            sum = _mm512_add_epi64(sum, _mm512_add_epi64(product, swapped));
        }
        sum = _mm512_xor_si512(_mm512_xor_si512(sum, _mm512_srli_epi64(sum, 47)), last_key);
        const __m512i low = _mm512_mul_epu32(sum, prime);
        const __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(sum, 32), prime);
        sum = _mm512_add_epi64(low, _mm512_slli_epi64(high, 32));
    }
    _mm512_store_si512(sums.data(), sum);
}

#endif

void add_blocks(Sums& sums, const std::byte* input, std::size_t blocks, [[maybe_unused]] Vectors vectors) {
#if defined(__x86_64__)
    if (vectors == Vectors::avx512) return add_blocks_avx512(sums, input, blocks);
    if (vectors == Vectors::avx2) return add_blocks_avx2(sums, input, blocks);
#endif
    add_blocks_words(sums, input, blocks);
}

Vectors fastest(Vectors limit) {
    const Vectors here = cpu::features().avx512 ? Vectors::avx512
                         : cpu::features().avx2 ? Vectors::avx2
                                                : Vectors::none;
    return std::min(here, limit);
}

__extension__ using Wide = unsigned __int128;

std::uint64_t merged(const Sums& sums, const unsigned char* key, std::uint64_t start) {
    std::uint64_t result = start;
    for (std::size_t lane = 0; lane < lanes; lane += 2) {
        const Wide product = static_cast<Wide>(sums[lane] ^ word(key + 8 * lane)) *
                             (sums[lane + 1] ^ word(key + 8 * lane + 8));
        result += static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
    }
    result ^= result >> 37;
    result *= 0x165667919E3779F9;
    return result ^ (result >> 32);
}

}  // namespace

Xxh3::Xxh3(std::span<const std::byte> bytes, Vectors limit)
    : bytes_(bytes), vectors_(fastest(limit)), sums_(initial_sums) {
    if (bytes.size() < min_checksummed) throw std::invalid_argument("input too short: XXH3-128 needs 241 bytes");
}

// Only blocks that are followed by something: the last one is different.
void Xxh3::advance(std::size_t available) {
    available = std::min(available, bytes_.size());
    const std::size_t blocks = available > 0 ? (available - 1) / block_bytes : 0;
    if (blocks <= blocks_) return;
    add_blocks(sums_, bytes_.data() + blocks_ * block_bytes, blocks - blocks_, vectors_);
    blocks_ = blocks;
}

Digest Xxh3::digest() {
    advance(bytes_.size());
    Sums sums = sums_;
    const std::size_t hashed = blocks_ * block_bytes;
    accumulate_words(sums, bytes_.data() + hashed, secret, ((bytes_.size() - 1) - hashed) / stripe_bytes);
    // The last stripe ends at the end of the input, and may overlap the previous one.
    const std::byte* last = bytes_.data() + bytes_.size() - stripe_bytes;
    accumulate_words(sums, last, secret + secret_bytes - stripe_bytes - 7, 1);
    const std::uint64_t length = bytes_.size();
    const std::uint64_t low = merged(sums, secret + 11, length * prime64_1);
    const std::uint64_t high = merged(sums, secret + secret_bytes - stripe_bytes - 11, ~(length * prime64_2));
    Digest digest;
    for (std::size_t at = 0; at < 8; ++at) {
        digest[at] = static_cast<std::byte>(high >> (56 - 8 * at));
        digest[8 + at] = static_cast<std::byte>(low >> (56 - 8 * at));
    }
    return digest;
}

Digest xxh3_128(std::span<const std::byte> bytes, Vectors limit) {
    return Xxh3(bytes, limit).digest();
}

}  // namespace kvtier
