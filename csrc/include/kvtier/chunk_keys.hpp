// The keys of a prompt's chunks, as defined in kvtier/memory/keys.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kvtier/blake3.hpp"

namespace kvtier::keys {

using Words = std::span<const std::uint32_t>;

// The number of chunks of a prompt; with `tail`, including a shorter last one.
constexpr std::size_t count_chunks(std::size_t tokens, std::size_t chunk_tokens, bool tail) {
    return tokens / chunk_tokens + (tail && tokens % chunk_tokens != 0 ? 1 : 0);
}

// Compute the keys of the first `keys.size()` chunks of a prompt, which must have that many.
//
// `parent`: the key before the first chunk. `extras`: what each chunk's KV depends on besides its tokens; chunks beyond
// its end have none.
void chunk_keys(const Hash& parent, Words tokens, std::size_t chunk_tokens, std::span<const Bytes> extras,
                std::span<Hash> keys);

// Compute the hashes of the first `hashes.size()` blocks of a prompt, which must have that many whole ones.
void block_hashes(Words tokens, std::size_t block_tokens, std::span<Hash> hashes);

}  // namespace kvtier::keys
