#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>

namespace kvtier::codec {

// Takes parts of an encoded payload, one after the other.
class Reader {
public:
    explicit Reader(std::span<const std::uint8_t> bytes) : left_(bytes) {}

    bool empty() const { return left_.empty(); }
    std::span<const std::uint8_t> take(std::size_t count) {
        if (count > left_.size()) throw std::invalid_argument("the encoded payload ends too early");
        const auto taken = left_.first(count);
        left_ = left_.subspan(count);
        return taken;
    }
    std::span<const std::uint8_t> rest() { return take(left_.size()); }
    template <typename Value>
    Value value() {
        Value little;
        std::memcpy(&little, take(sizeof little).data(), sizeof little);
        return little;
    }

private:
    std::span<const std::uint8_t> left_;
};

}  // namespace kvtier::codec
