#include "kvtier/threads.hpp"

#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

namespace kvtier {

namespace {

constexpr unsigned max_threads = 8;

// Helpers for one job at a time. `mutex_` guards everything except `next_`.
class Helpers {
public:
    // Run a job with the helpers. False if another caller is using them.
    bool run(std::size_t count, unsigned wanted, const std::function<void(std::size_t)>& work) {
        std::unique_lock exclusive(exclusive_, std::try_to_lock);
        if (!exclusive.owns_lock()) return false;
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
        run_pieces(work, count);
        std::unique_lock lock(mutex_);
        invited_ = 0;  // Helpers that have not woken up yet are not needed.
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
                return;  // Continue with fewer threads.
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
            run_pieces(work, count);
            lock.lock();
            if (--working_ == 0) idle_.notify_one();
        }
    }

    void run_pieces(const std::function<void(std::size_t)>& work, std::size_t count) {
        for (std::size_t at; (at = next_.fetch_add(1, std::memory_order_relaxed)) < count;) work(at);
    }

    std::mutex exclusive_;
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

// Never destroyed, because its threads use it until the process ends. A forked child inherits no threads, and locks in
// any state, so it creates its own instance; without a lock, which could be held at the time of the fork, too.
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
    return std::clamp(static_cast<unsigned>(CPU_COUNT(&allowed)), 1U, max_threads);
}

unsigned spare_threads(std::string_view loadavg, unsigned processors) {
    const std::size_t slash = loadavg.find('/');
    if (slash == std::string_view::npos) return processors;
    const std::size_t space = loadavg.rfind(' ', slash);
    const std::size_t start = space == std::string_view::npos ? 0 : space + 1;
    unsigned runnable = 0;  // Including the caller.
    const auto [end, error] = std::from_chars(loadavg.data() + start, loadavg.data() + slash, runnable);
    if (error != std::errc() || end != loadavg.data() + slash) return processors;
    // Up to half of the CPUs may be shared by two threads: sharing with a thread that spins, as an engine's threads do
    // after their work, costs a helper a few milliseconds. With more threads per CPU it would wait for each of them.
    const unsigned room = processors + std::max(processors / 2, 1U) + 1;
    return std::clamp(room - std::min(room, std::max(runnable, 1U)), 1U, processors);
}

unsigned spare_threads() {
    const long online = ::sysconf(_SC_NPROCESSORS_ONLN);
    const unsigned processors = online > 0 ? static_cast<unsigned>(online) : 1;
    const int file = ::open("/proc/loadavg", O_RDONLY | O_CLOEXEC);
    if (file < 0) return processors;
    char text[64];
    const ssize_t length = ::read(file, text, sizeof text);
    ::close(file);
    return length > 0 ? spare_threads({text, static_cast<std::size_t>(length)}, processors) : processors;
}

void parallel_for(std::size_t count, unsigned threads, const std::function<void(std::size_t)>& work) {
    const std::size_t useful = std::min<std::size_t>(threads, count);
    if (useful > 1 && helpers().run(count, static_cast<unsigned>(useful - 1), work)) return;
    for (std::size_t at = 0; at < count; ++at) work(at);
}

}  // namespace kvtier
