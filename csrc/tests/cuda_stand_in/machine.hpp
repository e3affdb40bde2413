// The simulated machine: streams, which are threads, and what the host knows of their progress.
//
// It checks the order of operations and not their timing. Each operation lists the bytes that it accesses, and two
// operations on the same bytes, one of which writes, must be ordered by a stream, an event or the host. So a missing
// synchronization is found in every run, also where the bytes happen to be right.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "clock.hpp"
#include "memory.hpp"
#include "stand_in.hpp"

namespace cuda_stand_in {

// An operation in a stream: a kernel, a copy, the record of an event, or waiting for one.
struct Work {
    std::string what;
    std::vector<Access> accesses = {};
    std::function<void()> run = {};
    std::shared_ptr<Work> waits_for = nullptr;
    std::size_t stream = 0;
    std::uint64_t number = 0;   // in its stream
    std::size_t operation = 0;  // of all kernels and copies; 0 for others
    Clock order = {};  // what happens before it, and itself
    bool fails = false;
    bool done = false;
};

struct Stream {
    std::size_t index = 0;
    int device = 0;
    std::deque<std::shared_ptr<Work>> queue;  // the first one may be running
    std::uint64_t last = 0;
    std::uint64_t demanded = 0;  // up to this one, operations may run
    Clock order;
    bool running = false;
    std::thread thread;
};

struct Event {
    int device = 0;
    std::shared_ptr<Work> record;  // the last one
    unsigned queries = 0;          // since then
};

class Machine {
public:
    Machine(Pace pace, unsigned seed, int devices);
    ~Machine();  // Runs all that is queued.
    Machine(const Machine&) = delete;
    Machine& operator=(const Machine&) = delete;

    // The machine since the last reset(). Its functions require a lock of `mutex`.
    static Machine& current();

    // Count a call of the API; return the error with which it fails, if any. A call that releases something does so
    // even then: its error may be that of earlier work.
    cudaError_t enter(const char* call);

    // Queue an operation, after checking what it accesses.
    cudaError_t enqueue(Stream& stream, Work work);
    // Check that the host may access, reuse or free these bytes now.
    void check_host(const Access& access, const std::string& what, std::unique_lock<std::mutex>& lock);
    // Block until an operation is done.
    cudaError_t wait_for(std::shared_ptr<Work> work, std::unique_lock<std::mutex>& lock);
    // Block until all that is in a stream now is done.
    cudaError_t synchronize(Stream& stream, std::unique_lock<std::mutex>& lock);
    // Whether an operation is done, as far as the host can tell. Makes it run if the host keeps asking.
    bool query(Event& event);

    // Return nullptr, and report a violation, if it does not exist. The null stream exists on each device.
    Stream* stream(cudaStream_t handle);
    Event* event(cudaEvent_t handle);
    cudaStream_t add_stream(int device);
    cudaEvent_t add_event(int device);

    // Finish everything, as at the end of a process.
    void drain(std::unique_lock<std::mutex>& lock);
    void violate(const std::string& what);

    std::mutex mutex;
    Memory memory;
    std::deque<Stream> all_streams;  // also those that are destroyed, whose work still runs
    std::map<cudaStream_t, Stream*> streams;
    std::map<cudaEvent_t, Event> events;
    std::set<int> contexts;  // the devices on which this process has one
    std::vector<std::string> calls;
    std::vector<std::string> trace;  // see stand_in.hpp
    std::vector<std::string> violations;
    Fault fault;
    std::size_t failing_work = 0;  // the number of the operation that fails; 0: none
    cudaError_t lost = cudaSuccess;  // why no device is usable any more
    const int devices;
    std::minstd_rand random;

private:
    Stream* start_stream(int device);
    void check_order(const Work& work);
    void record(const Work& work);
    void demand(const Work& work);
    bool runnable(const Stream& stream) const;
    void serve(Stream& stream);
    void forget_known();

    const Pace pace_;
    std::condition_variable changed_;
    bool ending_ = false;
    Clock known_;  // what the host knows to be done
    std::vector<std::shared_ptr<Work>> unknown_;
    std::size_t works_ = 0;
};

// A lock of the current machine.
class Locked {
public:
    Locked() : machine(Machine::current()), lock(machine.mutex) {}
    Machine* operator->() const { return &machine; }

    Machine& machine;
    std::unique_lock<std::mutex> lock;
};

// The error that cudaGetLastError() returns next, and the current device, of this thread.
cudaError_t& last_error();
int& current_device();
// Whether this thread has a context for the driver's functions, which do not create one as the runtime's do.
bool& has_current_context();

}  // namespace cuda_stand_in
