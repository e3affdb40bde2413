#include <algorithm>
#include <utility>

#include "flight.hpp"

namespace kvtier::cuda {

namespace {

// What a warp carries at a time: enough to be worth its look at the list, and little enough that none is left
// with much when the others are through.
constexpr std::size_t kernel_move_bytes = std::size_t{16} << 10;

// From this average length of a run on the copy engines take a batch, which leaves the multiprocessors alone:
// each run costs them about a microsecond, in which PCIe 5.0 carries some 60 KiB.
constexpr std::size_t copy_engine_run_bytes = std::size_t{256} << 10;

constexpr std::size_t any_length = ~std::size_t{0};

void carry_by_engines(std::span<const Move> moves, cudaStream_t stream) {
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

// The moves for these runs, cut into pieces of at most so many bytes. What is held lies `shift` bytes further on
// for whoever carries it.
std::vector<Move> moves_of(std::span<const PageRun> runs, Direction direction, std::ptrdiff_t shift,
                           std::size_t most_bytes) {
    std::vector<Move> moves;
    moves.reserve(runs.size());
    for (const PageRun& run : runs) {
        std::byte* const held = run.held + shift;
        for (std::size_t at = 0; at < run.length;) {
            const std::size_t length = std::min(most_bytes, run.length - at);
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
        static_cast<void>(cudaFreeHost(std::exchange(moves_, nullptr)));
        size_ = 0;
        const std::size_t size = std::max<std::size_t>(2 * count, 4096);
        check(cudaHostAlloc(reinterpret_cast<void**>(&moves_), size * sizeof(Move), cudaHostAllocMapped),
              "cudaHostAlloc");
        size_ = size;
    }
    return {moves_, count};
}

DevicePages::DevicePages(int device, KvMemory memory) : device_(device), memory_(std::move(memory)) {
    const OnDevice current(device_);
    int least = 0;
    int most = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &most), "cudaDeviceGetStreamPriorityRange");
    for (cudaStream_t& stream : streams_) {
        // Of the least priority: the engine's kernels go first.
        check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, least), "cudaStreamCreate");
    }
}

DevicePages::~DevicePages() {
    for (auto& [ticket, flight] : under_way_) static_cast<void>(cudaEventSynchronize(flight->landed));
    for (cudaStream_t stream : streams_) static_cast<void>(cudaStreamDestroy(stream));
}

Ticket DevicePages::begin(const PinnedMemory& arena, std::span<const ChunkPages> chunks, Direction direction,
                          cudaStream_t engine, bool hold_engine, Carrier carrier) {
    // First of all, since it may throw. Addresses only: the memory itself may be a device's.
    const std::vector<PageRun> runs = memory_.runs(arena.on_host(), chunks, any_length);
    const OnDevice current(device_);
    const cudaStream_t stream = stream_of(direction);
    std::unique_ptr<Flight> flight = take_flight();
    // The event serves twice: first for the engine's stream, then, recorded anew, for the copy. A stream that
    // was told to wait for it keeps to what it stood for then.
    check(cudaEventRecord(flight->landed, engine), "cudaEventRecord");
    check(cudaStreamWaitEvent(stream, flight->landed, 0), "cudaStreamWaitEvent");
    carry(arena, runs, direction, carrier, *flight);
    check(cudaEventRecord(flight->landed, stream), "cudaEventRecord");
    if (hold_engine) check(cudaStreamWaitEvent(engine, flight->landed, 0), "cudaStreamWaitEvent");
    under_way_.emplace(next_, std::move(flight));
    return next_++;
}

void DevicePages::carry(const PinnedMemory& arena, std::span<const PageRun> runs, Direction direction,
                        Carrier carrier, Flight& flight) {
    if (runs.empty()) return;
    const cudaStream_t stream = stream_of(direction);
    if (carrier == Carrier::copy_engines || (carrier == Carrier::best && long_enough(runs))) {
        carry_by_engines(moves_of(runs, direction, 0, any_length), stream);
        return;
    }
    const std::ptrdiff_t shift = arena.on_device().data() - arena.on_host().data();
    const std::vector<Move> moves = moves_of(runs, direction, shift, kernel_move_bytes);
    const std::span<Move> list = flight.moves.room(moves.size());
    std::ranges::copy(moves, list.begin());
    check(launch(list.data(), list.size(), stream), "launching a copy");
}

std::unique_ptr<DevicePages::Flight> DevicePages::take_flight() {
    if (landed_.empty()) return std::make_unique<Flight>();
    std::unique_ptr<Flight> flight = std::move(landed_.back());
    landed_.pop_back();
    return flight;
}

bool DevicePages::done(Ticket ticket) {
    const auto found = under_way_.find(ticket);
    if (found == under_way_.end()) return true;
    const cudaError_t state = cudaEventQuery(found->second->landed);
    if (state == cudaErrorNotReady) {
        static_cast<void>(cudaGetLastError());
        return false;
    }
    land(ticket);
    check(state, "a copy of pages");
    return true;
}

void DevicePages::wait(Ticket ticket) {
    const auto found = under_way_.find(ticket);
    if (found == under_way_.end()) return;
    const cudaError_t state = cudaEventSynchronize(found->second->landed);
    land(ticket);
    check(state, "a copy of pages");
}

void DevicePages::land(Ticket ticket) {
    auto node = under_way_.extract(ticket);
    landed_.push_back(std::move(node.mapped()));
}

}  // namespace kvtier::cuda
