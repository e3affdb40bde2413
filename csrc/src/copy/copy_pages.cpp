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

[[noreturn]] void throw_out_of_range(const std::string& what, std::int64_t at, std::size_t limit) {
    throw std::out_of_range(what + " " + std::to_string(at) + " is out of range: the limit is " +
                            std::to_string(limit));
}

void check_blocks(Blocks blocks, std::size_t pages, std::int64_t skipped) {
    for (const std::int64_t block : blocks) {
        if (block != skipped && (block < 0 || static_cast<std::uint64_t>(block) >= pages)) {
            throw_out_of_range("block", block, pages);
        }
    }
}

// Consecutive blocks form one run; engines often allocate them consecutively.
std::size_t run_length(Blocks blocks, std::size_t first, std::int64_t skipped) {
    std::size_t stop = first + 1;
    while (stop < blocks.size() && blocks[stop] == blocks[stop - 1] + 1 && blocks[stop] != skipped) ++stop;
    return stop - first;
}

void add_runs(const Region& region, std::byte* held, Blocks blocks, std::int64_t skipped,
              std::size_t max_bytes, std::vector<PageRun>& runs) {
    const std::size_t page_bytes = region.page_bytes;
    const std::size_t max_pages = std::max<std::size_t>(1, max_bytes / std::max<std::size_t>(1, page_bytes));
    for (std::size_t page = 0; page < blocks.size();) {
        if (blocks[page] == skipped) {
            ++page;
            continue;
        }
        const bool gaps = region.stride != page_bytes;
        const std::size_t count = gaps ? 1 : std::min(max_pages, run_length(blocks, page, skipped));
        std::byte* engine = region.base + static_cast<std::size_t>(blocks[page]) * region.stride;
        runs.push_back({engine, held + page * page_bytes, count * page_bytes});
        page += count;
    }
}

}  // namespace

KvMemory::KvMemory(std::vector<std::vector<Region>> groups, std::int64_t skipped)
    : groups_(std::move(groups)), skipped_(skipped) {}

std::vector<PageRun> KvMemory::runs(std::span<std::byte> arena, std::span<const ChunkPages> chunks,
                                    std::size_t max_bytes) const {
    std::vector<PageRun> runs;
    for (const ChunkPages& chunk : chunks) {
        if (chunk.blocks.size() != groups_.size()) throw std::out_of_range("a chunk needs one block table per group");
        std::size_t at = chunk.offset;
        for (std::size_t group = 0; group < groups_.size(); ++group) {
            const Blocks blocks = chunk.blocks[group];
            for (const Region& region : groups_[group]) {
                check_blocks(blocks, region.pages, skipped_);
                // Divide, because a product of the caller's values could overflow.
                const bool fits = at <= arena.size() &&
                                  (region.page_bytes == 0 ||
                                   blocks.size() <= (arena.size() - at) / region.page_bytes);
                if (!fits) throw_out_of_range("chunk at", static_cast<std::int64_t>(chunk.offset), arena.size());
                add_runs(region, arena.data() + at, blocks, skipped_, max_bytes, runs);
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
    // Group small pages, so that each piece is worth the synchronization.
    const std::size_t average = std::max<std::size_t>(1, total / std::max<std::size_t>(1, all.size()));
    const std::size_t runs_per_piece = std::max<std::size_t>(1, piece_bytes / average);
    const std::size_t pieces = (all.size() + runs_per_piece - 1) / runs_per_piece;
    parallel_for(pieces, threads_for(total, threads), [&](std::size_t piece) {
        const std::size_t stop = std::min(all.size(), (piece + 1) * runs_per_piece);
        for (std::size_t index = piece * runs_per_piece; index < stop; ++index) {
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
