// The CUDA layer on the stand-in: copies that run as late, as early and in as odd an order as CUDA allows.

#include <memory>
#include <thread>

#include "check.hpp"
#include "setting.hpp"

using namespace cuda_stand_in;
using namespace kvtier::cuda;
using kvtier::ChunkPages;
using kvtier::Direction;

namespace {

constexpr std::size_t chunk_pages = 4;
constexpr std::size_t chunk_bytes = chunk_pages * page_bytes;
constexpr std::size_t arena_bytes = 16 << 10;

// Two runs of pages.
const std::vector<ChunkPages> chunk = {{0, {{1, 2, 7, 8}}}};

struct Order {
    Pace pace;
    unsigned seed;
};

std::vector<Order> orders() {
    std::vector<Order> all = {{Pace::early, 0}, {Pace::late, 0}};
    for (unsigned seed = 1; seed <= 10; ++seed) all.push_back({Pace::random, seed});
    return all;
}

constexpr CopyMethod methods[] = {CopyMethod::best, CopyMethod::direct};

void check_clean() {
    const std::vector<std::string> wrong = finish();
    if (!wrong.empty()) kvtier::test::fail(__FILE__, __LINE__, joined(wrong).c_str());
    CHECK(alive() == Alive{});
}

// Poll until a copy is done, as the connector does in its hooks.
void poll(DevicePages& pages, Ticket ticket) {
    while (!pages.done(ticket)) continue;
}

// Save a chunk, destroy it in the engine, and load it into other pages; with each way to learn that a copy is done.
void round_trip(CopyMethod method) {
    Engine engine;
    const Mapped memory(arena_bytes);
    const PinnedMemory arena(memory.bytes());
    DevicePages copies(0, engine.kv(), buffer_bytes);
    engine.fill(1);
    const Ticket saved = copies.begin(arena, chunk, Direction::out_of_engine, engine.stream(), method);
    copies.hold(engine.stream(), saved);
    engine.fill(2);  // Must not reach the arena.
    copies.wait(saved);
    CHECK(holds(memory.bytes().first(chunk_bytes), 1));
    CHECK(holds(memory.bytes().subspan(chunk_bytes), 0));
    on_host(memory.bytes(), true);
    std::ranges::fill(memory.bytes(), std::byte{3});
    const std::vector<ChunkPages> other = {{0, {{3, 4, 5, 6}}}};
    const Ticket loaded = copies.begin(arena, other, Direction::into_engine, engine.stream(), method);
    poll(copies, loaded);
    CHECK(engine.holds(3, 3, chunk_pages));
    CHECK(engine.holds(2, 0, 3) && engine.holds(2, 7, pages - 7));
}

}  // namespace

TEST(copies_are_ordered_with_the_engine_and_the_host) {
    for (const auto& [pace, seed] : orders()) {
        for (const CopyMethod method : methods) {
            reset(pace, seed);
            round_trip(method);
            check_clean();
        }
    }
}

TEST(nothing_waits_for_the_device) {
    reset(Pace::late);
    {
        Engine engine;
        const Mapped memory(arena_bytes);
        const PinnedMemory arena(memory.bytes());
        DevicePages copies(0, engine.kv(), buffer_bytes);
        bool ran = false;
        launch(engine.stream(), {}, false, [&ran] { ran = true; });
        const Ticket ticket = copies.begin(arena, chunk, Direction::out_of_engine, engine.stream());
        CHECK(!copies.done(ticket) && !ran);  // Nothing has demanded the engine's kernel.
        copies.wait(ticket);
        CHECK(ran && copies.done(ticket));
    }
    check_clean();
}

// A load, which the engine's stream does not wait for, in pages that a kernel uses next.
TEST(a_load_holds_only_kernels_after_its_end) {
    for (const auto& [pace, seed] : orders()) {
        reset(pace, seed);
        {
            Engine engine;
            const Mapped memory(arena_bytes);
            const PinnedMemory arena(memory.bytes());
            DevicePages copies(0, engine.kv(), buffer_bytes);
            const Ticket ticket = copies.begin(arena, chunk, Direction::into_engine, engine.stream());
            poll(copies, ticket);
            engine.fill(5);
            copies.wait(copies.begin(arena, chunk, Direction::out_of_engine, engine.stream()));
            CHECK(holds(memory.bytes().first(chunk_bytes), 5));
        }
        check_clean();
    }
}

