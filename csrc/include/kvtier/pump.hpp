// A thread pool that executes conversations, and signals their completion on one descriptor.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kvtier/exchange.hpp"

namespace kvtier::sockets {

struct Conversation {
    std::uint64_t ticket;  // chosen by the caller
    int socket;
    std::vector<Operation> operations;
    std::span<std::byte> unread;
    std::chrono::steady_clock::time_point deadline;
    Hashes* hashes = nullptr;  // as in exchange()
};

struct Ended {
    std::uint64_t ticket;
    Progress progress;
};

// A pool of up to `max_threads` threads, each with one conversation at a time. Threads start on demand, and exit when
// idle for a while. Conversations that find no free thread queue in FIFO order.
class Pump {
public:
    // Throws std::system_error if no descriptor is available.
    explicit Pump(std::size_t max_threads);
    // Waits until every conversation has ended.
    ~Pump();
    Pump(const Pump&) = delete;
    Pump& operator=(const Pump&) = delete;

    // An eventfd(2), readable while there is something to collect.
    int descriptor() const;
    // Queue a conversation. Its memory must stay valid and its socket open until it has been collected. Does not
    // block. Throws std::system_error if the pool has no thread and cannot start one.
    void start(Conversation conversation);
    // Conversations that have ended since the last call. Does not block.
    std::vector<Ended> collect();

private:
    struct Crew;
    std::shared_ptr<Crew> crew_;
};

}  // namespace kvtier::sockets
