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
    Payload& payload = payloads_[at];
    const auto start = static_cast<std::size_t>(data - payload.memory.data());
    const std::size_t end = std::min(start + length, payload.memory.size());
    if (start > payload.moved || end <= payload.moved) return;
    payload.moved = end;
    if (payload.object) {
        payload.object->arrived(end);
        if (payload.object->verified()) digests_[at].emplace();
    } else if (payload.hash) {
        payload.hash->advance(end);
        if (end == payload.memory.size()) digests_[at] = payload.hash->digest();
    }
}

}  // namespace kvtier
