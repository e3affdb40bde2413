#include "kvtier/blake3.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

namespace kvtier::keys {

namespace {

// Of the hash, not of a prompt: BLAKE3's own chunks.
constexpr std::uint32_t blocks_a_chunk = 16;

void store(const ChainingValue& value, std::uint8_t* bytes) {
    if constexpr (std::endian::native == std::endian::little) {
        // What is read back at once in vectors had better not be written byte by byte.
        std::memcpy(bytes, value.data(), sizeof(value));
        return;
    }
    for (std::size_t word = 0; word < value.size(); ++word) {
        for (std::size_t byte = 0; byte < 4; ++byte) {
            bytes[4 * word + byte] = static_cast<std::uint8_t>(value[word] >> (8 * byte));
        }
    }
}

std::vector<Compress> find_compressions() {
    std::vector<Compress> found;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl")) found.push_back(compress_avx512);
    if (__builtin_cpu_supports("sse4.1")) found.push_back(compress_sse41);
#endif
    found.push_back(compress_portable);
    return found;
}

}  // namespace

std::span<const Compress> compressions() {
    static const std::vector<Compress> found = find_compressions();
    return found;
}

// A full block waits until more comes: only then is it known not to be the last.
void Hasher::add(std::span<const std::uint8_t> bytes) {
    while (!bytes.empty()) {
        if (filled_ == block_bytes) {
            if (blocks_ == blocks_a_chunk - 1) {
                end_chunk();
            } else {
                compress_block(no_flag);
            }
        }
        const std::size_t taken = std::min(bytes.size(), block_bytes - filled_);
        if (taken == block_bytes) {
            std::memcpy(block_.data(), bytes.data(), block_bytes);  // Of a known length: no call.
        } else {
            std::memcpy(block_.data() + filled_, bytes.data(), taken);
        }
        filled_ += static_cast<std::uint32_t>(taken);
        bytes = bytes.subspan(taken);
    }
}

Hash Hasher::finish() {
    std::memset(block_.data() + filled_, 0, block_bytes - filled_);
    compress_block(ends_chunk | (depth_ == 0 ? is_root : no_flag));
    while (depth_ > 0) add_left(depth_ == 1 ? is_root : no_flag);
    Hash hash;
    store(value_, hash.data());
    return hash;
}

void Hasher::compress_block(std::uint32_t flags) {
    compress_(value_, {block_.data(), filled_, flags | (blocks_ == 0 ? starts_chunk : no_flag), chunks_});
    filled_ = 0;
    ++blocks_;
}

// A chunk that is not the last joins every subtree of its own size, as a carry runs through a binary number.
void Hasher::end_chunk() {
    compress_block(ends_chunk);
    ++chunks_;
    for (std::uint64_t size = chunks_; size % 2 == 0; size /= 2) add_left(no_flag);
    subtrees_[depth_++] = value_;
    value_ = initial_value;
    blocks_ = 0;
}

// What is at hand becomes the parent of the last subtree and itself.
void Hasher::add_left(std::uint32_t flags) {
    std::array<std::uint8_t, block_bytes> children;
    store(subtrees_[--depth_], children.data());
    store(value_, children.data() + hash_bytes);
    value_ = initial_value;
    compress_(value_, {children.data(), block_bytes, is_parent | flags, 0});
}

}  // namespace kvtier::keys
