#include <algorithm>
#include <utility>

#include "flight.hpp"

namespace kvtier::cuda {

namespace {

// Largest move of a warp: large enough to amortize reading the list, small enough to balance the load of the warps.
constexpr std::size_t kernel_move_bytes = std::size_t{16} << 10;

// From this average run length on, a batch uses the copy engines, which leaves the multiprocessors free. A run costs
// the copy engines about a microsecond, in which PCIe 5.0 transfers some 60 KiB.
constexpr std::size_t copy_engine_run_bytes = std::size_t{256} << 10;

constexpr std::size_t any_length = ~std::size_t{0};

void copy_by_engines(std::span<const Move> moves, cudaStream_t stream) {
    if (moves.empty()) return;
#if CUDART_VERSION >= 13000
    std::vector<void*> to(moves.size());
    std::vector<const void*> from(moves.size());
    std::vector<std::size_t> lengths(moves.size());
    for (std::size_t index = 0; index < moves.size(); ++index) {
        to[index] = moves[index].to;
        from[index] = moves[index].from;
        lengths[index] = moves[index].length;
    }
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    std::size_t first = 0;
    check(cudaMemcpyBatchAsync(to.data(), from.data(), lengths.data(), moves.size(), &attributes, &first, 1,
                               stream),
          "cudaMemcpyBatchAsync");
#else
    for (const Move& move : moves) {
        check(cudaMemcpyAsync(move.to, move.from, move.length, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
    }
#endif
}

void copy_by_kernel(std::span<const Move> moves, std::span<Move> list, cudaStream_t stream) {
    if (moves.empty()) return;
    std::ranges::copy(moves, list.begin());
    check(launch(list.data(), list.size(), stream), "launching the copy kernel");
}

// The moves for these runs, split into pieces of at most `max_bytes`. `shift`: offset from the arena's host address to
// the address at which the copying device sees it.
std::vector<Move> moves_of(std::span<const PageRun> runs, Direction direction, std::ptrdiff_t shift,
                           std::size_t max_bytes) {
    std::vector<Move> moves;
    moves.reserve(runs.size());
    for (const PageRun& run : runs) {
        std::byte* const held = run.held + shift;
        for (std::size_t at = 0; at < run.length;) {
            const std::size_t length = std::min(max_bytes, run.length - at);
            if (direction == Direction::into_engine) {
                moves.push_back({run.engine + at, held + at, length});
            } else {
                moves.push_back({held + at, run.engine + at, length});
            }
            at += length;
        }
    }
    return moves;
}

bool long_enough(std::span<const PageRun> runs) {
    std::size_t total = 0;
    for (const PageRun& run : runs) total += run.length;
    return total >= runs.size() * copy_engine_run_bytes;
}

}  // namespace

std::span<Move> MoveList::room(std::size_t count) {
    if (count > size_) {
        const std::size_t size = std::max<std::size_t>(2 * count, 4096);
        Move* moves = nullptr;
        check(cudaHostAlloc(reinterpret_cast<void**>(&moves), size * sizeof(Move), cudaHostAllocMapped),
              "cudaHostAlloc");
        lists_.push_back(moves);
        size_ = size;
    }
    return {lists_.back(), count};
}

void DevicePages::DestroyStream::operator()(cudaStream_t stream) const { ignore(cudaStreamDestroy(stream)); }

DevicePages::DevicePages(int device, KvMemory memory) : device_(device), memory_(std::move(memory)) {
    const OnDevice current(device_);
    int lowest = 0;
    int highest = 0;
    check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange");
    for (auto& owned : streams_) {
        cudaStream_t stream = nullptr;
        // Lowest priority, so that the engine's kernels go first.
        check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, lowest), "cudaStreamCreate");
        owned.reset(stream);
    }
}

DevicePages::~DevicePages() {
    for (auto& [ticket, flight] : in_flight_) ignore(flight->wait());
}

Ticket DevicePages::begin(const PinnedMemory& arena, std::span<const ChunkPages> chunks, Direction direction,
                          cudaStream_t engine, CopyMethod method, std::span<const Ticket> after) {
    // First, because it can throw. Computes addresses only; the memory may be on a device.
    const std::vector<PageRun> runs = memory_.runs(arena.on_host(), chunks, any_length);
    const OnDevice current(device_);
    std::unique_ptr<Flight> flight = acquire_flight();
    flight->stream = stream_of(direction);
    // The event is used twice: recorded on the engine's stream, then again for the copy. A stream that waits for an
    // event waits for the state recorded at the time of the call.
    check(cudaEventRecord(flight->completed, engine), "cudaEventRecord");
    check(cudaStreamWaitEvent(flight->stream, flight->completed, 0), "cudaStreamWaitEvent");
    for (const Ticket ticket : after) hold(flight->stream, ticket);
    try {
        start(arena, runs, direction, method, *flight);
        in_flight_.emplace(next_, std::move(flight));
    } catch (...) {
        flight->wait_for_stream();  // Without a ticket, nobody else would wait for what has been started.
        throw;
    }
    return next_++;
}

void DevicePages::start(const PinnedMemory& arena, std::span<const PageRun> runs, Direction direction,
                        CopyMethod method, Flight& flight) {
    if (method == CopyMethod::copy_engines || (method == CopyMethod::best && long_enough(runs))) {
        copy_by_engines(moves_of(runs, direction, 0, any_length), flight.stream);
    } else {
        const std::ptrdiff_t shift = arena.on_device().data() - arena.on_host().data();
        const std::vector<Move> moves = moves_of(runs, direction, shift, kernel_move_bytes);
        copy_by_kernel(moves, flight.moves.room(moves.size()), flight.stream);
    }
    check(cudaEventRecord(flight.completed, flight.stream), "cudaEventRecord");
}

void DevicePages::hold(cudaStream_t stream, Ticket ticket) {
    const auto found = in_flight_.find(ticket);
    if (found == in_flight_.end()) return;
    try {
        const OnDevice current(device_);
        check(cudaStreamWaitEvent(stream, found->second->completed, 0), "cudaStreamWaitEvent");
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
    if (state != cudaSuccess) found->second->wait_for_stream();
    retire(ticket, state);
    return true;
}

void DevicePages::wait(Ticket ticket) {
    const auto found = in_flight_.find(ticket);
    if (found != in_flight_.end()) retire(ticket, found->second->wait());
}

void DevicePages::retire(Ticket ticket, cudaError_t state) {
    free_.push_back(std::move(in_flight_.extract(ticket).mapped()));
    check(state, "page copy");
}

}  // namespace kvtier::cuda
