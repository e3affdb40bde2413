// One batch under way: the event that tells of its end, and what must stay as it is until then.
#pragma once

#include <span>

#include "calls.hpp"
#include "kernel.hpp"

namespace kvtier::cuda {

// A list of moves in pinned memory, which a kernel reads where it lies. It grows and is used again: to free such
// memory would wait for the device.
class MoveList {
public:
    MoveList() = default;
    ~MoveList() { static_cast<void>(cudaFreeHost(moves_)); }
    MoveList(const MoveList&) = delete;
    MoveList& operator=(const MoveList&) = delete;

    // Room for so many, whatever was in it before.
    std::span<Move> room(std::size_t count);

private:
    Move* moves_ = nullptr;
    std::size_t size_ = 0;
};

struct DevicePages::Flight {
    Flight() { check(cudaEventCreateWithFlags(&landed, cudaEventDisableTiming), "cudaEventCreate"); }
    ~Flight() { static_cast<void>(cudaEventDestroy(landed)); }
    Flight(const Flight&) = delete;
    Flight& operator=(const Flight&) = delete;

    cudaEvent_t landed = nullptr;
    MoveList moves;
};

}  // namespace kvtier::cuda
