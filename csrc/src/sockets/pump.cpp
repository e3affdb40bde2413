#include "kvtier/pump.hpp"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "kvtier/event.hpp"
#include "kvtier/signals.hpp"

namespace kvtier::sockets {

namespace {

constexpr auto idle_time = std::chrono::seconds(5);

}  // namespace

// State shared by the pump and its threads, which are detached: the last owner destroys it.
struct Pump::Crew {
    explicit Crew(std::size_t max_threads) : max_threads(max_threads) {}

    void work();
    void report(Ended end);

    const std::size_t max_threads;
    const Event event;
    std::mutex mutex;
    std::condition_variable changed;  // `queue` or `closing`
    std::condition_variable emptied;  // `threads` is 0
    std::deque<Conversation> queue;
    std::vector<Ended> ended;
    std::size_t threads = 0;
    std::size_t idle = 0;
    bool closing = false;
};

// Body of each thread; returns after `idle_time` without work.
void Pump::Crew::work() {
    std::unique_lock lock(mutex);
    for (;;) {
        if (queue.empty()) {
            ++idle;
            changed.wait_for(lock, idle_time, [this] { return closing || !queue.empty(); });
            --idle;
            if (queue.empty()) break;
        }
        Conversation next = std::move(queue.front());
        queue.pop_front();
        lock.unlock();
        const Progress progress =
            exchange(next.socket, next.operations, next.unread, next.deadline, true, next.hashes);
        lock.lock();
        report({next.ticket, progress});
    }
    if (--threads == 0) emptied.notify_all();
}

// The caller holds the lock. Signals only once until the next collect().
void Pump::Crew::report(Ended end) {
    ended.push_back(end);
    if (ended.size() == 1) event.signal();
}

Pump::Pump(std::size_t max_threads) : crew_(std::make_shared<Crew>(max_threads)) {}

Pump::~Pump() {
    std::unique_lock lock(crew_->mutex);
    crew_->closing = true;
    crew_->changed.notify_all();
    crew_->emptied.wait(lock, [this] { return crew_->threads == 0; });
}

int Pump::descriptor() const {
    return crew_->event.descriptor();
}

void Pump::start(Conversation conversation) {
    const std::lock_guard lock(crew_->mutex);
    crew_->queue.push_back(std::move(conversation));
    if (crew_->queue.size() <= crew_->idle || crew_->threads == crew_->max_threads) {
        crew_->changed.notify_one();
        return;
    }
    try {
        const WithoutSignals blocked;
        std::thread([crew = crew_] { crew->work(); }).detach();
        ++crew_->threads;
    } catch (const std::system_error&) {
        // A running thread will take it from the queue.
        if (crew_->threads > 0) return;
        crew_->queue.pop_back();
        throw;
    }
}

std::vector<Ended> Pump::collect() {
    const std::lock_guard lock(crew_->mutex);
    crew_->event.clear();
    return std::exchange(crew_->ended, {});
}

}  // namespace kvtier::sockets
