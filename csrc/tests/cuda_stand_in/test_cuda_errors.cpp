// Every call of CUDA fails once, and every operation: one CudaError, nothing left behind, no copy still running.

#include <memory>
#include <optional>

#include "check.hpp"
#include "setting.hpp"

using namespace cuda_stand_in;
using namespace kvtier::cuda;
using kvtier::ChunkPages;
using kvtier::Direction;

namespace {

constexpr Pace paces[] = {Pace::early, Pace::late, Pace::random};
constexpr std::size_t operations = 10;  // kernels and copies of use_everything(), without the last batch

// All that kvtier calls: pin, copy by each method and in each direction, poll, wait, and shut down. The engine frees
// its blocks as soon as a copy is reported to have ended, in success or in failure. Returns the errors. `used`: the
// number of calls that report their errors.
std::vector<std::string> use_everything(Engine& engine, std::span<std::byte> memory, std::size_t& used) {
    std::vector<std::string> errors;
    const auto attempt = [&](const auto& call) {
        try {
            call();
        } catch (const CudaError& error) {
            errors.emplace_back(error.what());
        }
    };
    attempt([&] {
        const PinnedMemory arena(memory);
        DevicePages copies(0, engine.kv(), buffer_bytes);
        // Blocks and chunks that no other copy uses: what failed may be reused at once.
        std::size_t chunk = 0;
        for (const CopyMethod method : {CopyMethod::best, CopyMethod::direct}) {
            for (const Direction direction : {Direction::out_of_engine, Direction::into_engine}) {
                const std::int64_t block = static_cast<std::int64_t>(2 * chunk);
                const std::vector<ChunkPages> chunks = {{2 * page_bytes * chunk, {{block, block + 1}}}};
                const auto bytes = engine.memory().subspan(2 * page_bytes * chunk, 2 * page_bytes);
                attempt([&] {
                    const Ticket ticket = copies.begin(arena, chunks, direction, engine.stream(), method);
                    // Once: the number of calls must not depend on timing, or a fault hits another call each time.
                    if (direction == Direction::out_of_engine) copies.done(ticket);
                    copies.wait(ticket);
                });
                on_host(bytes, true);
                on_host(memory.subspan(2 * page_bytes * chunk, 2 * page_bytes), true);
                ++chunk;
            }
        }
        // Still running when everything ends. The engine overwrites its pages as soon as its stream allows.
        const std::vector<ChunkPages> last = {{0, {{1, 2}}}};
        const Ticket ticket = copies.begin(arena, last, Direction::out_of_engine, engine.stream());
        used = calls().size();
        copies.hold(engine.stream(), ticket);
        engine.fill(7);
    });
    synchronize();
    return errors;
}

struct Outcome {
    std::vector<std::string> errors;
    std::vector<std::string> wrong;
    Alive left;
    std::size_t calls = 0;
    bool ends = false;  // the fault comes after all use
};

// Use everything, with a fault. The engine's own calls come before and after.
Outcome use_with(Pace pace, Fault fault, std::size_t operation = 0) {
    reset(pace, 1);
    const Mapped memory(16 << 10);
    Outcome outcome;
    {
        Engine engine;
        const std::size_t before = calls().size();
        if (fault.call) fault.call += before;
        fail(fault);
        fail_operation(operation);
        std::size_t used = before;
        outcome.errors = use_everything(engine, memory.bytes(), used);
        outcome.calls = calls().size() - before;
        outcome.ends = fault.call > used;
        fail({});
        if (!fault.lasting && !operation) CHECK(cudaGetLastError() == cudaSuccess);
    }
    outcome.wrong = finish();
    outcome.left = alive();
    return outcome;
}

// Whether a call only releases something, whose error nobody can handle.
bool releases(const std::string& call) {
    for (const char* name : {"cudaHostUnregister", "cudaFreeHost", "cudaFree", "cudaStreamDestroy", "cudaEventDestroy"}) {
        if (call == name) return true;
    }
    return false;
}

void report(const Outcome& outcome, Pace pace, std::size_t at, const std::string& call) {
    std::fprintf(stderr, "pace %d, call %zu (%s):\n%s%s", static_cast<int>(pace), at, call.c_str(),
                 joined(outcome.wrong).c_str(), joined(outcome.errors).c_str());
    std::fprintf(stderr, "left: %zu streams, %zu events, %zu allocated, %zu registered, %zu buffers\n", outcome.left.streams,
                 outcome.left.events, outcome.left.allocated, outcome.left.registered, outcome.left.buffers);
}

}  // namespace

TEST(without_a_fault) {
    for (const Pace pace : paces) {
        const Outcome outcome = use_with(pace, {});
        CHECK(outcome.errors.empty() && outcome.wrong.empty() && outcome.left == Alive{});
    }
}

TEST(each_call_fails_once) {
    for (const Pace pace : paces) {
        for (std::size_t at = 1;; ++at) {
            const Outcome outcome = use_with(pace, {at, cudaErrorMemoryAllocation, false});
            if (at > outcome.calls) break;
            const std::vector<std::string> made = calls();
            const std::string& call = made[made.size() < at + 1 ? made.size() - 1 : at];
            // Without memory for buffers, copies are direct.
            const bool may_be_silent = outcome.ends || releases(call) || call == "cudaMalloc";
            const bool one_error = outcome.errors.size() == 1 || (may_be_silent && outcome.errors.empty());
            if (!one_error || !outcome.wrong.empty() || !(outcome.left == Alive{})) {
                report(outcome, pace, at, call);
                CHECK(one_error);
                CHECK(outcome.wrong.empty());
                CHECK(outcome.left == Alive{});
            }
        }
    }
}

TEST(errors_of_releases_are_cleared) {
    for (std::size_t at = 1, released = 1; at <= released; ++at) {
        reset(Pace::early, 1);
        const Mapped memory(16 << 10);
        Engine engine;
        auto arena = std::make_unique<PinnedMemory>(memory.bytes());
        auto copies = std::make_unique<DevicePages>(0, engine.kv(), buffer_bytes);
        copies->wait(copies->begin(*arena, {{{0, {{0, 1}}}}}, Direction::into_engine, engine.stream()));
        const std::size_t before = calls().size();
        fail({before + at, cudaErrorMemoryAllocation, false});
        copies.reset();
        arena.reset();
        released = calls().size() - before;
        fail({});
        CHECK(released >= 3);
        CHECK(cudaGetLastError() == cudaSuccess);
    }
}

TEST(each_call_loses_the_device) {
    for (const Pace pace : paces) {
        for (std::size_t at = 1;; ++at) {
            const Outcome outcome = use_with(pace, {at, cudaErrorIllegalAddress, true});
            if (at > outcome.calls) break;
            const bool clean = outcome.wrong.empty() && outcome.left == Alive{};
            if (!clean) report(outcome, pace, at, "");
            CHECK(clean);
        }
    }
}

TEST(each_operation_fails) {
    for (const Pace pace : paces) {
        for (std::size_t operation = 1; operation <= operations; ++operation) {
            const Outcome outcome = use_with(pace, {}, operation);
            const bool clean = outcome.wrong.empty() && outcome.left == Alive{};
            if (!clean || outcome.errors.empty()) report(outcome, pace, operation, "operation");
            CHECK(clean);
            CHECK(!outcome.errors.empty());
        }
    }
}

int main() { return kvtier::test::run(); }
