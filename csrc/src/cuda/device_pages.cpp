#include <algorithm>
#include <utility>

#include "flight.hpp"
#include "move_lists.hpp"

namespace kvtier::cuda {

namespace {

// Largest move of a warp: large enough to amortize reading the list, small enough to balance the load of the warps.
constexpr std::size_t move_bytes = std::size_t{16} << 10;

// Blocks of the kernel that copies within the device: half of the multiprocessors of an H200, for 30 us a buffer.
constexpr unsigned staged_blocks = 64;
// And over PCIe, which so few keep busy, and which keeps them for all of the copy.
constexpr unsigned direct_blocks = 8;

constexpr std::size_t any_length = ~std::size_t{0};

Move towards(Direction direction, std::byte* in_engine, std::byte* outside, std::size_t length) {
    return direction == Direction::into_engine ? Move{in_engine, outside, length}
                                               : Move{outside, in_engine, length};
}

// Contiguous bytes of the arena, and their place in a buffer.
struct Slice {
    std::byte* held;
    std::size_t in_buffer;
    std::size_t length;
};

// Takes pages in their order, as many as fit.
class Filler {
public:
    // `shift`: offset from the arena's host address to the address at which the device sees it.
    Filler(Direction direction, std::span<const PageRun> runs, std::ptrdiff_t shift)
        : direction_(direction), runs_(runs), shift_(shift) {}

    bool ended() const { return run_ == runs_.size(); }

    // Write the next moves to `list`, and return their number: between pages and a buffer, with the `slices` that
    // belong to it, or without a buffer between pages and the arena.
    std::size_t fill(std::span<Move> list, std::byte* buffer, std::size_t buffer_bytes) {
        slices.clear();
        std::size_t count = 0;
        for (std::size_t used = 0; used < buffer_bytes && count < list.size() && !ended();) {
            const PageRun& run = runs_[run_];
            const std::size_t length = std::min({move_bytes, run.length - at_, buffer_bytes - used});
            std::byte* const outside = buffer ? buffer + used : run.held + at_ + shift_;
            list[count++] = towards(direction_, run.engine + at_, outside, length);
            add({run.held + at_, used, length});
            used += length;
            at_ += length;
            if (at_ == run.length) {
                ++run_;
                at_ = 0;
            }
        }
        return count;
    }

    std::vector<Slice> slices;

private:
    void add(const Slice& slice) {
        if (!slices.empty() && slices.back().held + slices.back().length == slice.held) {
            slices.back().length += slice.length;
        } else {
            slices.push_back(slice);
        }
    }

