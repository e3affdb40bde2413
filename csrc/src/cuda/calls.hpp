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

// For a call whose failure nobody can handle. Clears the error, or it would be taken for that of another call, in this
// library or in torch.
inline void ignore(cudaError_t error) {
    if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
}

// Sets this thread's current device, and restores the previous one at the end.
class OnDevice {
public:
    explicit OnDevice(int device) : device_(device) {
        check(cudaGetDevice(&before_), "cudaGetDevice");
        if (before_ != device) check(cudaSetDevice(device), "cudaSetDevice");
    }
    ~OnDevice() {
        if (before_ != device_) ignore(cudaSetDevice(before_));
    }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

private:
    int device_;
    int before_ = 0;
};

}  // namespace kvtier::cuda
