// The functions of the CUDA runtime.

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "machine.hpp"

using namespace cuda_stand_in;

namespace {

constexpr int lowest_priority = 0;
constexpr int highest_priority = -5;

cudaError_t failed(cudaError_t error) { return last_error() = error; }

// Most functions create a context on the current device, if this process has none there.
cudaError_t enter(const Locked& machine, const char* call) {
    machine->contexts.insert(current_device());
    return machine->enter(call);
}

// A copy between two places.
cudaError_t copy(Locked& machine, Access from, Access to, cudaStream_t handle) {
    Stream* stream = machine->stream(handle);
    if (!stream) return failed(cudaErrorInvalidResourceHandle);
    Work work{.what = "a copy by the copy engines"};
    for (Access* const access : {&from, &to}) {
        const std::string problem = machine->memory.resolve(*access, stream->device, false);
        if (!problem.empty()) {
            machine->violate(work.what + " accesses " + problem);
            return failed(cudaErrorInvalidValue);
        }
        work.accesses.push_back(*access);
    }
    work.run = [from, to] { std::memcpy(const_cast<std::byte*>(to.begin), from.begin, from.length); };
    return machine->enqueue(*stream, std::move(work));
}

cudaError_t add(Locked& machine, const Range& range) {
    const bool added = machine->memory.add(range);
    return added ? cudaSuccess : failed(cudaErrorHostMemoryAlreadyRegistered);
}

bool is_mapped(const Range& range) {
    const auto begin = reinterpret_cast<std::uintptr_t>(range.begin);
    const std::uintptr_t page = begin - begin % 4096;
    std::vector<unsigned char> resident((begin + range.length - page + 4095) / 4096);
    return mincore(reinterpret_cast<void*>(page), begin + range.length - page, resident.data()) == 0;
}

// Remove memory that no operation may still access. If one may, it stays mapped for it.
cudaError_t remove(Locked& machine, void* begin, Kind kind, const std::string& what) {
    const Range* range = machine->memory.at(begin);
    if (!range || range->kind != kind) {
        machine->violate(what + " of memory that was not");
        return failed(cudaErrorInvalidValue);
    }
    const std::size_t before = machine->violations.size();
    if (kind == Kind::registered && !is_mapped(*range)) machine->violate("pinned memory was unmapped before " + what);
    machine->check_host({range->begin, range->length, true}, what, machine.lock);
    const Range removed = *machine->memory.remove(begin);
    if (machine->violations.size() > before) {
        machine->memory.bury(removed);
    } else {
        Memory::release(removed);
    }
    return cudaSuccess;
}

}  // namespace

extern "C" {

cudaError_t cudaGetLastError() {
    const cudaError_t lost = Locked()->lost;
    const cudaError_t error = std::exchange(last_error(), cudaSuccess);
    return lost == cudaSuccess ? error : lost;
}

const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "no error";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
        default: return "another error";
    }
}

cudaError_t cudaGetDeviceCount(int* count) {
    Locked machine;
    *count = machine->devices;
    return machine->enter("cudaGetDeviceCount");
}

cudaError_t cudaGetDevice(int* device) {
    Locked machine;
    *device = current_device();
    return machine->enter("cudaGetDevice");
}

cudaError_t cudaSetDevice(int device) {
    Locked machine;
    if (const cudaError_t error = machine->enter("cudaSetDevice")) return error;
    if (device < 0 || device >= machine->devices) return failed(cudaErrorInvalidDevice);
    current_device() = device;
    machine->contexts.insert(device);  // At once since CUDA 12.
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
    Locked machine;
    *lowest = lowest_priority;
    *highest = highest_priority;
    return enter(machine, "cudaDeviceGetStreamPriorityRange");
}

cudaError_t cudaHostRegister(void* memory, size_t length, unsigned flags) {
    Locked machine;
    if (const cudaError_t error = enter(machine, "cudaHostRegister")) return error;
    return add(machine, {.begin = static_cast<std::byte*>(memory),
                         .length = length,
                         .kind = Kind::registered,
                         .portable = (flags & cudaHostRegisterPortable) != 0,
                         .device = current_device()});
}

cudaError_t cudaHostUnregister(void* memory) {
    Locked machine;
    const cudaError_t error = enter(machine, "cudaHostUnregister");
    const cudaError_t removed = remove(machine, memory, Kind::registered, "unregistering pinned memory");
    return error ? error : removed;
}

cudaError_t cudaHostGetDevicePointer(void** address, void* memory, unsigned) {
    Locked machine;
    if (const cudaError_t error = enter(machine, "cudaHostGetDevicePointer")) return error;
    const Range* range = machine->memory.at(memory);
    if (!range) return failed(cudaErrorInvalidValue);
    *address = range->on_device;
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** memory, size_t length, unsigned) {
    Locked machine;
    if (const cudaError_t error = enter(machine, "cudaHostAlloc")) return error;
    *memory = std::malloc(length);
    return add(machine, {.begin = static_cast<std::byte*>(*memory),
                         .length = length,
                         .kind = Kind::allocated,
                         .portable = true,
                         .device = current_device()});
}

