#include "machine.hpp"

#include <algorithm>
#include <utility>

namespace cuda_stand_in {

namespace {

// How often the host may ask for an operation that nothing else demands before it runs.
constexpr unsigned patience = 2;

std::unique_ptr<Machine>& only_machine() {
    // Never destroyed: threads of the process may call until its very end.
    static auto* machine = new std::unique_ptr<Machine>(std::make_unique<Machine>(Pace::late, 0, 1));
    return *machine;
}

// Handles are numbers and never reused, so that an old one is recognized.
std::uintptr_t next_handle() {
    static std::uintptr_t handle = 0x1000;
    return handle += 16;
}

}  // namespace

cudaError_t& last_error() {
    thread_local cudaError_t error = cudaSuccess;
    return error;
}

int& current_device() {
    thread_local int device = 0;
    return device;
}

bool& has_current_context() {
    thread_local bool has = false;
    return has;
}

Machine& Machine::current() { return *only_machine(); }

Machine::Machine(Pace pace, unsigned seed, int devices) : devices(devices), random(seed), pace_(pace) {}

Machine::~Machine() {
    {
        std::unique_lock lock(mutex);
        drain(lock);
        ending_ = true;
        changed_.notify_all();
    }
    for (Stream& stream : all_streams) stream.thread.join();
}

cudaError_t Machine::enter(const char* call) {
    calls.emplace_back(call);
    if (calls.size() == fault.call) {
        if (fault.lasting) lost = fault.error;
        changed_.notify_all();
        return last_error() = fault.error;
    }
    if (lost != cudaSuccess) last_error() = lost;
    return lost;
}

cudaError_t Machine::enqueue(Stream& stream, Work given) {
    auto work = std::make_shared<Work>(std::move(given));
    work->stream = stream.index;
    work->number = ++stream.last;
    stream.order.join(known_);
    if (work->waits_for) stream.order.join(work->waits_for->order);
    stream.order.include(work->stream, work->number);
    work->order = stream.order;
    if (work->run) work->operation = ++works_;
    work->fails = work->run && work->operation == failing_work;
    if (lost == cudaSuccess) check_order(*work);
    record(*work);
    stream.queue.push_back(work);
    unknown_.push_back(work);
    if (pace_ == Pace::early || (pace_ == Pace::random && random() % 2)) demand(*work);
    return cudaSuccess;
}

void Machine::check_order(const Work& work) {
    for (const auto& earlier : unknown_) {
        if (work.order.includes(earlier->stream, earlier->number)) continue;
        for (const Access& one : earlier->accesses) {
            for (const Access& other : work.accesses) {
                if (!one.overlaps(other) || (!one.writes && !other.writes)) continue;
                violate(work.what + " does not wait for " + earlier->what + " on the same memory");
                return;
            }
        }
    }
}

void Machine::record(const Work& work) {
    if (!work.operation) return;
    std::string line = std::to_string(work.operation) + " " + std::to_string(work.stream) + " " + work.what + ":";
    for (const auto& earlier : unknown_) {
        const bool other = earlier->operation && earlier->stream != work.stream;
        if (other && work.order.includes(earlier->stream, earlier->number)) {
            line += " " + std::to_string(earlier->operation);
        }
    }
    trace.push_back(line);
}

void Machine::check_host(const Access& access, const std::string& what, std::unique_lock<std::mutex>& lock) {
    if (lost != cudaSuccess) {  // No operation will run any more, but some may still be running.
        changed_.wait(lock, [this] { return std::ranges::none_of(all_streams, &Stream::running); });
        return;
    }
    for (const auto& work : unknown_) {
        const bool conflicts = std::ranges::any_of(work->accesses, [&](const Access& other) {
            return access.overlaps(other) && (access.writes || other.writes);
        });
        if (conflicts) return violate(what + " does not wait for " + work->what);
    }
}

void Machine::demand(const Work& work) {
    Stream& stream = all_streams[work.stream];
    if (stream.demanded >= work.number) return;
    stream.demanded = work.number;
    for (const auto& queued : stream.queue) {
        if (queued->number <= work.number && queued->waits_for) demand(*queued->waits_for);
    }
    changed_.notify_all();
}

// By value: the stream releases work that is done, during the wait.
cudaError_t Machine::wait_for(std::shared_ptr<Work> work, std::unique_lock<std::mutex>& lock) {
    demand(*work);
    changed_.wait(lock, [&] { return work->done; });
    if (lost != cudaSuccess) return last_error() = lost;
    known_.join(work->order);
    forget_known();
    return cudaSuccess;
}

cudaError_t Machine::synchronize(Stream& stream, std::unique_lock<std::mutex>& lock) {
    if (!stream.queue.empty()) return wait_for(stream.queue.back(), lock);
    known_.join(stream.order);
    forget_known();
    return cudaSuccess;
}

bool Machine::query(Event& event) {
    if (!event.record) return true;
    if (pace_ != Pace::stuck && ++event.queries > patience) demand(*event.record);
    if (!event.record->done) return false;
    known_.join(event.record->order);
    forget_known();
    return true;
}

void Machine::forget_known() {
    std::erase_if(unknown_, [this](const auto& work) { return known_.includes(work->stream, work->number); });
}

bool Machine::runnable(const Stream& stream) const {
    if (stream.queue.empty()) return false;
    const Work& first = *stream.queue.front();
    if (lost != cudaSuccess) return true;
    return first.number <= stream.demanded && (!first.waits_for || first.waits_for->done);
}

void Machine::serve(Stream& stream) {
    std::unique_lock lock(mutex);
    while (true) {
        changed_.wait(lock, [&] { return ending_ || runnable(stream); });
        if (stream.queue.empty()) return;
        const std::shared_ptr<Work> work = stream.queue.front();
        if (work->fails) lost = cudaErrorIllegalAddress;
        if (work->run && lost == cudaSuccess) {
            stream.running = true;
            lock.unlock();
            work->run();
            lock.lock();
            stream.running = false;
        }
        work->done = true;
        work->run = {};
        stream.queue.pop_front();
        changed_.notify_all();
    }
}

Stream* Machine::start_stream(int device) {
    Stream& stream = all_streams.emplace_back();
    stream.index = all_streams.size() - 1;
    stream.device = device;
    stream.thread = std::thread([this, &stream] { serve(stream); });
    return &stream;
}

Stream* Machine::stream(cudaStream_t handle) {
    // The null stream of each device, by a handle that no other stream has.
    if (!handle) handle = reinterpret_cast<cudaStream_t>(static_cast<std::uintptr_t>(current_device()) + 1);
    const auto found = streams.find(handle);
    if (found != streams.end()) return found->second;
    if (reinterpret_cast<std::uintptr_t>(handle) <= static_cast<std::uintptr_t>(devices)) {
        return streams[handle] = start_stream(current_device());
    }
    violate("a stream is used that does not exist");
    return nullptr;
}

Event* Machine::event(cudaEvent_t handle) {
    const auto found = events.find(handle);
    if (found != events.end()) return &found->second;
    violate("an event is used that does not exist");
    return nullptr;
}

cudaStream_t Machine::add_stream(int device) {
    const auto handle = reinterpret_cast<cudaStream_t>(next_handle());
    streams[handle] = start_stream(device);
    return handle;
}

cudaEvent_t Machine::add_event(int device) {
    const auto handle = reinterpret_cast<cudaEvent_t>(next_handle());
    events[handle].device = device;
    return handle;
}

void Machine::drain(std::unique_lock<std::mutex>& lock) {
    for (Stream& stream : all_streams) {
        if (!stream.queue.empty()) demand(*stream.queue.back());
    }
    changed_.wait(lock, [this] {
        return std::ranges::all_of(all_streams, [](const Stream& stream) { return stream.queue.empty(); });
    });
}

void Machine::violate(const std::string& what) {
    if (std::ranges::find(violations, what) == violations.end()) violations.push_back(what);
}

void reset(Pace pace, unsigned seed, int devices) {
    only_machine() = std::make_unique<Machine>(pace, seed, devices);
    current_device() = 0;
    last_error() = cudaSuccess;
    has_current_context() = false;
}

std::vector<std::string> finish() {
    Locked machine;
    machine->drain(machine.lock);
    return machine->violations;
}

std::vector<std::string> calls() { return Locked()->calls; }

std::vector<std::string> trace() { return Locked()->trace; }

void synchronize() {
    Locked machine;
    has_current_context() = true;
    for (Stream& stream : machine->all_streams) machine->synchronize(stream, machine.lock);
}

void wait_for_stream(cudaStream_t handle) {
    Locked machine;
    if (Stream* stream = machine->stream(handle)) machine->synchronize(*stream, machine.lock);
}

void fail(const Fault& fault) { Locked()->fault = fault; }

void fail_operation(std::size_t number) { Locked()->failing_work = number; }

Alive alive() {
    const Locked machine;
    const auto streams = std::ranges::count_if(machine->streams, [&](const auto& entry) {
        return reinterpret_cast<std::uintptr_t>(entry.first) > static_cast<std::uintptr_t>(machine->devices);
    });
    return {static_cast<std::size_t>(streams), machine->events.size(), machine->memory.count(Kind::allocated),
            machine->memory.count(Kind::registered), machine->memory.count(Kind::bounce)};
}

bool has_context(int device) { return Locked()->contexts.contains(device); }

}  // namespace cuda_stand_in
