// Copies within host memory: of whole buffers, and of many pages at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvtier {

// Copy one run in the calling thread. `streaming` uses non-temporal stores, which is faster for copies larger than the
// CPU caches: the target is not read before it is overwritten, and the cache contents stay.
void copy_run(std::byte* to, const std::byte* from, std::size_t length, bool streaming);

struct Buffer {
    std::byte* to;
    const std::byte* from;
    std::size_t length;
};

// Copy each buffer, in pieces, on at most `threads` threads (0: chosen automatically). Blocks. The buffers must not
// overlap.
void copy_buffers(std::span<const Buffer> buffers, unsigned threads = 0);

// The pages of one layer in an engine's KV memory: page i has the `page_bytes` from base + i * stride on. What follows
// them up to the next page is not copied.
struct Region {
    std::byte* base;
    std::size_t page_bytes;
    std::size_t pages;
    std::size_t stride = page_bytes;
};

// A chunk in the arena: from `offset` on, for each group, for each of its regions, the pages of the group's blocks,
// contiguously. A `skipped` block has its place there but is not copied.
struct ChunkPages {
    std::size_t offset;
    std::vector<std::vector<std::int64_t>> blocks;
};

enum class Direction { into_engine, out_of_engine };

// Pages that are contiguous both in the engine and in the arena: one run of bytes.
struct PageRun {
    std::byte* engine;
    std::byte* held;
    std::size_t length;
};

class KvMemory {
public:
    // The regions of each group of layers that share block tables. `skipped`: number of the null block, which is never
    // copied.
    KvMemory(std::vector<std::vector<Region>> groups, std::int64_t skipped);

    // Copy the pages of all chunks, on at most `threads` threads (0: chosen automatically). Blocks. Throws
    // std::out_of_range, before anything is copied, if a block or a chunk is outside its memory. Concurrent calls are
    // safe if they write to different memory.
    void copy(std::span<std::byte> arena, std::span<const ChunkPages> chunks, Direction direction,
              unsigned threads = 0) const;

    // What `copy` copies, as runs of at most `max_bytes`, or one page. Throws as `copy` does. Does not access the
    // memory, so both addresses may be on a device.
    std::vector<PageRun> runs(std::span<std::byte> arena, std::span<const ChunkPages> chunks,
                              std::size_t max_bytes) const;

private:
    std::vector<std::vector<Region>> groups_;
    std::int64_t skipped_;
};

}  // namespace kvtier
