#include "kvtier/copy.hpp"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <stdexcept>

#include "check.hpp"

using namespace kvtier;

namespace {

using Memory = std::vector<std::byte>;

Memory noise(std::size_t length, unsigned seed) {
    std::mt19937 random(seed);
    Memory memory(length);
    for (std::byte& byte : memory) byte = static_cast<std::byte>(random());
    return memory;
}

// Two groups: three layers with 640-byte pages, and one with 7-byte pages.
struct Engine {
    std::vector<Memory> layers;
    std::vector<std::vector<Region>> groups;
};

constexpr std::size_t pages = 50;

Engine engine(unsigned seed) {
    Engine made;
    for (unsigned layer = 0; layer < 3; ++layer) made.layers.push_back(noise(pages * 640, seed + layer));
    made.layers.push_back(noise(pages * 7, seed + 3));
    made.groups.resize(2);
    for (int layer = 0; layer < 3; ++layer) made.groups[0].push_back({made.layers[layer].data(), 640, pages});
    made.groups[1].push_back({made.layers[3].data(), 7, pages});
    return made;
}

// Reference implementation, byte by byte.
void copy_plainly(Engine& engine, Memory& arena, const std::vector<ChunkPages>& chunks, Direction direction) {
    for (const ChunkPages& chunk : chunks) {
        std::size_t at = chunk.offset;
        for (std::size_t group = 0; group < engine.groups.size(); ++group) {
            for (const Region& region : engine.groups[group]) {
                for (const std::int64_t block : chunk.blocks[group]) {
                    const std::size_t page = static_cast<std::size_t>(block) * region.page_bytes;
                    for (std::size_t byte = 0; byte < region.page_bytes; ++byte, ++at) {
                        if (block == 0) continue;
                        std::byte& there = region.base[page + byte];
                        (direction == Direction::into_engine ? there : arena[at]) =
                            direction == Direction::into_engine ? arena[at] : there;
                    }
                }
            }
        }
    }
}

std::vector<ChunkPages> some_chunks() {
    return {
        {3, {{1, 2, 3, 9}, {4}}},            // a run, then a single block
        {20'000, {{0, 0, 12, 0}, {0, 5}}},   // with skipped blocks
        {40'000, {{30, 29, 28}, {}}},        // descending; a group without pages
        {60'000, {{48, 49}, {49, 1}}},
    };
}

}  // namespace

TEST(runs_of_every_length_and_alignment) {
    const Memory source = noise(2000, 1);
    for (const bool streaming : {false, true}) {
        for (std::size_t length = 0; length < 900; length += 13) {
            for (std::size_t shift = 0; shift < 40; shift += 3) {
                Memory target(2000, std::byte{7});
                copy_run(target.data() + shift, source.data() + 1, length, streaming);
                CHECK(std::equal(source.begin() + 1, source.begin() + 1 + static_cast<std::ptrdiff_t>(length),
                                 target.begin() + static_cast<std::ptrdiff_t>(shift)));
                CHECK(std::count(target.begin(), target.begin() + static_cast<std::ptrdiff_t>(shift),
                                 std::byte{7}) == static_cast<std::ptrdiff_t>(shift));
                CHECK(std::all_of(target.begin() + static_cast<std::ptrdiff_t>(shift + length), target.end(),
                                  [](std::byte byte) { return byte == std::byte{7}; }));
            }
        }
    }
}

TEST(buffers_on_multiple_threads) {
    for (const std::size_t length : {std::size_t{0}, std::size_t{1}, std::size_t{5'000'001}}) {
        const Memory first = noise(length, 2), second = noise(3'000'000, 3);
        Memory to_first(length), to_second(second.size());
        const Buffer buffers[] = {{to_first.data(), first.data(), length},
                                  {to_second.data(), second.data(), second.size()}};
        copy_buffers(buffers, 4);
        CHECK(to_first == first && to_second == second);
    }
}

TEST(pages_are_copied_as_by_a_plain_loop) {
    for (const Direction direction : {Direction::into_engine, Direction::out_of_engine}) {
        Engine actual = engine(10), expected = engine(10);
        Memory arena = noise(70'000, 20), expected_arena = arena;
        KvMemory(actual.groups, 0).copy(arena, some_chunks(), direction, 3);
        copy_plainly(expected, expected_arena, some_chunks(), direction);
        CHECK(actual.layers == expected.layers);
        CHECK(arena == expected_arena);
    }
}

TEST(many_pages_round_trip) {
    constexpr std::size_t page_bytes = 16'384, blocks = 512;
    Memory layer = noise(page_bytes * (blocks + 1), 30), arena(page_bytes * blocks);
    const Memory before = layer;
    std::vector<std::int64_t> order(blocks);
    std::iota(order.begin(), order.end(), 1);
    std::shuffle(order.begin(), order.end(), std::mt19937(4));
    const KvMemory memory({{{layer.data(), page_bytes, blocks + 1}}}, 0);
    const std::vector<ChunkPages> chunks = {{0, {order}}};
    memory.copy(arena, chunks, Direction::out_of_engine);
    std::fill(layer.begin() + page_bytes, layer.end(), std::byte{0});
    memory.copy(arena, chunks, Direction::into_engine);
    CHECK(layer == before);
}

TEST(out_of_range_pages_copy_nothing) {
    const std::vector<std::vector<ChunkPages>> bad = {
        {{0, {{1}, {1}}}, {0, {{50}, {1}}}},             // a block after the last one
        {{0, {{1}, {1}}}, {0, {{-1}, {1}}}},             // a block before the first one
        {{0, {{1}, {1}}}, {69'000, {{1}, {1}}}},         // a chunk that ends after the arena
        {{0, {{1}, {1}}}, {70'001, {{}, {}}}},           // a chunk that starts after the arena
        {{0, {{1}, {1}}}, {SIZE_MAX - 5, {{1}, {1}}}},   // a chunk whose end overflows
        {{0, {{1}, {1}}}, {0, {{1}}}},                   // too few groups
        {{0, {{1}, {1}}}, {0, {{1}, {1}, {1}}}},         // too many groups
    };
    for (const auto& chunks : bad) {
        for (const Direction direction : {Direction::into_engine, Direction::out_of_engine}) {
            Engine actual = engine(10);
            Memory arena = noise(70'000, 20);
            const Memory arena_before = arena;
            const std::vector<Memory> before = actual.layers;
            const KvMemory memory(actual.groups, 0);
            CHECK_THROWS(std::out_of_range, (memory.copy(arena, chunks, direction), 0));
            CHECK(arena == arena_before && actual.layers == before);
        }
    }
}

TEST(a_page_may_end_at_the_end_of_the_arena) {
    Engine actual = engine(10);
    Memory arena = noise(3 * 640 + 7, 20);
    KvMemory(actual.groups, 0).copy(arena, std::vector<ChunkPages>{{0, {{49}, {49}}}}, Direction::into_engine);
    CHECK(std::equal(arena.end() - 7, arena.end(), actual.layers[3].end() - 7));
}

int main() { return kvtier::test::run(); }
