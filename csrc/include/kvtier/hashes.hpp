// Payloads that are hashed while a conversation moves them, so that their bytes are in the CPU's caches.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "kvtier/arriving.hpp"
#include "kvtier/checksum.hpp"

namespace kvtier {

class Hashes {
public:
    // Hash what is moved of `memory`; with `object` only the payload of this chunk object (ArrivingObject). Not read
    // before the bytes are given to `move`.
    void add(std::span<const std::byte> memory, bool object);

    // These bytes have arrived, or are about to be sent. Those of one payload count in order only.
    void move(const std::byte* data, std::size_t length);

    // The digest of each payload; none if not all of it has moved. For an object that has the checksum which is in
    // its header: zeros.
    const std::vector<std::optional<Digest>>& digests() const { return digests_; }

private:
    struct Payload {
        std::span<const std::byte> memory;
        std::size_t moved = 0;
        std::optional<ArrivingObject> object;
        std::optional<Xxh3> hash;
    };

    std::vector<Payload> payloads_;
    std::vector<std::optional<Digest>> digests_;
    std::size_t at_ = 0;  // The payload that is moved now.
};

}  // namespace kvtier
