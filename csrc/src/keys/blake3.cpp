#include "kvtier/blake3.hpp"

#include <algorithm>
#include <cstring>

namespace kvtier::keys {

namespace {

constexpr std::uint32_t blocks_per_leaf = leaf_bytes / block_bytes;

// The chaining value of the parent of two adjacent nodes.
ChainingValue parent_of(const ChainingValue& left, const ChainingValue& right, std::uint32_t flags) {
    std::array<std::uint8_t, block_bytes> children;
    std::memcpy(children.data(), left.data(), hash_bytes);
    std::memcpy(children.data() + hash_bytes, right.data(), hash_bytes);
    ChainingValue value = initial_value;
    compress(value, {children.data(), block_bytes, is_parent | flags, 0});
    return value;
}

Hash hash_of(const ChainingValue& value) {
    return std::bit_cast<Hash>(value);
}

}  // namespace

// Merge equal-sized subtrees, like carries in a binary counter. Not for the last leaf.
void Tree::add(ChainingValue value) {
    ++leaves_;
    for (std::uint64_t size = leaves_; size % 2 == 0; size /= 2) value = parent_of(subtrees_[--depth_], value, no_flag);
    subtrees_[depth_++] = value;
}

Hash Tree::finish(ChainingValue last) {
    while (depth_ > 0) {
        --depth_;
        last = parent_of(subtrees_[depth_], last, depth_ == 0 ? is_root : no_flag);
    }
    return hash_of(last);
}

// Compress a full block only when more input arrives: only then it is known not to be the last.
void Hasher::add(Bytes bytes) {
    while (!bytes.empty()) {
        if (filled_ == block_bytes) {
            if (blocks_ == blocks_per_leaf - 1) {
                compress_block(ends_leaf);
                tree_.add(value_);
                value_ = initial_value;
                blocks_ = 0;
            } else {
                compress_block(no_flag);
            }
        }
        const std::size_t taken = std::min(bytes.size(), block_bytes - filled_);
        std::memcpy(block_.data() + filled_, bytes.data(), taken);
        filled_ += static_cast<std::uint32_t>(taken);
        bytes = bytes.subspan(taken);
    }
}

Hash Hasher::finish() {
    std::memset(block_.data() + filled_, 0, block_bytes - filled_);
    compress_block(ends_leaf | (tree_.leaves() == 0 ? is_root : no_flag));
    return tree_.finish(value_);
}

void Hasher::compress_block(std::uint32_t flags) {
    compress(value_, {block_.data(), filled_, flags | (blocks_ == 0 ? starts_leaf : no_flag), tree_.leaves()});
    filled_ = 0;
    ++blocks_;
}

}  // namespace kvtier::keys
