// Chunk objects that are verified while they arrive. The format is that of kvtier/memory/header.py.
#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "kvtier/checksum.hpp"

namespace kvtier {

class ArrivingObject {
public:
    // `memory`: where the whole object will be. Not read before something has arrived.
    explicit ArrivingObject(std::span<const std::byte> memory) : memory_(memory) {}

    // The first `total` bytes have arrived: hash the payload among them.
    void arrived(std::size_t total);

    // Whether all of it has arrived, and its payload has the checksum that is in its header. False without checksum.
    // Nothing else of the header is verified.
    bool verified() const { return verified_; }

private:
    void begin();

    std::span<const std::byte> memory_;
    std::optional<Xxh3> payload_;
    bool begun_ = false;
    bool verified_ = false;
};

}  // namespace kvtier
