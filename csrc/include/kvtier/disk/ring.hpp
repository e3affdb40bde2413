// A minimal io_uring for file I/O: submit requests and reap completions, from a single thread.
//
// See io_uring_setup(2), io_uring_enter(2), io_uring_register(2). Uses the three system calls directly, not liburing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kvtier/disk/transfer.hpp"

namespace kvtier::disk {

struct Answer {
    std::uint64_t tag;
    std::int32_t result;  // that of the system call, or -errno
};

// Create, use and destroy it in the same thread.
class Ring {
public:
    // For up to `max_requests` requests in flight. Throws std::system_error if the kernel has no io_uring (ENOSYS),
    // does not permit it to this process (EPERM), or has one that is too old (EOPNOTSUPP).
    explicit Ring(unsigned max_requests);
    ~Ring();
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;

    // Register memory that many requests will use: the kernel pins each 256 MiB part of it once, as soon as the part is
    // resident, if RLIMIT_MEMLOCK permits. Call at most once; the memory must stay mapped while the ring lives.
    void keep(std::byte* memory, std::size_t length);

    // Queue a request to open, read, write, close, rename or unlink. Whatever it points at must stay valid until its
    // answer. The next submit() or wait() submits it.
    void push(const Request& request, std::uint64_t tag);

    // Queue a read of an eventfd into `count`, so that writing to the eventfd ends wait().
    void push_wake_up(int event_fd, std::uint64_t* count, std::uint64_t tag);

    // Submit the queued requests.
    void submit() { enter(0); }

    // Submit the queued requests and wait for at least one answer.
    void wait() { enter(1); }

    // Take the next answer; false if there is no answer yet.
    bool pop(Answer* answer);

private:
    void enter(unsigned awaited);

    struct Rings;
    std::unique_ptr<Rings> rings_;
};

}  // namespace kvtier::disk
