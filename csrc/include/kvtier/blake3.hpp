// BLAKE3, unkeyed, 32 bytes of output: https://github.com/BLAKE3-team/BLAKE3-specs (blake3.pdf, sections 2.1
// to 2.4). Made for many short inputs one after another, each of which depends on the one before: what counts
// is how long one compression takes, not how many run side by side.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtier::keys {

inline constexpr std::size_t hash_bytes = 32;
inline constexpr std::size_t block_bytes = 64;

using Hash = std::array<std::uint8_t, hash_bytes>;
using ChainingValue = std::array<std::uint32_t, 8>;

inline constexpr ChainingValue initial_value{0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
                                             0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};

// What a block is, added to its compression.
enum Flag : std::uint32_t { no_flag = 0, starts_chunk = 1, ends_chunk = 2, is_parent = 4, is_root = 8 };

struct Block {
    const std::uint8_t* bytes;  // 64 of them, zero beyond `length`
    std::uint32_t length;
    std::uint32_t flags;
    std::uint64_t counter;
};

// Replaces the chaining value by that after one more block.
using Compress = void (*)(ChainingValue& value, const Block& block);

void compress_portable(ChainingValue& value, const Block& block);
#if defined(__x86_64__)
// For processors with SSE4.1: a quarter less time than the portable one.
void compress_sse41(ChainingValue& value, const Block& block);
// For those with AVX-512 (F and VL): fewer instructions, beside which the next tokens are read meanwhile.
void compress_avx512(ChainingValue& value, const Block& block);
#endif

// All that this processor can run, the fastest first.
std::span<const Compress> compressions();

inline Compress best_compress() {
    return compressions().front();
}

// Takes the input in pieces. Not thread-safe; may be moved and copied.
class Hasher {
   public:
    explicit Hasher(Compress compress = best_compress()) : compress_(compress) {}

    void add(std::span<const std::uint8_t> bytes);

    // The hash of all that was added. It is done with then: what is hashed next needs a new one.
    Hash finish();

   private:
    // Subtrees that wait for one beside them: one for each bit of the number of chunks.
    static constexpr std::size_t most_subtrees = 54;

    void compress_block(std::uint32_t flags);
    void end_chunk();
    void add_left(std::uint32_t flags);

    Compress compress_;
    ChainingValue value_ = initial_value;
    std::array<std::uint8_t, block_bytes> block_;
    std::uint32_t filled_ = 0;
    std::uint32_t blocks_ = 0;
    std::uint64_t chunks_ = 0;
    std::array<ChainingValue, most_subtrees> subtrees_;
    std::size_t depth_ = 0;
};

}  // namespace kvtier::keys
