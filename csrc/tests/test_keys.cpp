#include <cstdio>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "check.hpp"
#include "kvtier/blake3.hpp"
#include "kvtier/chunk_keys.hpp"

using namespace kvtier::keys;

namespace {

// The official test vectors, truncated to 32 bytes:
// https://github.com/BLAKE3-team/BLAKE3/blob/master/test_vectors/test_vectors.json
const std::pair<std::size_t, const char*> vectors[] = {
    {0, "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"},
    {1, "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213"},
    {1023, "10108970eeda3eb932baac1428c7a2163b0e924c9a9e25b35bba72b28f70bd11"},
    {1024, "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7"},
    {1025, "d00278ae47eb27b34faecf67b4fe263f82d5412916c1ffd97c8cb7fb814b8444"},
    {2048, "e776b6028c7cd22a4d0ba182a8bf62205d2ef576467e838ed6f2529b85fba24a"},
    {2049, "5f4d72f40d7a5f82b15ca2b2e44b1de3c2ef86c426c95c1af0b6879522563030"},
    {3072, "b98cb0ff3623be03326b373de6b9095218513e64f1ee2edd2525c7ad1e5cffd2"},
    {3073, "7124b49501012f81cc7f11ca069ec9226cecb8a2c850cfe644e327d22d3e1cd3"},
    {4096, "015094013f57a5277b59d8475c0501042c0b642e531b0a1c8f58d2163229e969"},
    {4097, "9b4052b38f1c5fc8b1f9ff7ac7b27cd242487b3d890d15c96a1c25b8aa0fb995"},
    {5120, "9cadc15fed8b5d854562b26a9536d9707cadeda9b143978f319ab34230535833"},
    {7169, "a003fc7a51754a9b3c7fae0367ab3d782dccf28855a03d435f8cfe74605e7817"},
};

std::vector<std::uint8_t> pattern(std::size_t length) {
    std::vector<std::uint8_t> bytes(length);
    for (std::size_t at = 0; at < length; ++at) bytes[at] = static_cast<std::uint8_t>(at % 251);
    return bytes;
}

std::string hex(const Hash& hash) {
    std::string text;
    for (const std::uint8_t byte : hash) {
        char digits[3];
        std::snprintf(digits, sizeof(digits), "%02x", byte);
        text += digits;
    }
    return text;
}

Hash blake3(Bytes input) {
    Hasher hasher;
    hasher.add(input);
    return hasher.finish();
}

std::vector<std::uint32_t> numbers(std::size_t count) {
    std::vector<std::uint32_t> tokens;
    for (std::size_t at = 0; at < count; ++at) tokens.push_back(static_cast<std::uint32_t>(at * 2654435761u));
    return tokens;
}

// Straightforward implementation of the key definition in kvtier/memory/keys.py.
Hash key_of(const Hash& before, Words tokens, Bytes extra) {
    const Hash content = blake3({reinterpret_cast<const std::uint8_t*>(tokens.data()), tokens.size_bytes()});
    std::vector<std::uint8_t> message(before.begin(), before.end());
    message.insert(message.end(), content.begin(), content.end());
    message.insert(message.end(), extra.begin(), extra.end());
    return blake3(message);
}

}  // namespace

TEST(hashes_equal_the_test_vectors) {
    for (const auto& [length, expected] : vectors) CHECK(hex(blake3(pattern(length))) == expected);
}

TEST(simd_hashes_equal_scalar_ones) {
    for (const std::size_t length : {4, 60, 64, 68, 1020, 1024, 1028, 2048, 3076, 4096, 5120}) {
        for (const std::size_t count : {0, 1, 2, 3, 4, 7, 8, 15, 16, 17, 33}) {
            const auto input = pattern(length * count);
            for (const LeafHasher& leaves : leaf_hashers()) {
                std::vector<Hash> hashes(count);
                hash_each(input, length, hashes, leaves);
                for (std::size_t at = 0; at < count; ++at) {
                    CHECK(hashes[at] == blake3(Bytes(input).subspan(at * length, length)));
                }
            }
        }
    }
}

TEST(incremental_hashes_equal_one_shot_ones) {
    const auto input = pattern(6000);
    for (const std::size_t piece : {1, 3, 36, 63, 64, 65, 1024, 1025, 4097}) {
        Hasher hasher;
        for (std::size_t at = 0; at < input.size(); at += piece) {
            hasher.add(Bytes(input).subspan(at, std::min(piece, input.size() - at)));
        }
        CHECK(hasher.finish() == blake3(input));
    }
}

TEST(keys_chain_over_chunks_of_any_size) {
    const Hash root = blake3(pattern(5));
    for (const std::size_t chunk_tokens : {1, 6, 7, 8, 16, 23, 64, 256, 300, 1024}) {
        for (const std::size_t count : {0, 1, 15, 16, 17, 255, 256, 257, 1040}) {
            const auto tokens = numbers(count);
            std::vector<Hash> keys(count_chunks(count, chunk_tokens, true));
            chunk_keys(root, tokens, chunk_tokens, {}, keys);
            Hash before = root;
            for (std::size_t index = 0; index < keys.size(); ++index) {
                const Words rest = Words(tokens).subspan(index * chunk_tokens);
                before = key_of(before, rest.first(std::min(chunk_tokens, rest.size())), {});
                CHECK(keys[index] == before);
            }
        }
    }
}

TEST(a_tail_counts_only_if_requested) {
    CHECK(count_chunks(10, 4, false) == 2);
    CHECK(count_chunks(10, 4, true) == 3);
    CHECK(count_chunks(8, 4, true) == 2);
    CHECK(count_chunks(0, 4, true) == 0);
}

TEST(extras_affect_their_chunk_and_later_ones) {
    const Hash root = blake3(pattern(5));
    const auto lora = pattern(2000);
    const Bytes extras[] = {{}, lora};
    const auto tokens = numbers(48);
    std::vector<Hash> plain(3), special(3);
    chunk_keys(root, tokens, 16, {}, plain);
    chunk_keys(root, tokens, 16, extras, special);
    CHECK(plain[0] == special[0]);
    CHECK(special[1] == key_of(plain[0], Words(tokens).subspan(16, 16), lora));
    CHECK(special[2] == key_of(special[1], Words(tokens).subspan(32, 16), {}));
}

int main() {
    return kvtier::test::run();
}
