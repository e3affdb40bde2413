// The way of the pages of one direction: two streams, and two bounce buffers on the device.
//
// A kernel gathers pages into a buffer, or scatters them from one, at the speed of the device's memory. A copy engine
// moves the buffer over PCIe at its full speed. So the multiprocessors are in use for some microseconds per buffer, not
// as long as PCIe takes, in which kernels of the engine that need all of them would wait.
#pragma once

#include <cstddef>

#include "calls.hpp"

namespace kvtier::cuda {

struct Buffer {
    std::byte* memory = nullptr;
    cudaEvent_t filled = nullptr;
    cudaEvent_t drained = nullptr;
};

struct DevicePages::Lane {
    // Without memory for the buffers, `buffers` have none. Throws CudaError if anything else fails.
    Lane(Direction direction, std::size_t buffer_bytes) : direction(direction), buffer_bytes(buffer_bytes) {
        try {
            create();
        } catch (...) {
            destroy();
            throw;
        }
    }
    ~Lane() { destroy(); }
    Lane(const Lane&) = delete;
    Lane& operator=(const Lane&) = delete;

    bool has_buffers() const { return buffers[0].memory && buffers[1].memory; }

    void synchronize() {
        ignore(cudaStreamSynchronize(kernels));
        ignore(cudaStreamSynchronize(transfers));
    }

    // A buffer is filled by the one and drained by the other.
    cudaStream_t fills() const { return direction == Direction::into_engine ? transfers : kernels; }
    cudaStream_t drains() const { return direction == Direction::into_engine ? kernels : transfers; }

    const Direction direction;
    const std::size_t buffer_bytes;
    cudaStream_t kernels = nullptr;
    cudaStream_t transfers = nullptr;
    Buffer buffers[2];
    std::size_t next = 0;  // the buffer to use next, modulo their number

private:
    void create() {
        int lowest = 0;
        int highest = 0;
        check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange");
        // Lowest priority, so that the engine's kernels go first.
        for (cudaStream_t* const stream : {&kernels, &transfers}) {
            check(cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking, lowest), "cudaStreamCreate");
        }
        for (Buffer& buffer : buffers) {
            for (cudaEvent_t* const event : {&buffer.filled, &buffer.drained}) {
                check(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "cudaEventCreate");
            }
            const cudaError_t error = cudaMalloc(reinterpret_cast<void**>(&buffer.memory), buffer_bytes);
            if (error == cudaSuccess) continue;
            buffer.memory = nullptr;
            if (error != cudaErrorMemoryAllocation) check(error, "cudaMalloc");
            ignore(error);
        }
    }

    void destroy() {
        for (Buffer& buffer : buffers) {
            if (buffer.memory) ignore(cudaFree(buffer.memory));
            for (const cudaEvent_t event : {buffer.filled, buffer.drained}) {
                if (event) ignore(cudaEventDestroy(event));
            }
        }
        for (const cudaStream_t stream : {kernels, transfers}) {
            if (stream) ignore(cudaStreamDestroy(stream));
        }
    }
};

}  // namespace kvtier::cuda