// The engine computes on in other pages: nothing waits for the copy, not even the host.
TEST(a_save_holds_nothing_but_what_is_held) {
    for (const CopyMethod method : methods) {
        reset(Pace::late);
        {
            Engine engine;
            const Mapped memory(arena_bytes);
            const PinnedMemory arena(memory.bytes());
            DevicePages copies(0, engine.kv(), buffer_bytes);
            const auto waits = [&] {
                launch(engine.stream(), engine.memory().first(page_bytes), true, [] {});
                return !trace().back().ends_with("a kernel of the engine:");
            };
            const Ticket ticket = copies.begin(arena, chunk, Direction::out_of_engine, engine.stream(), method);
            CHECK(!waits());
            copies.hold(engine.stream(), ticket);
            CHECK(waits());
            copies.wait(ticket);
            copies.hold(engine.stream(), ticket);
            CHECK(!waits());
            synchronize();  // The engine, before it frees its blocks.
        }
        check_clean();
    }
}

// Blocks of a save in flight that the engine gives to a request which is loaded.
TEST(a_load_waits_for_saves_of_its_pages) {
    for (const auto& [pace, seed] : orders()) {
        for (const CopyMethod method : methods) {
            reset(pace, seed);
            {
                Engine engine;
                const Mapped memory(arena_bytes);
                const PinnedMemory arena(memory.bytes());
                DevicePages copies(0, engine.kv(), buffer_bytes);
                std::ranges::fill(memory.bytes(), std::byte{3});
                engine.fill(1);
                const auto save = copies.begin(arena, chunk, Direction::out_of_engine, engine.stream(), method);
                const std::vector<ChunkPages> same = {{chunk_bytes, {{1, 2, 7, 8}}}};
                const std::vector<Ticket> after = {save};
                copies.wait(copies.begin(arena, same, Direction::into_engine, engine.stream(), method, after));
                CHECK(engine.holds(3, 1, 2) && engine.holds(1, 3, 4) && engine.holds(3, 7, 2));
                poll(copies, save);
                CHECK(holds(memory.bytes().first(chunk_bytes), 1));
            }
            check_clean();
        }
    }
}

// Freeing pinned memory, or any other wait of the host, would stop the engine until all copies are done.
TEST(batches_of_any_length_never_wait) {
    reset(Pace::late);
    {
        constexpr std::size_t count = 12000;
        Engine engine(16, 2 * count);
        const Mapped memory(16 * count);
        const PinnedMemory arena(memory.bytes());
        DevicePages copies(0, engine.kv(), buffer_bytes);
        std::vector<std::int64_t> even;
        for (std::size_t block = 0; block < count; ++block) even.push_back(static_cast<std::int64_t>(2 * block));
        for (const std::size_t blocks : {std::size_t{10}, std::size_t{5000}, count}) {
            const std::vector<ChunkPages> batch = {{0, {{even.begin(), even.begin() + blocks}}}};
            const Ticket ticket = copies.begin(arena, batch, Direction::out_of_engine, engine.stream());
            poll(copies, ticket);
        }
        for (const char* wait : {"cudaFreeHost", "cudaStreamSynchronize", "cudaEventSynchronize"}) {
            CHECK(std::ranges::count(calls(), wait) == 0);
        }
        CHECK(std::ranges::count(calls(), "cudaHostAlloc") == 1);
    }
    check_clean();
}

