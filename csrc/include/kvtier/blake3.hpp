// BLAKE3, unkeyed, 32 bytes of output: https://github.com/BLAKE3-team/BLAKE3-specs (blake3.pdf, sections 2.1
// to 2.4, and 5.3 for hashing several inputs side by side).
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtier::keys {

static_assert(std::endian::native == std::endian::little, "the native core requires a little-endian CPU");

inline constexpr std::size_t hash_bytes = 32;
inline constexpr std::size_t block_bytes = 64;
// Size of what BLAKE3 calls a chunk: a leaf of its tree. Not a chunk of a prompt.
inline constexpr std::size_t leaf_bytes = 1024;

using Bytes = std::span<const std::uint8_t>;
using Hash = std::array<std::uint8_t, hash_bytes>;
using ChainingValue = std::array<std::uint32_t, 8>;

inline constexpr ChainingValue initial_value{0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
                                             0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};

// Domain separation flags of a compression.
enum Flag : std::uint32_t { no_flag = 0, starts_leaf = 1, ends_leaf = 2, is_parent = 4, is_root = 8 };

struct Block {
    const std::uint8_t* bytes;  // 64 bytes, zero beyond `length`
    std::uint32_t length;
    std::uint32_t flags;
    std::uint64_t counter;
};

// Update the chaining value with one block.
void compress(ChainingValue& value, const Block& block);

// Merges the chaining values of leaves incrementally: holds one subtree per set bit of their number.
class Tree {
   public:
    // Add the next leaf, which must not be the last one.
    void add(ChainingValue value);

    // Return the hash, given the value of the last of several leaves. Do not use the tree afterwards.
    Hash finish(ChainingValue last);

    std::uint64_t leaves() const { return leaves_; }

   private:
    static constexpr std::size_t max_subtrees = 54;

    std::uint64_t leaves_ = 0;
    std::size_t depth_ = 0;
    std::array<ChainingValue, max_subtrees> subtrees_;
};

// Incremental hasher. Not thread-safe; can be moved and copied.
class Hasher {
   public:
    void add(Bytes bytes);

    // Return the hash of all bytes added. Do not use the hasher afterwards.
    Hash finish();

   private:
    void compress_block(std::uint32_t flags);

    ChainingValue value_ = initial_value;
    std::array<std::uint8_t, block_bytes> block_;
    std::uint32_t filled_ = 0;
    std::uint32_t blocks_ = 0;
    Tree tree_;
};

inline constexpr std::size_t max_lanes = 16;

// One leaf of equal length per vector lane: `length` bytes at each of `inputs`, 4 to 1024 and a multiple of 4. `flags`:
// those of their last blocks, in addition to those of a leaf.
struct Leaves {
    std::array<const std::uint8_t*, max_lanes> inputs;
    std::size_t length;
    std::uint64_t counter;
    std::uint32_t flags;
};

struct LeafHasher {
    std::size_t lanes;
    void (*hash)(const Leaves& leaves, ChainingValue* values);
};

// The implementations that this CPU supports, widest first.
std::span<const LeafHasher> leaf_hashers();

// Hash consecutive inputs of `length` bytes each, one per element of `hashes`. `length` is a multiple of 4, and not 0.
void hash_each(Bytes input, std::size_t length, std::span<Hash> hashes,
               const LeafHasher& leaves = leaf_hashers().front());

}  // namespace kvtier::keys
