// One batch in flight: the event that marks its end, and the lists that must stay unchanged until then.
#pragma once

#include <vector>

#include "calls.hpp"
#include "kernel.hpp"
#include "lane.hpp"

namespace kvtier::cuda {

struct DevicePages::Flight {
    Flight() { check(cudaEventCreateWithFlags(&completed, cudaEventDisableTiming), "cudaEventCreate"); }
    ~Flight() { ignore(cudaEventDestroy(completed)); }
    Flight(const Flight&) = delete;
    Flight& operator=(const Flight&) = delete;

    // Wait for the end of the copy. After an error of CUDA for the event, wait for its whole lane: the copy may still
    // run, and its memory will be reused.
    cudaError_t wait() {
        const cudaError_t state = cudaEventSynchronize(completed);
        if (state != cudaSuccess) lane->synchronize();
        return state;
    }

    cudaEvent_t completed = nullptr;
    Lane* lane = nullptr;
    std::vector<Move*> lists;  // what its kernels read
};

}  // namespace kvtier::cuda
