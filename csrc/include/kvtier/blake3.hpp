// BLAKE3, unkeyed, 32 bytes of output: https://github.com/BLAKE3-team/BLAKE3-specs (blake3.pdf, sections 2.1
// to 2.4, and 5.3 for hashing several inputs side by side).
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtier::keys {

static_assert(std::endian::native == std::endian::little, "elsewhere kvtier does without its native core");

inline constexpr std::size_t hash_bytes = 32;
inline constexpr std::size_t block_bytes = 64;
// What BLAKE3 calls a chunk: a part of its input, of whose values it makes a tree. Nothing of a prompt.
inline constexpr std::size_t leaf_bytes = 1024;

using Bytes = std::span<const std::uint8_t>;
using Hash = std::array<std::uint8_t, hash_bytes>;
using ChainingValue = std::array<std::uint32_t, 8>;

inline constexpr ChainingValue initial_value{0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
                                             0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};

// What a block is, added to its compression.
enum Flag : std::uint32_t { no_flag = 0, starts_leaf = 1, ends_leaf = 2, is_parent = 4, is_root = 8 };

struct Block {
    const std::uint8_t* bytes;  // 64 of them, zero beyond `length`
    std::uint32_t length;
    std::uint32_t flags;
    std::uint64_t counter;
};

// Replaces the chaining value by that after one more block.
void compress(ChainingValue& value, const Block& block);

// The values of an input's leaves, joined as they come: one waits for each bit of their number.
class Tree {
   public:
    // The next leaf, which is not the last.
    void add(ChainingValue value);

    // The hash, where `last` is the value of the last of several leaves; it is done with then.
    Hash finish(ChainingValue last);

    std::uint64_t leaves() const { return leaves_; }

   private:
    static constexpr std::size_t most_subtrees = 54;

    std::uint64_t leaves_ = 0;
    std::size_t depth_ = 0;
    std::array<ChainingValue, most_subtrees> subtrees_;
};

// Takes the input in pieces. Not thread-safe; may be moved and copied.
class Hasher {
   public:
    void add(Bytes bytes);

    // The hash of all that was added. It is done with then: what is hashed next needs a new one.
    Hash finish();

   private:
    void compress_block(std::uint32_t flags);

    ChainingValue value_ = initial_value;
    std::array<std::uint8_t, block_bytes> block_;
    std::uint32_t filled_ = 0;
    std::uint32_t blocks_ = 0;
    Tree tree_;
};

inline constexpr std::size_t most_lanes = 16;

// As many leaves of equal length as a vector has lanes, side by side: `length` bytes at each of `inputs`, 1 to 1024
// and a multiple of 4, and what flags their last blocks have besides those of a leaf.
struct Leaves {
    std::array<const std::uint8_t*, most_lanes> inputs;
    std::size_t length;
    std::uint64_t counter;
    std::uint32_t flags;
};

struct LeafHasher {
    std::size_t lanes;
    void (*hash)(const Leaves& leaves, ChainingValue* values);
};

// All that this processor can run, the widest first.
std::span<const LeafHasher> leaf_hashers();

// The hash of each `length` bytes of `input`, as many as there are `hashes`; `length` is a multiple of 4, and not 0.
void hash_each(Bytes input, std::size_t length, std::span<Hash> hashes,
               const LeafHasher& leaves = leaf_hashers().front());

}  // namespace kvtier::keys
