#include "kvtier/checksum.hpp"

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.hpp"

namespace {

// Test input: byte i is (i * 2654435761) >> 24. The expected digests are the output of xxhsum -H2.
std::vector<std::byte> pattern(std::size_t length) {
    std::vector<std::byte> bytes(length);
    for (std::size_t at = 0; at < length; ++at) {
        bytes[at] = static_cast<std::byte>(static_cast<std::uint32_t>(at * 2654435761U) >> 24);
    }
    return bytes;
}

std::string hex(const std::array<std::byte, 16>& digest) {
    std::string text;
    for (const std::byte byte : digest) {
        for (const int half : {static_cast<int>(byte) >> 4, static_cast<int>(byte) & 15}) {
            text += "0123456789abcdef"[half];
        }
    }
    return text;
}

struct Known {
    std::size_t length;
    const char* digest;
};

constexpr Known known[] = {
    {241, "e817e20e53e42a8c2d431e984c441f15"},
    {255, "881e14b0b5c3e3396cb5279bb1267b3b"},
    {256, "96b9c38548dd27ee1369aaf85f8b805a"},
    {257, "35a538148755eb6353d08d96173615de"},
    {1023, "5687286dd310b7db4e30bb611faa8f67"},
    {1024, "df4c8b9ff9715101e99def1145f12936"},
    {1025, "63e845aab7eb695f83cba9b371e4e7f4"},
    {1088, "53fd1378f51e868e8e7e69b3a7124813"},
    {1089, "65a190759c293e92a958a59c9718acc1"},
    {2048, "fb68e3b1bb55b50253275d58cfba68fd"},
    {2049, "e8a3f6e37b449e743cd32460d504d215"},
    {65536, "ce4ad9e587f44a1920605b76ceddc43b"},
    {100003, "7ff59a962ff165b9507db29bd764a682"},
};

}  // namespace

TEST(digests_equal_the_reference) {
    for (const Known& expected : known) {
        CHECK(hex(kvtier::xxh3_128(pattern(expected.length))) == expected.digest);
        CHECK(hex(kvtier::xxh3_128(pattern(expected.length), false)) == expected.digest);
    }
}

TEST(unaligned_memory_gives_the_same_digest) {
    const std::vector<std::byte> bytes = pattern(5000);
    std::vector<std::byte> moved(bytes.size() + 3);
    for (std::size_t shift = 1; shift < 4; ++shift) {
        std::copy(bytes.begin(), bytes.end(), moved.begin() + static_cast<std::ptrdiff_t>(shift));
        CHECK(kvtier::xxh3_128({moved.data() + shift, bytes.size()}) == kvtier::xxh3_128(bytes));
    }
}

TEST(short_inputs_throw) {
    CHECK_THROWS(std::invalid_argument, kvtier::xxh3_128(pattern(240)));
    CHECK_THROWS(std::invalid_argument, kvtier::xxh3_128({}));
}

int main() { return kvtier::test::run(); }
