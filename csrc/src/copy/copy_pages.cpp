#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "copy_sizes.hpp"
#include "kvtier/copy.hpp"
#include "kvtier/threads.hpp"

namespace kvtier {

namespace {

using Blocks = std::span<const std::int64_t>;

// Some pages of one region of one chunk: what a thread takes at a time.
struct Part {
    const Region* region;
    std::byte* held;
    Blocks blocks;
};

[[noreturn]] void outside(const std::string& what, std::int64_t at, std::size_t limit) {
    throw std::out_of_range(what + " " + std::to_string(at) + " is outside of " + std::to_string(limit));
}

void check_blocks(Blocks blocks, std::size_t pages, std::int64_t skipped) {
    for (const std::int64_t block : blocks) {
        if (block != skipped && (block < 0 || static_cast<std::uint64_t>(block) >= pages)) {
            outside("block", block, pages);
        }
    }
}

// Blocks that follow one another are one run: engines often hand them out so.
std::size_t run_length(Blocks blocks, std::size_t first, std::int64_t skipped) {
    std::size_t stop = first + 1;
    while (stop < blocks.size() && blocks[stop] == blocks[stop - 1] + 1 && blocks[stop] != skipped) ++stop;
    return stop - first;
}

void copy_part(const Part& part, Direction direction, std::int64_t skipped, bool streaming) {
    const std::size_t page_bytes = part.region->page_bytes;
    for (std::size_t page = 0; page < part.blocks.size();) {
        if (part.blocks[page] == skipped) {
            ++page;
            continue;
        }
        const std::size_t count = run_length(part.blocks, page, skipped);
        std::byte* engine = part.region->base + static_cast<std::size_t>(part.blocks[page]) * page_bytes;
        std::byte* held = part.held + page * page_bytes;
        if (direction == Direction::into_engine) {
            copy_run(engine, held, count * page_bytes, streaming);
        } else {
            copy_run(held, engine, count * page_bytes, streaming);
        }
        page += count;
    }
}

void cut(const Region& region, std::byte* held, Blocks blocks, std::vector<Part>& parts) {
    const std::size_t page_bytes = std::max<std::size_t>(1, region.page_bytes);
    const std::size_t pages = std::max<std::size_t>(1, piece_bytes / page_bytes);
    for (std::size_t page = 0; page < blocks.size(); page += pages) {
        const std::size_t count = std::min(pages, blocks.size() - page);
        parts.push_back({&region, held + page * region.page_bytes, blocks.subspan(page, count)});
    }
}

}  // namespace

KvMemory::KvMemory(std::vector<std::vector<Region>> groups, std::int64_t skipped)
    : groups_(std::move(groups)), skipped_(skipped) {}

void KvMemory::copy(std::span<std::byte> arena, std::span<const ChunkPages> chunks, Direction direction,
                    unsigned threads) const {
    std::vector<Part> parts;
    std::size_t total = 0;
    for (const ChunkPages& chunk : chunks) {
        if (chunk.blocks.size() != groups_.size()) throw std::out_of_range("not one block table a group");
        std::size_t at = chunk.offset;
        for (std::size_t group = 0; group < groups_.size(); ++group) {
            const Blocks blocks = chunk.blocks[group];
            for (const Region& region : groups_[group]) {
                check_blocks(blocks, region.pages, skipped_);
                // Divided, not multiplied: no product of what a caller says can wrap around here.
                const bool fits = at <= arena.size() &&
                                  (region.page_bytes == 0 ||
                                   blocks.size() <= (arena.size() - at) / region.page_bytes);
                if (!fits) outside("chunk at", static_cast<std::int64_t>(chunk.offset), arena.size());
                cut(region, arena.data() + at, blocks, parts);
                at += blocks.size() * region.page_bytes;
                total += blocks.size() * region.page_bytes;
            }
        }
    }
    const bool streaming = pays_streaming(total);
    parallel_for(parts.size(), threads_for(total, threads), [&](std::size_t index) {
        copy_part(parts[index], direction, skipped_, streaming);
    });
}

}  // namespace kvtier
