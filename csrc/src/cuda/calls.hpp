// Helpers for the CUDA runtime: exceptions, and the current device.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "kvtier/cuda.hpp"

namespace kvtier::cuda {

inline void check(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return;
    static_cast<void>(cudaGetLastError());  // Clear it, or the next cudaGetLastError() would report it again.
    throw CudaError(std::string(what) + ": " + cudaGetErrorString(error));
}

// Sets this thread's current device, and restores the previous one at the end.
class OnDevice {
public:
    explicit OnDevice(int device) {
        check(cudaGetDevice(&before_), "cudaGetDevice");
        if (before_ != device) check(cudaSetDevice(device), "cudaSetDevice");
    }
    ~OnDevice() { static_cast<void>(cudaSetDevice(before_)); }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

private:
    int before_ = 0;
};

}  // namespace kvtier::cuda
