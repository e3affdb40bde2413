#include "kvtier/disk/engine.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>

#include <cerrno>
#include <optional>
#include <utility>

#include "kvtier/signals.hpp"

namespace kvtier::disk {
namespace {

constexpr std::uint64_t kWakeUp = 0;  // not the address of a transfer
constexpr mode_t kFolderMode = 0700;

std::int64_t or_error(std::int64_t result) {
    return result < 0 ? -errno : result;
}

std::int64_t measure(int descriptor) {
    struct stat status{};
    return ::fstat(descriptor, &status) < 0 ? -errno : status.st_size;
}

std::int64_t use_cache(int descriptor) {
    const int flags = ::fcntl(descriptor, F_GETFL);
    return flags < 0 ? -errno : or_error(::fcntl(descriptor, F_SETFL, flags & ~O_DIRECT));
}

// Execute fast, non-blocking requests directly: at about 1 us, the system call is cheaper than the ring.
bool run_directly(const Request& request, std::int64_t* result) {
    switch (request.kind) {
        case Request::Kind::make_folder:
            *result = or_error(::mkdir(request.path, kFolderMode));
            return true;
        case Request::Kind::measure:
            *result = measure(request.descriptor);
            return true;
        case Request::Kind::use_cache:
            *result = use_cache(request.descriptor);
            return true;
        case Request::Kind::touch:
            *result = or_error(::futimens(request.descriptor, nullptr));
            return true;
        default:
            return false;
    }
}

bool moves(const Request& request) {
    return request.kind == Request::Kind::read || request.kind == Request::Kind::write;
}

}  // namespace

Engine::Engine(unsigned depth) : depth_(depth) {
    std::promise<void> ready;
    const WithoutSignals masked;
    thread_ = std::thread([this, &ready] { run(ready); });
    try {
        ready.get_future().get();
    } catch (...) {
        thread_.join();
        throw;
    }
}

Engine::~Engine() {
    close();
}

void Engine::keep(std::byte* memory, std::size_t length) {
    const std::lock_guard lock(mutex_);
    kept_ = {memory, length};
}

std::uint64_t Engine::submit(std::vector<Transfer> transfers) {
    std::uint64_t number = 0;
    {
        const std::lock_guard lock(mutex_);
        number = ++last_;
        submitted_.emplace_back(number, std::move(transfers));
    }
    submitted_event_.signal();
    return number;
}

void Engine::cancel(std::uint64_t batch) {
    {
        const std::lock_guard lock(mutex_);
        cancelled_.push_back(batch);
    }
    submitted_event_.signal();
}

std::vector<Finished> Engine::take_finished() {
    // Clear first, so that batches that finish from now on signal again.
    finished_event_.clear();
    const std::lock_guard lock(mutex_);
    return std::exchange(finished_, {});
}

void Engine::close() {
    {
        const std::lock_guard lock(mutex_);
        closing_ = true;
    }
    submitted_event_.signal();
    if (thread_.joinable()) thread_.join();
}

void Engine::run(std::promise<void>& ready) {
    ::pthread_setname_np(::pthread_self(), "kvtier-disk");
    std::optional<Ring> ring;
    try {
        // Created here, because a ring belongs to one thread. One request per transfer, plus the wake-up.
        ring.emplace(max_in_flight() + 1);
    } catch (...) {
        ready.set_exception(std::current_exception());
        return;
    }
    ready.set_value();
    ring->push_wake_up(submitted_event_.descriptor(), &woken_, kWakeUp);
    for (bool closing = false; !closing || in_flight_ > 0;) {
        ring->wait();
        for (Answer answer{}; ring->pop(&answer);) {
            if (answer.tag == kWakeUp) {
                closing = accept(*ring);
                ring->push_wake_up(submitted_event_.descriptor(), &woken_, kWakeUp);
            } else {
                proceed_after(*ring, *reinterpret_cast<Transfer*>(answer.tag), answer.result);
            }
        }
        begin(*ring);
        verify(*ring);
        publish();
    }
}

// Accept submissions and cancellations from other threads. Returns whether the engine is closing.
bool Engine::accept(Ring& ring) {
    const std::lock_guard lock(mutex_);
    if (const auto [memory, length] = std::exchange(kept_, {}); length > 0) ring.keep(memory, length);
    for (auto& [number, transfers] : std::exchange(submitted_, {})) {
        const std::size_t unfinished = transfers.size();
        Batch& batch = batches_.emplace(number, Batch{std::move(transfers), unfinished}).first->second;
        for (Transfer& transfer : batch.transfers) {
            transfer.batch = number;
            waiting_.push(&transfer);
        }
        if (unfinished == 0) end(number);
    }
    for (const std::uint64_t number : std::exchange(cancelled_, {})) drop(number);
    return closing_;
}

void Engine::drop(std::uint64_t number) {
    for (Transfer* transfer : waiting_.remove(number)) {
        transfer->drop();
        finish(*transfer);
    }
}

void Engine::begin(Ring& ring) {
    while (in_flight_ < max_in_flight() && !waiting_.empty()) {
        ++in_flight_;
        proceed(ring, *waiting_.pop());
    }
}

// A transfer between two parts keeps its turn.
void Engine::proceed_after(Ring& ring, Transfer& transfer, std::int64_t result) {
    if (transfer.request().kind == Request::Kind::read) arrived_.push_back(&transfer);
    transfer.answer(result);
    if (transfer.moving && !moves(transfer.request())) moved(ring, transfer);
    proceed(ring, transfer);
}

// Verify the parts that have arrived, with the next ones in flight. Their transfers are not finished: each file is yet
// to be closed.
void Engine::verify(Ring& ring) {
    if (arrived_.empty()) return;
    ring.submit();
    for (Transfer* transfer : arrived_) transfer->verify();
    arrived_.clear();
}

// Advance a transfer as far as possible without waiting.
void Engine::proceed(Ring& ring, Transfer& transfer) {
    while (!transfer.finished()) {
        const Request request = transfer.request();
        if (moves(request) && !may_move(transfer)) return;
        std::int64_t result = 0;
        if (!run_directly(request, &result)) {
            ring.push(request, reinterpret_cast<std::uintptr_t>(&transfer));
            return;
        }
        transfer.answer(result);
    }
    --in_flight_;
    finish(transfer);
}

// Whether the transfer may read or write now; if not, it is queued until another one has finished that.
bool Engine::may_move(Transfer& transfer) {
    if (transfer.moving) return true;
    if (moving_ == depth_) {
        opened_.push(&transfer);
        return false;
    }
    ++moving_;
    transfer.moving = true;
    return true;
}

// A transfer has read or written: start the next one first, to keep the disk busy.
void Engine::moved(Ring& ring, Transfer& transfer) {
    --moving_;
    transfer.moving = false;
    if (!opened_.empty()) proceed(ring, *opened_.pop());
}

void Engine::finish(const Transfer& transfer) {
    const std::uint64_t number = transfer.batch;
    if (--batches_.at(number).unfinished == 0) end(number);
}

void Engine::end(std::uint64_t number) {
    auto batch = batches_.extract(number);
    Finished finished{number, {}};
    finished.outcomes.reserve(batch.mapped().transfers.size());
    for (const Transfer& transfer : batch.mapped().transfers) finished.outcomes.push_back(transfer.outcome());
    newly_finished_.push_back(std::move(finished));
}

void Engine::publish() {
    if (newly_finished_.empty()) return;
    {
        const std::lock_guard lock(mutex_);
        for (Finished& one : newly_finished_) finished_.push_back(std::move(one));
    }
    newly_finished_.clear();
    finished_event_.signal();
}

}  // namespace kvtier::disk
