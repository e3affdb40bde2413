// One batch in flight: the event that marks its end, and the memory that must stay valid until then.
#pragma once

#include <span>
#include <vector>

#include "calls.hpp"
#include "kernel.hpp"

namespace kvtier::cuda {

// A list of moves in pinned memory, which the kernel reads directly. It is reused and only grows. Shorter ones are kept
// to the end, because freeing pinned memory waits for the whole device, the engine's kernels included.
class MoveList {
public:
    MoveList() = default;
    ~MoveList() {
        for (Move* const moves : lists_) ignore(cudaFreeHost(moves));
    }
    MoveList(const MoveList&) = delete;
    MoveList& operator=(const MoveList&) = delete;

    // Room for `count` moves. Invalidates the previous contents.
    std::span<Move> room(std::size_t count);

private:
    std::vector<Move*> lists_;  // the last one is in use
    std::size_t size_ = 0;      // of the last one
};

struct DevicePages::Flight {
    Flight() { check(cudaEventCreateWithFlags(&completed, cudaEventDisableTiming), "cudaEventCreate"); }
    ~Flight() { ignore(cudaEventDestroy(completed)); }
    Flight(const Flight&) = delete;
    Flight& operator=(const Flight&) = delete;

    // Wait for the end of the copy. After an error of CUDA for the event, wait for the whole stream: the copy may
    // still run, and its memory will be reused.
    cudaError_t wait() {
        const cudaError_t state = cudaEventSynchronize(completed);
        if (state != cudaSuccess) wait_for_stream();
        return state;
    }

    void wait_for_stream() { ignore(cudaStreamSynchronize(stream)); }

    cudaEvent_t completed = nullptr;
    cudaStream_t stream = nullptr;  // of the copy
    MoveList moves;
};

}  // namespace kvtier::cuda
