#include "kvtier/arriving.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace kvtier {

namespace {

// As in kvtier/memory/header.py.
constexpr std::size_t header_bytes = 448;
constexpr std::size_t algorithm_at = 10, stored_bytes_at = 24, checksum_at = 128;
constexpr char start[] = "KVTIER\r\n\x03";  // and a zero: version 3 in two bytes
constexpr std::uint16_t xxh3 = 1;

template <typename Number>
Number number(const std::byte* at) {
    Number value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

}  // namespace

// Nothing of the header is trusted: a wrong length within the memory gives a wrong checksum.
void ArrivingObject::begin() {
    begun_ = true;
    const std::byte* head = memory_.data();
    if (std::memcmp(head, start, sizeof start) != 0) return;
    if (number<std::uint16_t>(head + algorithm_at) != xxh3) return;
    const auto length = number<std::uint64_t>(head + stored_bytes_at);
    if (length < min_checksummed || length > memory_.size() - header_bytes) return;
    payload_.emplace(memory_.subspan(header_bytes, length));
}

void ArrivingObject::arrived(std::size_t total) {
    if (total < header_bytes || total > memory_.size()) return;
    if (!begun_) begin();
    if (!payload_) return;
    payload_->advance(total - header_bytes);
    if (total < memory_.size()) return;
    const Digest digest = payload_->digest();
    verified_ = std::memcmp(digest.data(), memory_.data() + checksum_at, digest.size()) == 0;
    payload_.reset();
}

}  // namespace kvtier
