#include "kvtier/hashes.hpp"

#include <algorithm>

namespace kvtier {

void Hashes::add(std::span<const std::byte> memory, bool object) {
    Payload payload{memory, 0, std::nullopt, std::nullopt};
    if (object) {
        payload.object.emplace(memory);
    } else if (memory.size() >= min_checksummed) {
        payload.hash.emplace(memory);
    }
    payloads_.push_back(std::move(payload));
    digests_.emplace_back();
}

void Hashes::move(const std::byte* data, std::size_t length) {
    const auto holds = [&](std::size_t at) {
        const std::byte* start = payloads_[at].memory.data();
        return data >= start && data < start + payloads_[at].memory.size();
    };
    // In order, mostly; those that were not granted are skipped.
    std::size_t at = at_;
    while (at < payloads_.size() && !holds(at)) ++at;
    if (at == payloads_.size()) return;
    at_ = at;
    const std::size_t start = static_cast<std::size_t>(data - payloads_[at].memory.data());
    if (start <= payloads_[at].moved) advance(std::min(start + length, payloads_[at].memory.size()));
}

void Hashes::advance(std::size_t moved) {
    Payload& payload = payloads_[at_];
    if (moved <= payload.moved) return;
    payload.moved = moved;
    const bool complete = moved == payload.memory.size();
    if (payload.object) {
        payload.object->arrived(moved);
        if (payload.object->verified()) digests_[at_].emplace();
    } else if (payload.hash) {
        payload.hash->advance(moved);
        if (complete) digests_[at_] = payload.hash->digest();
    }
}

}  // namespace kvtier