// Pages of different contents, in a load and a save that use the buffers many times, to and from other places.
TEST(each_page_keeps_its_bytes) {
    for (const auto& [pace, seed] : orders()) {
        for (const std::size_t length : {std::size_t{16}, std::size_t{999}, buffer_bytes, std::size_t{1} << 20}) {
            reset(pace, seed);
            {
                Engine engine;
                const Mapped memory(arena_bytes);
                const PinnedMemory arena(memory.bytes());
                DevicePages copies(0, engine.kv(), length);
                const auto content = [](std::size_t index) { return static_cast<std::byte>(index % 251); };
                for (std::size_t at = 0; at < engine.memory().size(); ++at) engine.memory()[at] = content(at);
                const std::vector<ChunkPages> from = {{0, {{9, 2, 3, 7}}}, {8000, {{11, 1}}}};
                copies.wait(copies.begin(arena, from, Direction::out_of_engine, engine.stream()));
                on_host(memory.bytes(), false);
                const auto same = [&](const std::byte* bytes, std::size_t page) {
                    for (std::size_t at = 0; at < page_bytes; ++at) {
                        if (bytes[at] != content(page * page_bytes + at)) return false;
                    }
                    return true;
                };
                std::size_t place = 0;
                for (const std::size_t page : {9, 2, 3, 7}) CHECK(same(&memory.bytes()[page_bytes * place++], page));
                CHECK(same(&memory.bytes()[8000], 11) && same(&memory.bytes()[9000], 1));
                CHECK(holds(memory.bytes().subspan(4000, 4000), 0));
                const std::vector<ChunkPages> to = {{0, {{0, 4, 5, 8}}}};
                copies.wait(copies.begin(arena, to, Direction::into_engine, engine.stream()));
                on_host(engine.memory(), false);
                CHECK(same(&engine.memory()[0], 9) && same(&engine.memory()[4 * page_bytes], 2));
                CHECK(same(&engine.memory()[5 * page_bytes], 3) && same(&engine.memory()[8 * page_bytes], 7));
                CHECK(same(&engine.memory()[10 * page_bytes], 10));
            }
            check_clean();
        }
    }
}

// A step of the engine that needs all multiprocessors must not wait for PCIe: no kernel accesses the arena.
TEST(only_copy_engines_access_the_arena) {
    reset(Pace::early);
    {
        Engine engine;
        const Mapped memory(arena_bytes);
        const PinnedMemory arena(memory.bytes());
        DevicePages copies(0, engine.kv(), buffer_bytes);
        CHECK(copies.staged());
        for (const Direction direction : {Direction::out_of_engine, Direction::into_engine}) {
            copies.wait(copies.begin(arena, chunk, direction, engine.stream()));
        }
        CHECK(std::ranges::count(calls(), "cudaHostGetDevicePointer") == 0);
        CHECK(std::ranges::count(calls(), "cudaMemcpyAsync") == 6);
    }
    check_clean();
}

TEST(without_memory_for_buffers_copies_are_direct) {
    for (const std::size_t buffer : {0, 1, 2, 3}) {
        reset(Pace::random, 1);
        {
            Engine engine;
            const Mapped memory(arena_bytes);
            const PinnedMemory arena(memory.bytes());
            { const DevicePages probe(0, engine.kv(), buffer_bytes); }
            const std::vector<std::string> made = calls();
            std::vector<std::size_t> places;
            for (std::size_t at = 0; at < made.size(); ++at) {
                if (made[at] == "cudaMalloc") places.push_back(at);
            }
            const auto first = static_cast<std::size_t>(
                std::ranges::find(made, "cudaDeviceGetStreamPriorityRange") - made.begin() - 1);
            fail({made.size() + places.at(buffer) - first + 1, cudaErrorMemoryAllocation, false});
            DevicePages copies(0, engine.kv(), buffer_bytes);
            fail({});
            CHECK(!copies.staged());
            engine.fill(1);
            copies.wait(copies.begin(arena, chunk, Direction::out_of_engine, engine.stream()));
            CHECK(holds(memory.bytes().first(chunk_bytes), 1));
            copies.wait(copies.begin(arena, chunk, Direction::into_engine, engine.stream()));
        }
        check_clean();
    }
}

TEST(batches_of_many_moves_use_several_lists) {
    for (const auto& [pace, seed] : orders()) {
        reset(pace, seed);
        {
            constexpr std::size_t count = 5000;
            Engine engine(16, 2 * count);
            const Mapped memory(16 * count);
            const PinnedMemory arena(memory.bytes());
            DevicePages copies(0, engine.kv(), std::size_t{1} << 20);  // so that lists are full before buffers are
            std::vector<std::int64_t> even;
            for (std::size_t block = 0; block < count; ++block) even.push_back(static_cast<std::int64_t>(2 * block));
            engine.fill(1);
            const auto save = [&](std::size_t blocks) {
                const std::vector<ChunkPages> batch = {{0, {{even.begin(), even.begin() + blocks}}}};
                return copies.begin(arena, batch, Direction::out_of_engine, engine.stream());
            };
            copies.wait(save(10));
            const Ticket first = save(count), second = save(10);
            poll(copies, second);
            copies.wait(first);
            CHECK(holds(memory.bytes(), 1));
        }
        check_clean();
    }
}

