// Carries batches of transfers between memory and files, through one io_uring and one thread.
//
// Whoever submits is never held up by a disk: handing a batch over and fetching what became of it take a lock
// for a moment. An eventfd says when batches have finished, once for all that finished together.
#pragma once

#include <cstdint>
#include <deque>
#include <future>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kvtier/disk/ring.hpp"
#include "kvtier/disk/transfer.hpp"

namespace kvtier::disk {

struct Finished {
    std::uint64_t batch;
    std::vector<int> outcomes;  // in the order of the transfers; of those dropped ECANCELED
};

// An eventfd: a number that one thread adds to, and that another waits to be more than 0.
class Event {
public:
    Event();
    ~Event();
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;

    int descriptor() const { return descriptor_; }
    void signal() const;
    void clear() const;

private:
    int descriptor_;
};

class Engine {
public:
    // At most `depth` transfers read or write at once. Throws std::system_error where Ring does.
    explicit Engine(unsigned depth);
    // As close().
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // Readable once a batch has finished, until take_finished(). Valid as long as this lives.
    int event_fd() const { return finished_event_.descriptor(); }

    // See Ring::keep(). What transfers use of it from here on need not be pinned each time.
    void keep(std::byte* memory, std::size_t length);

    // Begin a batch; its number. Its memory is the kernel's until it is told as finished. Never blocks on a
    // disk. Not after close().
    std::uint64_t submit(std::vector<Transfer> transfers);

    // Drop what of a batch nobody has begun; the rest goes on to its end, and so does the batch.
    void cancel(std::uint64_t batch);

    // What has finished since the last call.
    std::vector<Finished> take_finished();

    // Blocks until every batch has finished; then the thread is gone. Harmless when repeated.
    void close();

private:
    struct Batch {
        std::vector<Transfer> transfers;
        std::size_t unfinished;
    };

    // While some read or write, as many more are opened before it and renamed after it.
    unsigned begun_at_once() const { return 2 * depth_; }
    void run(std::promise<void>& ready);
    bool take_in(Ring& ring);
    void begin(Ring& ring);
    void proceed(Ring& ring, Transfer& transfer);
    bool may_move(Transfer& transfer);
    void moved(Ring& ring);
    void drop(std::uint64_t batch);
    void finish(const Transfer& transfer);
    void end(std::uint64_t batch);
    void tell();

    // Between the threads.
    std::mutex mutex_;
    std::vector<std::pair<std::uint64_t, std::vector<Transfer>>> submitted_;
    std::vector<std::uint64_t> cancelled_;
    std::vector<Finished> finished_;
    std::uint64_t last_ = 0;
    std::pair<std::byte*, std::size_t> kept_{};
    bool closing_ = false;

    // The thread's own.
    std::unordered_map<std::uint64_t, Batch> batches_;
    std::deque<Transfer*> waiting_;  // nobody has begun them
    std::deque<Transfer*> opened_;   // begun, and may not read or write yet
    std::vector<Finished> newly_finished_;
    unsigned under_way_ = 0;   // begun
    unsigned moving_ = 0;      // of these read or write
    std::uint64_t woken_ = 0;  // where the kernel leaves the count of submitted_event_
    const unsigned depth_;

    Event submitted_event_;
    Event finished_event_;
    std::thread thread_;
};

}  // namespace kvtier::disk
