#include "kvtier/threads.hpp"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

namespace kvtier {

namespace {

constexpr unsigned most_threads = 8;

// One job at a time. Everything but `next` is guarded by `mutex`.
class Helpers {
public:
    // Whether the helpers took part; false where another caller has them.
    bool run(std::size_t count, unsigned wanted, const std::function<void(std::size_t)>& work) {
        std::unique_lock turn(turn_, std::try_to_lock);
        if (!turn.owns_lock()) return false;
        {
            std::lock_guard lock(mutex_);
            start(wanted);
            work_ = &work;
            count_ = count;
            next_.store(0, std::memory_order_relaxed);
            invited_ = std::min(wanted, started_);
            ++job_;
        }
        awake_.notify_all();
        take_turns(work, count);
        std::unique_lock lock(mutex_);
        invited_ = 0;  // Whoever has not come yet has nothing to do.
        idle_.wait(lock, [this] { return working_ == 0; });
        work_ = nullptr;
        return true;
    }

private:
    void start(unsigned wanted) {
        while (started_ < wanted) {
            try {
                std::thread([this] { help(); }).detach();
            } catch (const std::system_error&) {
                return;  // No more threads are to be had: fewer do it.
            }
            ++started_;
        }
    }

    [[noreturn]] void help() {
        std::unique_lock lock(mutex_);
        for (unsigned long seen = 0;;) {
            awake_.wait(lock, [&] { return invited_ > 0 && job_ != seen; });
            seen = job_;
            --invited_;
            ++working_;
            const std::function<void(std::size_t)>& work = *work_;
            const std::size_t count = count_;
            lock.unlock();
            take_turns(work, count);
            lock.lock();
            if (--working_ == 0) idle_.notify_one();
        }
    }

    void take_turns(const std::function<void(std::size_t)>& work, std::size_t count) {
        for (std::size_t at; (at = next_.fetch_add(1, std::memory_order_relaxed)) < count;) work(at);
    }

    std::mutex turn_;
    std::mutex mutex_;
    std::condition_variable awake_;
    std::condition_variable idle_;
    const std::function<void(std::size_t)>* work_ = nullptr;
    std::size_t count_ = 0;
    std::atomic<std::size_t> next_{0};
    unsigned started_ = 0;
    unsigned invited_ = 0;
    unsigned working_ = 0;
    unsigned long job_ = 0;
};

struct Owned {
    pid_t owner = ::getpid();
    Helpers helpers;
};

// Never destroyed: its threads sleep in it until the process ends. A forked child has none of the threads,
// and its parent's locks as they were, so it makes its own; without a lock, which could be held then, too.
Helpers& helpers() {
    static std::atomic<Owned*> current{nullptr};
    Owned* found = current.load(std::memory_order_acquire);
    while (found == nullptr || found->owner != ::getpid()) {
        auto made = std::make_unique<Owned>();
        if (current.compare_exchange_strong(found, made.get(), std::memory_order_acq_rel)) {
            found = made.release();
        }
    }
    return found->helpers;
}

}  // namespace

unsigned useful_threads() {
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return 1;
    return std::clamp(static_cast<unsigned>(CPU_COUNT(&allowed)), 1U, most_threads);
}

void parallel_for(std::size_t count, unsigned threads, const std::function<void(std::size_t)>& work) {
    const std::size_t useful = std::min<std::size_t>(threads, count);
    if (useful > 1 && helpers().run(count, static_cast<unsigned>(useful - 1), work)) return;
    for (std::size_t at = 0; at < count; ++at) work(at);
}

}  // namespace kvtier
