// The copy kernel. Apart from its launch, so that tests can compile it for the host.
//
// One warp per move: 32 lanes of 16 bytes read 512 contiguous bytes, which are full transactions on PCIe and NVLink
// (CUDA C++ Best Practices Guide, "Zero Copy" and "Coalesced Access to Global Memory"). Each warp has eight of these in
// flight, so that 128 warps keep 512 KiB in flight: more than PCIe 5.0 x16 needs (some 60 GB/s times 2 us).
#pragma once

#include <cstdint>

#include "kernel.hpp"

namespace kvtier::cuda {

inline constexpr int warp_lanes = 32;
inline constexpr int in_flight = 8;

__device__ inline void copy_vectors(uint4* to, const uint4* from, std::size_t count, unsigned lane) {
    std::size_t at = lane;
    for (; at + (in_flight - 1) * warp_lanes < count; at += in_flight * warp_lanes) {
        uint4 held[in_flight];
#pragma unroll
        for (int part = 0; part < in_flight; ++part) held[part] = __ldcs(from + at + part * warp_lanes);
#pragma unroll
        for (int part = 0; part < in_flight; ++part) __stcs(to + at + part * warp_lanes, held[part]);
    }
    for (; at < count; at += warp_lanes) __stcs(to + at, __ldcs(from + at));
}

__device__ inline void copy_bytes(std::byte* to, const std::byte* from, std::size_t count, unsigned lane) {
    for (std::size_t at = lane; at < count; at += warp_lanes) to[at] = from[at];
}

static __global__ void copy_moves(const Move* moves, std::size_t count) {
    const unsigned lane = threadIdx.x % warp_lanes;
    const std::size_t warps = static_cast<std::size_t>(gridDim.x) * blockDim.x / warp_lanes;
    const std::size_t first = (static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x) / warp_lanes;
    for (std::size_t index = first; index < count; index += warps) {
        const Move move = moves[index];
        const std::uintptr_t both =
            reinterpret_cast<std::uintptr_t>(move.to) | reinterpret_cast<std::uintptr_t>(move.from);
        std::size_t vectors = 0;
        if (both % sizeof(uint4) == 0) {
            vectors = move.length / sizeof(uint4);
            copy_vectors(reinterpret_cast<uint4*>(move.to), reinterpret_cast<const uint4*>(move.from), vectors,
                          lane);
        }
        const std::size_t rest = vectors * sizeof(uint4);
        copy_bytes(move.to + rest, move.from + rest, move.length - rest, lane);
    }
}

}  // namespace kvtier::cuda
