// Copies between host memory and host memory: of whole buffers, and of many pages at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvtier {

// Copy one run in the calling thread. `streaming` writes past the caches, which pays where more is copied
// than they hold: nothing is read in before it is written over, and what was in them stays.
void copy_run(std::byte* to, const std::byte* from, std::size_t length, bool streaming);

struct Buffer {
    std::byte* to;
    const std::byte* from;
    std::size_t length;
};

// Copy each buffer, in pieces, on as many threads as the machine has use for (0), or on at most `threads`.
// Blocks. The buffers must not overlap.
void copy_buffers(std::span<const Buffer> buffers, unsigned threads = 0);

// The pages of one layer in an engine's KV memory: page i is the `page_bytes` from base + i * page_bytes on.
struct Region {
    std::byte* base;
    std::size_t page_bytes;
    std::size_t pages;
};

// A chunk in the arena: from `offset` on, for each group, for each of its regions, the pages of the group's
// blocks, one after another. A block that is `skipped` has its place there and is not copied.
struct ChunkPages {
    std::size_t offset;
    std::vector<std::vector<std::int64_t>> blocks;
};

enum class Direction { into_engine, out_of_engine };

// Pages of an engine that follow one another and are held one after another: one run of bytes.
struct PageRun {
    std::byte* engine;
    std::byte* held;
    std::size_t length;
};

class KvMemory {
public:
    // For each group of layers that share block tables, its regions. `skipped` is the block that is nobody's.
    KvMemory(std::vector<std::vector<Region>> groups, std::int64_t skipped);

    // Copy the pages of all chunks, on at most `threads` threads (0: as many as the machine has use for).
    // Blocks until all is copied. Throws std::out_of_range, before anything is copied, where a block or a
    // chunk lies outside its memory. Two calls may run at once where they write to different places.
    void copy(std::span<std::byte> arena, std::span<const ChunkPages> chunks, Direction direction,
              unsigned threads = 0) const;

    // What `copy` copies, as runs of at most about `most_bytes`, or one page. Throws as it does. Touches no memory:
    // both addresses may be those of a device.
    std::vector<PageRun> runs(std::span<std::byte> arena, std::span<const ChunkPages> chunks,
                              std::size_t most_bytes) const;

private:
    std::vector<std::vector<Region>> groups_;
    std::int64_t skipped_;
};

}  // namespace kvtier
