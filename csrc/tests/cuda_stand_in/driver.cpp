// The functions of the CUDA driver: device memory that two processes share. It is a memfd, which the other process
// opens through /proc.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "machine.hpp"

using namespace cuda_stand_in;

namespace {

constexpr int out_of_memory = 2;
constexpr int no_context = 201;
constexpr int invalid_handle = 400;

struct Handle {
    unsigned char bytes[64];
};

struct Shared {
    int process;
    int descriptor;
    std::size_t length;
};

// By address, the memory that this process has allocated and may share.
std::map<std::uintptr_t, Shared>& allocated() {
    static auto* memory = new std::map<std::uintptr_t, Shared>;
    return *memory;
}

std::byte* map(int descriptor, std::size_t length) {
    void* mapped = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    return mapped == MAP_FAILED ? nullptr : static_cast<std::byte*>(mapped);
}

int enter(const char* call) { return Locked()->enter(call); }

}  // namespace

extern "C" {

int cuInit(unsigned) { return enter("cuInit"); }

int cuDeviceGet(int* device, int number) {
    *device = number;
    return enter("cuDeviceGet");
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
    Locked machine;
    *context = &machine.machine;
    machine->contexts.insert(device);
    return machine->enter("cuDevicePrimaryCtxRetain");
}

int cuCtxSetCurrent(void*) {
    has_current_context() = true;
    return enter("cuCtxSetCurrent");
}

int cuMemAlloc_v2(std::uintptr_t* address, std::size_t length) {
    if (const int error = enter("cuMemAlloc_v2")) return error;
    if (!has_current_context()) return no_context;
    const int descriptor = memfd_create("cuda_stand_in", MFD_CLOEXEC);
    if (ftruncate(descriptor, static_cast<off_t>(length))) return out_of_memory;
    std::byte* mapped = map(descriptor, length);
    if (!mapped) return out_of_memory;
    add_device({mapped, length});
    *address = reinterpret_cast<std::uintptr_t>(mapped);
    allocated()[*address] = {getpid(), descriptor, length};
    return 0;
}

int cuIpcGetMemHandle(Handle* handle, std::uintptr_t address) {
    if (const int error = enter("cuIpcGetMemHandle")) return error;
    const auto found = allocated().find(address);
    if (found == allocated().end()) return invalid_handle;
    std::memcpy(handle->bytes, &found->second, sizeof(Shared));
    return 0;
}

int cuIpcOpenMemHandle_v2(std::uintptr_t* address, Handle handle, unsigned) {
    if (const int error = enter("cuIpcOpenMemHandle_v2")) return error;
    if (!has_current_context()) return no_context;
    Shared shared{};
    std::memcpy(&shared, handle.bytes, sizeof(Shared));
    const std::string path =
        "/proc/" + std::to_string(shared.process) + "/fd/" + std::to_string(shared.descriptor);
    const int descriptor = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (descriptor < 0) return invalid_handle;
    std::byte* mapped = map(descriptor, shared.length);
    close(descriptor);
    if (!mapped) return out_of_memory;
    add_device({mapped, shared.length});
    *address = reinterpret_cast<std::uintptr_t>(mapped);
    return 0;
}

// The memory stays mapped: an operation that should have been done by now may still access it.
int cuIpcCloseMemHandle(std::uintptr_t address) {
    const int error = enter("cuIpcCloseMemHandle");
    free_device(reinterpret_cast<std::byte*>(address));
    return error;
}

}  // extern "C"
