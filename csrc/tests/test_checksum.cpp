#include "kvtier/checksum.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "check.hpp"
#include "kvtier/arriving.hpp"
#include "kvtier/disk/write_hashed.hpp"

using kvtier::Vectors;

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
        for (const Vectors limit : {Vectors::none, Vectors::avx2, Vectors::avx512}) {
            CHECK(hex(kvtier::xxh3_128(pattern(expected.length), limit)) == expected.digest);
        }
    }
}

TEST(parts_give_the_same_digest) {
    const std::vector<std::byte> bytes = pattern(100003);
    for (const std::size_t part : {1UL, 63UL, 1024UL, 1025UL, 65536UL}) {
        kvtier::Xxh3 hash(bytes);
        for (std::size_t arrived = 0; arrived < bytes.size(); arrived += part) hash.advance(arrived);
        CHECK(hex(hash.digest()) == "7ff59a962ff165b9507db29bd764a682");
    }
}

// What has not arrived is not read: it is other bytes until then.
TEST(only_what_has_arrived_is_hashed) {
    const std::vector<std::byte> bytes = pattern(5000);
    std::vector<std::byte> arriving(bytes.size());
    kvtier::Xxh3 hash(arriving);
    for (std::size_t arrived = 0; arrived < bytes.size(); arrived += 1000) {
        std::copy_n(bytes.begin(), arrived, arriving.begin());
        hash.advance(arrived);
    }
    arriving = bytes;
    CHECK(hash.digest() == kvtier::xxh3_128(bytes));
}

namespace {

constexpr std::size_t header_bytes = 448;

void put(std::vector<std::byte>& object, std::size_t at, const void* value, std::size_t length) {
    std::memcpy(object.data() + at, value, length);
}

// A chunk object with the parts of a header that are read natively.
std::vector<std::byte> sealed(std::uint64_t payload_bytes, std::size_t object_bytes) {
    std::vector<std::byte> object = pattern(object_bytes);
    const std::uint16_t version = 3, algorithm = 1;
    put(object, 0, "KVTIER\r\n", 8);
    put(object, 8, &version, sizeof version);
    put(object, 10, &algorithm, sizeof algorithm);
    put(object, 24, &payload_bytes, sizeof payload_bytes);
    const auto digest = kvtier::xxh3_128({object.data() + header_bytes, static_cast<std::size_t>(payload_bytes)});
    put(object, 128, digest.data(), digest.size());
    return object;
}

bool verified(const std::vector<std::byte>& object, std::size_t part = 4096) {
    kvtier::ArrivingObject arriving(object);
    for (std::size_t arrived = part; arrived < object.size(); arrived += part) {
        arriving.arrived(arrived);
        CHECK(!arriving.verified());
    }
    arriving.arrived(object.size());
    return arriving.verified();
}

}  // namespace

TEST(arriving_objects_are_verified) {
    const std::vector<std::byte> object = sealed(19'000, 20'480);
    for (const std::size_t part : {1UL, 448UL, 4096UL, 20'480UL}) CHECK(verified(object, part));
}

TEST(each_changed_byte_of_the_payload_is_found) {
    std::vector<std::byte> object = sealed(3'000, 4'096);
    for (std::size_t at = header_bytes; at < header_bytes + 3'000; ++at) {
        object[at] ^= std::byte{1};
        CHECK(!verified(object));
        object[at] ^= std::byte{1};
    }
    CHECK(verified(object));
}

TEST(objects_without_a_usable_header_are_not_verified) {
    std::vector<std::byte> object = sealed(3'000, 4'096);
    for (const std::size_t at : {0UL, 7UL, 8UL, 9UL, 10UL, 128UL, 143UL}) {
        object[at] ^= std::byte{1};
        CHECK(!verified(object));
        object[at] ^= std::byte{1};
    }
    for (const std::uint64_t length : {std::uint64_t{0}, std::uint64_t{240}, std::uint64_t{3'649}, ~std::uint64_t{0}}) {
        put(object, 24, &length, sizeof length);
        CHECK(!verified(object));
    }
    CHECK(!verified(std::vector<std::byte>(447)));
    CHECK(!verified({}));
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

TEST(objects_are_hashed_as_they_are_written) {
    for (const std::size_t pages : {1, 2, 1000}) {
        const std::vector<std::byte> object = pattern(pages * 4096);
        const std::span<const std::byte> payload(object.data() + 448, object.size() - 1000);
        const int file = ::memfd_create("object", MFD_CLOEXEC);
        CHECK(kvtier::disk::write_hashed(file, object, payload) == kvtier::xxh3_128(payload));
        std::vector<std::byte> written(object.size());
        CHECK(::pread(file, written.data(), written.size(), 0) == ssize_t(object.size()));
        CHECK(written == object);
        ::close(file);
    }
}

TEST(failed_writes_throw) {
    const std::vector<std::byte> object = pattern(8192);
    CHECK_THROWS(std::system_error, kvtier::disk::write_hashed(-1, object, std::span(object).subspan(448, 7000)));
}

int main() { return kvtier::test::run(); }
