#include "copy_moves.cuh"

namespace kvtier::cuda {

namespace {

constexpr int threads_per_block = 512;

}  // namespace

cudaError_t launch(const Move* moves, std::size_t count, unsigned max_blocks, cudaStream_t stream) {
    constexpr std::size_t warps_per_block = threads_per_block / warp_lanes;
    const std::size_t wanted = (count + warps_per_block - 1) / warps_per_block;
    const unsigned blocks = wanted < max_blocks ? static_cast<unsigned>(wanted) : max_blocks;
    copy_moves<<<blocks, threads_per_block, 0, stream>>>(moves, count);
    return cudaGetLastError();
}

cudaError_t load_kernel() {
    cudaFuncAttributes attributes{};
    return cudaFuncGetAttributes(&attributes, copy_moves);
}

}  // namespace kvtier::cuda