    const Direction direction_;
    const std::span<const PageRun> runs_;
    const std::ptrdiff_t shift_;
    std::size_t run_ = 0;
    std::size_t at_ = 0;  // in that run
};

void transfer(Direction direction, std::span<const Slice> slices, std::byte* buffer, cudaStream_t stream) {
    for (const Slice& slice : slices) {
        const Move move = towards(direction, buffer + slice.in_buffer, slice.held, slice.length);
        check(cudaMemcpyAsync(move.to, move.from, move.length, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
    }
}

void record(cudaEvent_t event, cudaStream_t stream) { check(cudaEventRecord(event, stream), "cudaEventRecord"); }

void wait_for(cudaEvent_t event, cudaStream_t stream) {
    check(cudaStreamWaitEvent(stream, event, 0), "cudaStreamWaitEvent");
}

}  // namespace

DevicePages::DevicePages(int device, KvMemory memory, std::size_t buffer_bytes)
    : device_(device), memory_(std::move(memory)) {
    const OnDevice current(device_);
    for (const Direction direction : {Direction::into_engine, Direction::out_of_engine}) {
        lane_of(direction) = std::make_unique<Lane>(direction, buffer_bytes);
    }
    lists_ = std::make_unique<MoveLists>();
    check(load_kernel(), "loading the copy kernel");
}

DevicePages::~DevicePages() {
    for (auto& [ticket, flight] : in_flight_) ignore(flight->wait());
}

bool DevicePages::staged() const {
    return std::ranges::all_of(lanes_, [](const auto& lane) { return lane->has_buffers(); });
}

Ticket DevicePages::begin(const PinnedMemory& arena, std::span<const ChunkPages> chunks, Direction direction,
                          cudaStream_t engine, CopyMethod method, std::span<const Ticket> after) {
    // First, because it can throw. Computes addresses only; the memory may be on a device.
    const std::vector<PageRun> runs = memory_.runs(arena.on_host(), chunks, any_length);
    const OnDevice current(device_);
    std::unique_ptr<Flight> flight = acquire_flight();
    flight->lane = lane_of(direction).get();
    // The event is used twice: recorded on the engine's stream, then again for the copy. A stream that waits for an
    // event waits for the state recorded at the time of the call.
    record(flight->completed, engine);
    wait_for(flight->completed, flight->lane->kernels);  // Only kernels access the pages.
    for (const Ticket ticket : after) hold(flight->lane->kernels, ticket);
    try {
        if (method == CopyMethod::best && flight->lane->has_buffers()) {
            copy_staged(runs, *flight);
        } else {
            copy_directly(arena, runs, *flight);
        }
        in_flight_.emplace(next_, std::move(flight));
    } catch (...) {
        flight->lane->synchronize();  // Without a ticket, nobody else waits for what has been started.
        lists_->put(flight->lists);
        throw;
    }
    return next_++;
}

std::span<Move> DevicePages::list_for(Flight& flight) {
    flight.lists.push_back(lists_->take());
    return {flight.lists.back(), MoveLists::moves_each};
}

void DevicePages::copy_staged(std::span<const PageRun> runs, Flight& flight) {
    Lane& lane = *flight.lane;
    for (Filler filler(lane.direction, runs, 0); !filler.ended();) {
        const Buffer& buffer = lane.buffers[lane.next++ % std::size(lane.buffers)];
        const std::span<Move> list = list_for(flight);
        const std::size_t count = filler.fill(list, buffer.memory, lane.buffer_bytes);
        const auto step = [&](cudaStream_t stream) {
            if (stream == lane.transfers) return transfer(lane.direction, filler.slices, buffer.memory, stream);
            check(launch(list.data(), count, staged_blocks, stream), "launching the copy kernel");
        };
        wait_for(buffer.drained, lane.fills());
        step(lane.fills());
        record(buffer.filled, lane.fills());
        wait_for(buffer.filled, lane.drains());
        step(lane.drains());
        record(buffer.drained, lane.drains());
    }
    record(flight.completed, lane.drains());
}

void DevicePages::copy_directly(const PinnedMemory& arena, std::span<const PageRun> runs, Flight& flight) {
    const std::ptrdiff_t shift = arena.on_device().data() - arena.on_host().data();
    for (Filler filler(flight.lane->direction, runs, shift); !filler.ended();) {
        const std::span<Move> list = list_for(flight);
        const std::size_t count = filler.fill(list, nullptr, any_length);
        check(launch(list.data(), count, direct_blocks, flight.lane->kernels), "launching the copy kernel");
    }
    record(flight.completed, flight.lane->kernels);
}

void DevicePages::hold(cudaStream_t stream, Ticket ticket) {
    const auto found = in_flight_.find(ticket);
    if (found == in_flight_.end()) return;
    try {
        const OnDevice current(device_);
        wait_for(found->second->completed, stream);
    } catch (const CudaError&) {
        // What comes next may change the pages. done() still reports an error of the copy.
        ignore(found->second->wait());
    }
}

std::unique_ptr<DevicePages::Flight> DevicePages::acquire_flight() {
    if (free_.empty()) return std::make_unique<Flight>();
    std::unique_ptr<Flight> flight = std::move(free_.back());
    free_.pop_back();
    return flight;
}

bool DevicePages::done(Ticket ticket) {
    const auto found = in_flight_.find(ticket);
    if (found == in_flight_.end()) return true;
    const cudaError_t state = cudaEventQuery(found->second->completed);
    if (state == cudaErrorNotReady) {
        static_cast<void>(cudaGetLastError());
        return false;
    }
    if (state != cudaSuccess) found->second->lane->synchronize();
    retire(ticket, state);
    return true;
}

void DevicePages::wait(Ticket ticket) {
    const auto found = in_flight_.find(ticket);
    if (found != in_flight_.end()) retire(ticket, found->second->wait());
}

void DevicePages::retire(Ticket ticket, cudaError_t state) {
    free_.push_back(std::move(in_flight_.extract(ticket).mapped()));
    lists_->put(free_.back()->lists);
    check(state, "page copy");
}

}  // namespace kvtier::cuda
