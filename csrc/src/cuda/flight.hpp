// One batch in flight: the event that marks its end, and the memory that must stay valid until then.
#pragma once

#include <span>

#include "calls.hpp"
#include "kernel.hpp"

namespace kvtier::cuda {

// A list of moves in pinned memory, which the kernel reads directly. It is reused and only grows, because freeing
// pinned memory synchronizes the device.
class MoveList {
public:
    MoveList() = default;
    ~MoveList() { static_cast<void>(cudaFreeHost(moves_)); }
    MoveList(const MoveList&) = delete;
    MoveList& operator=(const MoveList&) = delete;

    // Room for `count` moves. Invalidates the previous contents.
    std::span<Move> room(std::size_t count);

private:
    Move* moves_ = nullptr;
    std::size_t size_ = 0;
};

struct DevicePages::Flight {
    Flight() { check(cudaEventCreateWithFlags(&completed, cudaEventDisableTiming), "cudaEventCreate"); }
    ~Flight() { static_cast<void>(cudaEventDestroy(completed)); }
    Flight(const Flight&) = delete;
    Flight& operator=(const Flight&) = delete;

    cudaEvent_t completed = nullptr;
    MoveList moves;
};

}  // namespace kvtier::cuda
