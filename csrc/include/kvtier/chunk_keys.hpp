// The keys of a prompt's chunks: kvtier/keys.py says what they are made of.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kvtier/blake3.hpp"

namespace kvtier::keys {

using Words = std::span<const std::uint32_t>;

// How many chunks a prompt has; with `tail`, a last one that is shorter counts, too.
constexpr std::size_t count_chunks(std::size_t tokens, std::size_t chunk_tokens, bool tail) {
    return tokens / chunk_tokens + (tail && tokens % chunk_tokens != 0 ? 1 : 0);
}

// The keys of the first `keys.size()` chunks of a prompt, which must have so many.
//
// `parent` is the key before the first. `extras` are what each chunk's KV depends on besides its tokens; fewer
// than chunks where the rest depend on nothing else.
void chunk_keys(const Hash& parent, Words tokens, std::size_t chunk_tokens, std::span<const Bytes> extras,
                std::span<Hash> keys);

}  // namespace kvtier::keys
