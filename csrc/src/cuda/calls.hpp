// CUDA's runtime, with exceptions and with the device that one means.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "kvtier/cuda.hpp"

namespace kvtier::cuda {

inline void check(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return;
    static_cast<void>(cudaGetLastError());  // Else the next call that asks for it would report this one.
    throw CudaError(std::string(what) + ": " + cudaGetErrorString(error));
}

// Makes a device the current one of this thread, and the former again at the end.
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
