// Page copies between an engine's KV memory on a CUDA device and an arena in pinned host memory.
//
// Functions do not wait for the device unless documented, and never synchronize it: copies run on separate streams,
// which wait for the engine's stream with an event, and record an event when done. The engine's stream waits for a copy
// only where hold() is called. CUDA errors are thrown as CudaError.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <vector>

#include "kvtier/copy.hpp"

namespace kvtier::cuda {

class CudaError : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

// The number of devices; 0 without a driver.
int device_count();

// Make a device the current one of this thread. In a new thread it is device 0 until then, and almost every function of
// CUDA creates a context there, which takes hundreds of megabytes of its memory.
void use_device(int device);

// Host memory registered with CUDA while this lives: pinned, and accessible to every device. Registering pins each
// page, normal or huge, so it happens once, when an arena is first used. The memory must stay mapped while this lives,
// and no copy may be in flight when it is destroyed.
class PinnedMemory {
public:
    explicit PinnedMemory(std::span<std::byte> memory);
    ~PinnedMemory();
    PinnedMemory(const PinnedMemory&) = delete;
    PinnedMemory& operator=(const PinnedMemory&) = delete;

    std::span<std::byte> on_host() const { return memory_; }
    // The same memory at the address for kernels on the current device.
    std::span<std::byte> on_device() const;

private:
    std::span<std::byte> memory_;
};

// How to copy a batch. `best`: through bounce buffers on the device, if there is memory for them. `direct`: with a
// kernel that accesses host memory, which keeps some multiprocessors from the engine as long as PCIe takes.
enum class CopyMethod { best, direct };

using Ticket = std::uint64_t;

struct Move;
class MoveLists;

// An engine's KV memory on one device. Not thread-safe.
class DevicePages {
public:
    // Takes four bounce buffers on the device, two for each direction. Without memory for them, copies are direct.
    DevicePages(int device, KvMemory memory, std::size_t buffer_bytes = std::size_t{16} << 20);
    ~DevicePages();  // Waits for the copies in flight.
    DevicePages(const DevicePages&) = delete;
    DevicePages& operator=(const DevicePages&) = delete;

    // Whether there are bounce buffers.
    bool staged() const;

    // Start to copy the pages of all chunks; does not wait. The copy runs after the work that is on `engine`, the
    // engine's stream, at the time of the call, and after the copies `after`. Later work on that stream does not wait
    // for it: the caller must leave the pages as they are until it is done, or hold the work that changes them. Throws
    // std::out_of_range as KvMemory::copy does, before anything is copied. After a CudaError no copy is running, which
    // may have taken a wait.
    Ticket begin(const PinnedMemory& arena, std::span<const ChunkPages> chunks, Direction direction,
                 cudaStream_t engine, CopyMethod method = CopyMethod::best, std::span<const Ticket> after = {});

    // Let later work on a stream wait for a copy. Does not wait itself, unless CUDA fails, and does not throw. Unknown
    // tickets, such as those of copies that are done, hold nothing.
    void hold(cudaStream_t stream, Ticket ticket);

    // Whether the copy is done. Does not wait. An unknown ticket counts as done, as does one after its CudaError.
    bool done(Ticket ticket);

    // Wait until the copy is done.
    void wait(Ticket ticket);

private:
    struct Flight;
    struct Lane;

    std::unique_ptr<Lane>& lane_of(Direction direction) { return lanes_[direction == Direction::into_engine ? 0 : 1]; }
    std::span<Move> list_for(Flight& flight);
    void copy_staged(std::span<const PageRun> runs, Flight& flight);
    void copy_directly(const PinnedMemory& arena, std::span<const PageRun> runs, Flight& flight);
    std::unique_ptr<Flight> acquire_flight();
    void retire(Ticket ticket, cudaError_t state);

    int device_;
    KvMemory memory_;
    // By direction, because PCIe is full duplex.
    std::unique_ptr<Lane> lanes_[2];
    std::unique_ptr<MoveLists> lists_;
    std::map<Ticket, std::unique_ptr<Flight>> in_flight_;
    std::vector<std::unique_ptr<Flight>> free_;
    Ticket next_ = 1;
};

}  // namespace kvtier::cuda
