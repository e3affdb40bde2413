#include "calls.hpp"
#include "kvtier/cuda.hpp"

namespace kvtier::cuda {

int device_count() {
    int count = 0;
    if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
    static_cast<void>(cudaGetLastError());
    return 0;
}

void use_device(int device) { check(cudaSetDevice(device), "cudaSetDevice"); }

PinnedMemory::PinnedMemory(std::span<std::byte> memory) : memory_(memory) {
    check(cudaHostRegister(memory.data(), memory.size(), cudaHostRegisterPortable | cudaHostRegisterMapped),
          "cudaHostRegister");
}

PinnedMemory::~PinnedMemory() {
    // An error here cannot be handled; the kernel unpins the pages when the process exits.
    ignore(cudaHostUnregister(memory_.data()));
}

std::span<std::byte> PinnedMemory::on_device() const {
    void* address = nullptr;
    check(cudaHostGetDevicePointer(&address, memory_.data(), 0), "cudaHostGetDevicePointer");
    return {static_cast<std::byte*>(address), memory_.size()};
}

}  // namespace kvtier::cuda
