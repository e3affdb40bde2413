// Copies of pages between an engine's KV memory on a CUDA device and an arena in pinned host memory.
//
// Nothing here waits for a device but what says so, and nothing ever synchronizes one: copies run on streams of
// their own, which wait for the engine's stream by an event, and are done when an event of theirs is. Errors of
// CUDA's are thrown as CudaError.
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

// How many devices there are; 0 where there is no driver, too.
int device_count();

// Host memory that is registered with CUDA as long as this lives: pinned, and readable and writable by every
// device. Registering pins each page of the system's, normal or huge: once, when an arena is first used. The
// memory must be mapped all the while, and no copy may be under way when this ends.
class PinnedMemory {
public:
    explicit PinnedMemory(std::span<std::byte> memory);
    ~PinnedMemory();
    PinnedMemory(const PinnedMemory&) = delete;
    PinnedMemory& operator=(const PinnedMemory&) = delete;

    std::span<std::byte> on_host() const { return memory_; }
    // The same memory, as a kernel of the current device reaches it.
    std::span<std::byte> on_device() const;

private:
    std::span<std::byte> memory_;
};

// Who carries a batch: a kernel that reaches into host memory, in one launch, or the copy engines, in one call.
// `best` takes the copy engines where the runs are long enough for them.
enum class Carrier { best, kernel, copy_engines };

using Ticket = std::uint64_t;

// An engine's KV memory on one device. Called from one thread at a time.
class DevicePages {
public:
    DevicePages(int device, KvMemory memory);
    ~DevicePages();  // Waits for the copies that are under way.
    DevicePages(const DevicePages&) = delete;
    DevicePages& operator=(const DevicePages&) = delete;

    // Begin to copy the pages of all chunks; does not wait. What is on `engine`, the engine's stream, at the time
    // of the call happens before. Where `hold_engine`, what is put on it later waits for the copy. Throws
    // std::out_of_range, before anything is begun, as KvMemory::copy does.
    Ticket begin(const PinnedMemory& arena, std::span<const ChunkPages> chunks, Direction direction,
                 cudaStream_t engine, bool hold_engine, Carrier carrier = Carrier::best);

    // Whether the copy is done. Does not wait. A ticket that is not, or no longer, known counts as done.
    bool done(Ticket ticket);

    // Wait until it is done.
    void wait(Ticket ticket);

private:
    struct Flight;

    cudaStream_t stream_of(Direction direction) const {
        return streams_[direction == Direction::into_engine ? 0 : 1];
    }
    void carry(const PinnedMemory& arena, std::span<const PageRun> runs, Direction direction, Carrier carrier,
               Flight& flight);
    std::unique_ptr<Flight> take_flight();
    void land(Ticket ticket);

    int device_;
    KvMemory memory_;
    cudaStream_t streams_[2] = {};  // by direction: PCIe carries both at once
    std::map<Ticket, std::unique_ptr<Flight>> under_way_;
    std::vector<std::unique_ptr<Flight>> landed_;
    Ticket next_ = 1;
};

}  // namespace kvtier::cuda