cudaError_t cudaFreeHost(void* memory) {
    Locked machine;
    const cudaError_t error = enter(machine, "cudaFreeHost");
    if (!memory) return error;
    const cudaError_t removed = remove(machine, memory, Kind::allocated, "freeing pinned memory");
    return error ? error : removed;
}

cudaError_t cudaMalloc(void** memory, size_t length) {
    Locked machine;
    if (const cudaError_t error = enter(machine, "cudaMalloc")) return error;
    *memory = std::malloc(length);
    return add(machine, {.begin = static_cast<std::byte*>(*memory),
                         .length = length,
                         .kind = Kind::bounce,
                         .device = current_device()});
}

cudaError_t cudaFree(void* memory) {
    Locked machine;
    const cudaError_t error = enter(machine, "cudaFree");
    const cudaError_t removed = remove(machine, memory, Kind::bounce, "freeing a bounce buffer");
    return error ? error : removed;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
    Locked machine;
    if (const cudaError_t error = enter(machine, "cudaStreamCreateWithPriority")) return error;
    if (flags != cudaStreamNonBlocking) machine->violate("a stream is created that waits for the null stream");
    if (priority != lowest_priority) machine->violate("a stream is created that delays the engine's kernels");
    *stream = machine->add_stream(current_device());
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    Locked machine;
    const cudaError_t error = enter(machine, "cudaStreamDestroy");
    if (!machine->stream(handle)) return failed(cudaErrorInvalidResourceHandle);
    machine->streams.erase(handle);  // What is queued still runs.
    return error;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    Locked machine;
    if (const cudaError_t error = enter(machine, "cudaStreamSynchronize")) return error;
    Stream* stream = machine->stream(handle);
    if (!stream) return failed(cudaErrorInvalidResourceHandle);
    return machine->synchronize(*stream, machine.lock);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t event_handle, unsigned) {
    Locked machine;
    if (const cudaError_t error = enter(machine, "cudaStreamWaitEvent")) return error;
    Stream* stream = machine->stream(stream_handle);
    Event* event = machine->event(event_handle);
    if (!stream || !event) return failed(cudaErrorInvalidResourceHandle);
    return machine->enqueue(*stream, {.what = "waiting for an event", .waits_for = event->record});
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    Locked machine;
    if (const cudaError_t error = enter(machine, "cudaEventCreateWithFlags")) return error;
    *event = machine->add_event(current_device());
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
    Locked machine;
    const cudaError_t error = enter(machine, "cudaEventDestroy");
    if (!machine->event(handle)) return failed(cudaErrorInvalidResourceHandle);
    machine->events.erase(handle);
    return error;
}

cudaError_t cudaEventRecord(cudaEvent_t event_handle, cudaStream_t stream_handle) {
    Locked machine;
    if (const cudaError_t error = enter(machine, "cudaEventRecord")) return error;
    Stream* stream = machine->stream(stream_handle);
    Event* event = machine->event(event_handle);
    if (!stream || !event || stream->device != event->device) return failed(cudaErrorInvalidResourceHandle);
    const cudaError_t result = machine->enqueue(*stream, {.what = "the record of an event"});
    event->record = stream->queue.back();
    event->queries = 0;
    return result;
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
    Locked machine;
    if (const cudaError_t error = enter(machine, "cudaEventQuery")) return error;
    Event* event = machine->event(handle);
    if (!event) return failed(cudaErrorInvalidResourceHandle);
    const bool done = machine->query(*event);
    if (machine->lost != cudaSuccess) return failed(machine->lost);
    return done ? cudaSuccess : failed(cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    Locked machine;
    if (const cudaError_t error = enter(machine, "cudaEventSynchronize")) return error;
    Event* event = machine->event(handle);
    if (!event) return failed(cudaErrorInvalidResourceHandle);
    return event->record ? machine->wait_for(event->record, machine.lock) : cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t length, cudaMemcpyKind, cudaStream_t stream) {
    Locked machine;
    if (const cudaError_t error = enter(machine, "cudaMemcpyAsync")) return error;
    return copy(machine, {static_cast<const std::byte*>(from), length, false},
                {static_cast<const std::byte*>(to), length, true}, stream);
}

}  // extern "C"

namespace cuda_stand_in {

void add_device(std::span<std::byte> memory) {
    Locked machine;
    add(machine, {.begin = memory.data(),
                  .length = memory.size(),
                  .kind = Kind::device,
                  .portable = true,
                  .device = current_device()});
}

void free_device(std::byte* begin) {
    Locked machine;
    remove(machine, begin, Kind::device, "freeing device memory");
}

void on_host(std::span<const std::byte> bytes, bool writes) {
    Locked machine;
    machine->check_host({bytes.data(), bytes.size(), writes}, "the host", machine.lock);
}

void launch(cudaStream_t handle, std::span<const std::byte> bytes, bool writes, std::function<void()> run) {
    Locked machine;
    Stream* stream = machine->stream(handle);
    if (!stream) return;
    machine->enqueue(*stream, {.what = "a kernel of the engine",
                               .accesses = {{bytes.data(), bytes.size(), writes}},
                               .run = std::move(run)});
}

}  // namespace cuda_stand_in
