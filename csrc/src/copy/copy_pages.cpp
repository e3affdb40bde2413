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

void add_runs(const Region& region, std::byte* held, Blocks blocks, std::int64_t skipped,
              std::size_t most_bytes, std::vector<PageRun>& runs) {
    const std::size_t page_bytes = region.page_bytes;
    const std::size_t most_pages = std::max<std::size_t>(1, most_bytes / std::max<std::size_t>(1, page_bytes));
    for (std::size_t page = 0; page < blocks.size();) {
        if (blocks[page] == skipped) {
            ++page;
            continue;
        }
        const std::size_t count = std::min(most_pages, run_length(blocks, page, skipped));
        std::byte* engine = region.base + static_cast<std::size_t>(blocks[page]) * page_bytes;
        runs.push_back({engine, held + page * page_bytes, count * page_bytes});
        page += count;
    }
}

}  // namespace

KvMemory::KvMemory(std::vector<std::vector<Region>> groups, std::int64_t skipped)
    : groups_(std::move(groups)), skipped_(skipped) {}

std::vector<PageRun> KvMemory::runs(std::span<std::byte> arena, std::span<const ChunkPages> chunks,
                                    std::size_t most_bytes) const {
    std::vector<PageRun> runs;
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
                add_runs(region, arena.data() + at, blocks, skipped_, most_bytes, runs);
                at += blocks.size() * region.page_bytes;
            }
        }
    }
    return runs;
}

void KvMemory::copy(std::span<std::byte> arena, std::span<const ChunkPages> chunks, Direction direction,
                    unsigned threads) const {
    const std::vector<PageRun> all = runs(arena, chunks, piece_bytes);
    std::size_t total = 0;
    for (const PageRun& run : all) total += run.length;
    const bool streaming = pays_streaming(total);
    // A single page may be too little for a thread to come back for.
    const std::size_t average = std::max<std::size_t>(1, total / std::max<std::size_t>(1, all.size()));
    const std::size_t at_a_time = std::max<std::size_t>(1, piece_bytes / average);
    const std::size_t parts = (all.size() + at_a_time - 1) / at_a_time;
    parallel_for(parts, threads_for(total, threads), [&](std::size_t part) {
        const std::size_t stop = std::min(all.size(), (part + 1) * at_a_time);
        for (std::size_t index = part * at_a_time; index < stop; ++index) {
            const auto& [engine, held, length] = all[index];
            if (direction == Direction::into_engine) {
                copy_run(engine, held, length, streaming);
            } else {
                copy_run(held, engine, length, streaming);
            }
        }
    });
}

}  // namespace kvtier
