#include "kvtier/chunk_keys.hpp"

#include <algorithm>

namespace kvtier::keys {

namespace {

Bytes bytes_of(Words words) {
    return {reinterpret_cast<const std::uint8_t*>(words.data()), words.size_bytes()};
}

Hash hash_of(Bytes bytes) {
    Hasher hasher;
    hasher.add(bytes);
    return hasher.finish();
}

}  // namespace

void chunk_keys(const Hash& parent, Words tokens, std::size_t chunk_tokens, std::span<const Bytes> extras,
                std::span<Hash> keys) {
    // First hash the tokens of all chunks, which are independent and can use SIMD; then only one block per chunk
    // remains for the sequential chain.
    const std::size_t whole = std::min(keys.size(), tokens.size() / chunk_tokens);
    hash_each(bytes_of(tokens), chunk_tokens * sizeof(std::uint32_t), keys.first(whole));
    if (whole < keys.size()) keys[whole] = hash_of(bytes_of(tokens.subspan(whole * chunk_tokens)));
    const Hash* before = &parent;
    for (std::size_t index = 0; index < keys.size(); ++index) {
        Hasher hasher;
        hasher.add(*before);
        hasher.add(keys[index]);
        if (index < extras.size()) hasher.add(extras[index]);
        keys[index] = hasher.finish();
        before = &keys[index];
    }
}

void block_hashes(Words tokens, std::size_t block_tokens, std::span<Hash> hashes) {
    hash_each(bytes_of(tokens), block_tokens * sizeof(std::uint32_t), hashes);
}

}  // namespace kvtier::keys
