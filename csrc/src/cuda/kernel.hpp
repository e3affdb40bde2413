// Kernel that copies a whole batch of runs in one launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace kvtier::cuda {

struct Move {
    std::byte* to;
    const std::byte* from;
    std::size_t length;
};

// Launch a kernel of up to `max_blocks` blocks on `stream` that executes all moves. `moves` must be in memory that the
// device can read, and stay unchanged until it is done.
cudaError_t launch(const Move* moves, std::size_t count, unsigned max_blocks, cudaStream_t stream);

// Load the kernel onto the current device. CUDA would do so at the first launch, and may wait for the whole device then.
cudaError_t load_kernel();

}  // namespace kvtier::cuda
