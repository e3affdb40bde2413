// Executes batches of transfers between memory and files, with one io_uring and one thread.
//
// The caller never waits for a disk: submitting a batch and taking its outcomes hold a lock only briefly. An eventfd
// signals finished batches, once for all that finish together.
#pragma once

#include <cstdint>
#include <future>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kvtier/disk/ring.hpp"
#include "kvtier/disk/transfer.hpp"
#include "kvtier/disk/waiting.hpp"
#include "kvtier/event.hpp"

namespace kvtier::disk {

struct Finished {
    std::uint64_t batch;
    std::vector<int> outcomes;  // in the order of the transfers; ECANCELED for dropped ones
};

class Engine {
public:
    // At most `depth` transfers read or write at once. Throws std::system_error as Ring does.
    explicit Engine(unsigned depth);
    // Calls close().
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // Readable when a batch has finished, until take_finished(). Valid while this lives.
    int event_fd() const { return finished_event_.descriptor(); }

    // See Ring::keep(). Later transfers of this memory need not pin it each time.
    void keep(std::byte* memory, std::size_t length);

    // Submit a batch; return its number. The kernel uses its memory until take_finished() returns it. Never waits for a
    // disk. Not after close().
    std::uint64_t submit(std::vector<Transfer> transfers);

    // Drop the transfers of a batch that have not started; the others run to their end, and then the batch finishes.
    void cancel(std::uint64_t batch);

    // Batches that have finished since the last call.
    std::vector<Finished> take_finished();

    // Wait until every batch has finished, and end the thread. Idempotent.
    void close();

private:
    struct Batch {
        std::vector<Transfer> transfers;
        std::size_t unfinished;
    };

    // Twice the depth: while some transfers read or write, as many others are being opened or renamed.
    unsigned max_in_flight() const { return 2 * depth_; }
    void run(std::promise<void>& ready);
    bool accept(Ring& ring);
    void begin(Ring& ring);
    void proceed(Ring& ring, Transfer& transfer);
    bool may_move(Transfer& transfer);
    void moved(Ring& ring, Transfer& transfer);
    void proceed_after(Ring& ring, Transfer& transfer, std::int64_t result);
    void verify(Ring& ring);
    void drop(std::uint64_t batch);
    void finish(const Transfer& transfer);
    void end(std::uint64_t batch);
    void publish();

    // Shared between threads, guarded by mutex_.
    std::mutex mutex_;
    std::vector<std::pair<std::uint64_t, std::vector<Transfer>>> submitted_;
    std::vector<std::uint64_t> cancelled_;
    std::vector<Finished> finished_;
    std::uint64_t last_ = 0;
    std::pair<std::byte*, std::size_t> kept_{};
    bool closing_ = false;

    // Used by the engine's thread only.
    std::unordered_map<std::uint64_t, Batch> batches_;
    Waiting waiting_;  // not started
    Waiting opened_;   // in flight, waiting to read or write
    std::vector<Transfer*> arrived_;  // parts of which are to be verified
    std::vector<Finished> newly_finished_;
    unsigned in_flight_ = 0;   // transfers started and not finished
    unsigned moving_ = 0;      // of these, the ones that read or write
    std::uint64_t woken_ = 0;  // the kernel stores the count of submitted_event_ here
    const unsigned depth_;

    Event submitted_event_;
    Event finished_event_;
    std::thread thread_;
};

}  // namespace kvtier::disk