TEST(many_batches_in_flight_end_in_any_order) {
    for (const auto& [pace, seed] : orders()) {
        reset(pace, seed);
        {
            Engine engine;
            const Mapped memory(arena_bytes);
            const PinnedMemory arena(memory.bytes());
            DevicePages copies(0, engine.kv(), buffer_bytes);
            for (int round = 1; round <= 3; ++round) {
                std::vector<Ticket> tickets;
                for (std::size_t at = 0; at < 4; ++at) {
                    for (const Ticket ticket : tickets) copies.hold(engine.stream(), ticket);
                    engine.fill(round * 10 + static_cast<int>(at));
                    const std::vector<ChunkPages> one = {{at * chunk_bytes, {{1, 3, 5, 7}}}};
                    tickets.push_back(copies.begin(arena, one, Direction::out_of_engine, engine.stream(),
                                                   methods[at % 2]));
                }
                copies.wait(tickets[3]);
                poll(copies, tickets[0]);
                for (const Ticket ticket : tickets) copies.wait(ticket);
                for (std::size_t at = 0; at < 4; ++at) {
                    const auto part = memory.bytes().subspan(at * chunk_bytes, chunk_bytes);
                    CHECK(holds(part, round * 10 + static_cast<int>(at)));
                }
            }
        }
        check_clean();
    }
}

TEST(shutdown_with_copies_in_flight_waits_for_them) {
    for (const auto& [pace, seed] : orders()) {
        for (const CopyMethod method : methods) {
            reset(pace, seed);
            {
                Engine engine;
                const Mapped memory(arena_bytes);
                const PinnedMemory arena(memory.bytes());
                DevicePages copies(0, engine.kv(), buffer_bytes);
                engine.fill(1);
                const std::vector<ChunkPages> other = {{chunk_bytes, {{3, 4, 5, 6}}}};
                copies.begin(arena, chunk, Direction::out_of_engine, engine.stream(), method);
                copies.begin(arena, other, Direction::into_engine, engine.stream(), method);
            }
            check_clean();
        }
    }
}

TEST(another_device_gets_its_own_context_only) {
    reset(Pace::random, 1, 2);
    {
        const Mapped memory(arena_bytes);
        cudaSetDevice(1);
        Engine engine;
        const PinnedMemory arena(memory.bytes());
        DevicePages copies(1, engine.kv(), buffer_bytes);
        copies.wait(copies.begin(arena, chunk, Direction::out_of_engine, engine.stream()));
        int device = 0;
        cudaGetDevice(&device);
        CHECK(device == 1 && has_context(1) && !has_context(0));
    }
    check_clean();
}

// Pinned by a thread on one device, for copies by a thread on another one, of pages on a third one.
TEST(copies_run_on_the_device_of_their_pages) {
    for (const CopyMethod method : methods) {
        reset(Pace::random, 1, 3);
        {
            const Mapped memory(arena_bytes);
            const PinnedMemory arena(memory.bytes());
            use_device(1);
            Engine engine;
            use_device(2);
            DevicePages copies(1, engine.kv(), buffer_bytes);
            copies.wait(copies.begin(arena, chunk, Direction::out_of_engine, engine.stream(), method));
            int device = 0;
            cudaGetDevice(&device);
            CHECK(device == 2);
        }
        check_clean();
    }
}

// As the arena is pinned and unpinned, in threads of their own.
TEST(a_thread_that_pins_creates_no_context_on_device_0) {
    reset(Pace::random, 1, 2);
    const Mapped memory(arena_bytes);
    std::unique_ptr<PinnedMemory> arena;
    std::thread([&] {
        use_device(1);
        arena = std::make_unique<PinnedMemory>(memory.bytes());
    }).join();
    std::thread([&] {
        use_device(1);
        arena.reset();
    }).join();
    CHECK(has_context(1) && !has_context(0));
    check_clean();
}

TEST(invalid_blocks_start_nothing) {
    reset(Pace::late);
    {
        Engine engine;
        const Mapped memory(arena_bytes);
        const PinnedMemory arena(memory.bytes());
        DevicePages copies(0, engine.kv(), buffer_bytes);
        const std::size_t before = calls().size();
        const std::vector<ChunkPages> bad = {{0, {{1}}}, {0, {{pages}}}};
        CHECK_THROWS(std::out_of_range, copies.begin(arena, bad, Direction::into_engine, engine.stream()));
        CHECK(calls().size() == before);
    }
    check_clean();
}

int main() { return kvtier::test::run(); }
