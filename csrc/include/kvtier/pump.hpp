// Conversations carried out by a few threads of their own, whose ends one descriptor tells of.
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
    std::uint64_t ticket;  // the caller's own
    int socket;
    std::vector<Operation> operations;
    std::span<std::byte> unread;
    std::chrono::steady_clock::time_point deadline;
};

struct Ended {
    std::uint64_t ticket;
    Progress progress;
};

// At most so many threads, each with one conversation at a time, started when they are needed and gone when
// they have had nothing to do for a while. What finds none free waits its turn, in the order in which it came.
class Pump {
public:
    // Throws std::system_error where there is no descriptor left.
    explicit Pump(std::size_t most);
    // Waits until every conversation is over.
    ~Pump();
    Pump(const Pump&) = delete;
    Pump& operator=(const Pump&) = delete;

    // An eventfd(2): readable while there is something to collect.
    int descriptor() const;
    // Have a conversation carried out. Its memory is used, and its socket must stay open, until it has been
    // collected. Does not block. Throws std::system_error where no thread can be started, ever.
    void start(Conversation conversation);
    // What has ended since the last call. Does not block.
    std::vector<Ended> collect();

private:
    struct Crew;
    std::shared_ptr<Crew> crew_;
};

}  // namespace kvtier::sockets
