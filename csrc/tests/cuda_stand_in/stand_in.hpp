// A stand-in for CUDA, for tests on machines without a GPU: the functions of the runtime that kvtier calls, on threads.
// Operations run late and in any order that CUDA allows, and what CUDA forbids or leaves undefined is reported.
//
// All threads of the host count as one: what one of them has waited for, all know. Data races between them are
// ThreadSanitizer's to find.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace cuda_stand_in {

// When operations run: at once, only when the host needs them, or at random one or the other. A host that keeps asking
// whether one is done needs it, unless the device is stuck: then only waiting makes it run.
enum class Pace { early, late, random, stuck };

// Make a new machine. Whatever was queued on the previous one is finished first.
void reset(Pace pace, unsigned seed = 0, int devices = 1);

// Finish all operations, and return what was wrong since the reset.
std::vector<std::string> finish();

// Wait for all operations of all streams, and create a context if necessary, as cudaDeviceSynchronize() does.
void synchronize();

// Wait for the operations of one stream, as the engine does for sampled tokens. Not a call of CUDA.
void wait_for_stream(cudaStream_t stream);

// The names of all calls since the reset, in order.
std::vector<std::string> calls();

// The kernels and copies since the reset, in the order in which they were queued: "NUMBER STREAM WHAT: NUMBERS", the
// last ones of those in other streams that it waits for, and of which the host does not know yet that they are done.
std::vector<std::string> trace();

// The call with this number since the reset, from 1 on, fails; 0: none. With `lasting`, the device is lost: so do all
// later calls, and operations that have not run never will.
struct Fault {
    std::size_t call = 0;
    cudaError_t error = cudaSuccess;
    bool lasting = false;
};
void fail(const Fault& fault);

// The operation with this number since the reset, from 1 on, fails when it runs. The device is lost then.
void fail_operation(std::size_t number);

// What exists: each should be 0 in the end.
struct Alive {
    std::size_t streams, events, allocated, registered, buffers;
    bool operator==(const Alive&) const = default;
};
Alive alive();

// Whether this process has a context on a device, which takes hundreds of megabytes there.
bool has_context(int device);

// Declare host memory to be device memory of an engine, until free_device().
void add_device(std::span<std::byte> memory);
// Check that no operation can still access it, as an engine requires which reuses memory without asking CUDA.
void free_device(std::byte* begin);

// The host reads or writes these bytes now.
void on_host(std::span<const std::byte> bytes, bool writes);

// A kernel of the engine, which runs `run` and accesses these bytes.
void launch(cudaStream_t stream, std::span<const std::byte> bytes, bool writes, std::function<void()> run);

}  // namespace cuda_stand_in
