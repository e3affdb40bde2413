// The keys of a prompt's chunks: kvtier/keys.py says what they are made of.
#pragma once

#include <algorithm>
#include <bit>
#include <concepts>
#include <cstdint>
#include <span>

#include "kvtier/blake3.hpp"

namespace kvtier::keys {

using Bytes = std::span<const std::uint8_t>;
using Words = std::span<const std::uint32_t>;

// Where token ids come from: `count` of them from `at` on, valid until the next are read.
template <typename Source>
concept TokenSource = requires(Source& source, std::size_t number) {
    { source.size() } -> std::convertible_to<std::size_t>;
    { source.read(number, number) } -> std::same_as<Words>;
};

// Read at a time: as many as a block of the hash has. One compression is a long chain of short steps, beside
// which the processor has the next tokens ready.
inline constexpr std::size_t tokens_a_read = block_bytes / sizeof(std::uint32_t);
// Behind the parent's key and the number of tokens; from then on whole blocks are added.
inline constexpr std::size_t tokens_in_first_block = tokens_a_read - hash_bytes / sizeof(std::uint32_t) - 1;

inline void add_words(Hasher& hasher, Words words) {
    if constexpr (std::endian::native == std::endian::little) {
        hasher.add({reinterpret_cast<const std::uint8_t*>(words.data()), words.size_bytes()});
        return;
    }
    for (const std::uint32_t word : words) {
        const std::uint8_t bytes[] = {static_cast<std::uint8_t>(word), static_cast<std::uint8_t>(word >> 8),
                                      static_cast<std::uint8_t>(word >> 16), static_cast<std::uint8_t>(word >> 24)};
        hasher.add(bytes);
    }
}

// How many chunks a prompt has; with `tail`, a last one that is shorter counts, too.
constexpr std::size_t count_chunks(std::size_t tokens, std::size_t chunk_tokens, bool tail) {
    return tokens / chunk_tokens + (tail && tokens % chunk_tokens != 0 ? 1 : 0);
}

// The keys of the first `keys.size()` chunks of a prompt, which must have so many.
//
// `parent` is the key before the first. `extras` are what each chunk's KV depends on besides its tokens; fewer
// than chunks where the rest depend on nothing else. Throws what the source throws.
template <TokenSource Source>
void chunk_keys(const Hash& parent, Source& tokens, std::size_t chunk_tokens, std::span<const Bytes> extras,
                std::span<Hash> keys) {
    const Hash* before = &parent;
    for (std::size_t index = 0; index < keys.size(); ++index) {
        std::size_t at = index * chunk_tokens;
        const std::size_t end = std::min(at + chunk_tokens, tokens.size());
        const auto count = static_cast<std::uint32_t>(end - at);
        Hasher hasher;
        hasher.add(*before);
        add_words(hasher, {&count, 1});
        std::size_t most = tokens_in_first_block;
        while (at < end) {
            const Words words = tokens.read(at, std::min(most, end - at));
            add_words(hasher, words);
            at += words.size();
            most = tokens_a_read;
        }
        if (index < extras.size()) hasher.add(extras[index]);
        keys[index] = hasher.finish();
        before = &keys[index];
    }
}

}  // namespace kvtier::keys
