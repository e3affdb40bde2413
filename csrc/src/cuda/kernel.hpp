// One launch for a whole batch of runs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace kvtier::cuda {

struct Move {
    std::byte* to;
    const std::byte* from;
    std::size_t length;
};

// Put a kernel on `stream` that carries out all moves. `moves` lie in memory that the device can read, and stay
// as they are until it is done.
cudaError_t launch(const Move* moves, std::size_t count, cudaStream_t stream);

}  // namespace kvtier::cuda
