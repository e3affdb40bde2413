// The copy kernel of src/cuda, compiled for the host: one thread of the device after the other.

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "machine.hpp"

#define __device__
#define __global__

namespace {

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct Index {
    unsigned x;
};
thread_local Index threadIdx, blockIdx, blockDim, gridDim;

uint4 __ldcs(const uint4* from) { return *from; }
void __stcs(uint4* to, const uint4& value) { *to = value; }

}  // namespace

#include "../../src/cuda/copy_moves.cuh"

namespace kvtier::cuda {

namespace {

using namespace cuda_stand_in;

constexpr unsigned blocks = 2;
constexpr unsigned threads = 2 * warp_lanes;

// Run all threads of the grid, in any order.
void run_grid(const std::vector<Move>& moves, unsigned seed) {
    blockDim = {threads};
    gridDim = {blocks};
    std::vector<unsigned> order(blocks * threads);
    std::iota(order.begin(), order.end(), 0u);
    std::ranges::shuffle(order, std::minstd_rand(seed));
    for (const unsigned thread : order) {
        blockIdx = {thread / threads};
        threadIdx = {thread % threads};
        copy_moves(moves.data(), moves.size());
    }
}

bool changed(const Move* list, const std::vector<Move>& before) {
    return !std::ranges::equal(before, std::span(list, before.size()), [](const Move& one, const Move& other) {
        return one.to == other.to && one.from == other.from && one.length == other.length;
    });
}

Access list_access(const Move* moves, std::size_t count) {
    return {reinterpret_cast<const std::byte*>(moves), count * sizeof(Move), false};
}

}  // namespace

// The device reads the list when the kernel runs. If it has changed since the launch, that is reported, and the list of
// the launch is used.
cudaError_t launch(const Move* moves, std::size_t count, unsigned, cudaStream_t handle) {
    Locked machine;
    if (const cudaError_t error = machine->enter("kernel launch")) return error;
    Stream* stream = machine->stream(handle);
    if (!stream || stream->device != current_device() || !count) return last_error() = cudaErrorInvalidValue;
    Work work{.what = "the copy kernel", .accesses = {list_access(moves, count)}};
    const std::vector<Move> list(moves, moves + count);
    for (const Move& move : list) {
        work.accesses.push_back({move.from, move.length, false});
        work.accesses.push_back({move.to, move.length, true});
    }
    for (Access& access : work.accesses) {
        const std::string problem = machine->memory.resolve(access, stream->device, true);
        if (problem.empty()) continue;
        machine->violate(work.what + " accesses " + problem);
        return last_error() = cudaErrorIllegalAddress;
    }
    work.run = [moves, list, seed = machine->random(), &machine = machine.machine] {
        if (changed(moves, list)) {
            const std::unique_lock lock(machine.mutex);
            machine.violate("the list of a running kernel has changed");
        }
        run_grid(list, static_cast<unsigned>(seed));
    };
    machine->enqueue(*stream, std::move(work));
    // As after a real launch, this may be the error of another call, which nobody has cleared.
    return std::exchange(last_error(), cudaSuccess);
}

cudaError_t load_kernel() { return Locked()->enter("loading the kernel"); }

}  // namespace kvtier::cuda
