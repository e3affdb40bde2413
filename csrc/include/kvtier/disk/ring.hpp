// Linux's io_uring, as much of it as files need: requests go in, answers come out, and one thread does both.
//
// io_uring_setup(2), io_uring_enter(2), io_uring_register(2). No library between: three calls and two rings.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kvtier/disk/transfer.hpp"

namespace kvtier::disk {

struct Answer {
    std::uint64_t tag;
    std::int32_t result;  // what the system call would have said, or -errno
};

// Made, used and ended by one and the same thread.
class Ring {
public:
    // For at most `most` requests under way at once. Throws std::system_error where this kernel has no
    // io_uring (ENOSYS), does not let this process have one (EPERM) or has one that is too old (EOPNOTSUPP).
    explicit Ring(unsigned most);
    ~Ring();
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;

    // Memory that requests will come for again and again: the kernel pins each 256 MiB of it once, as soon as
    // all of these are in memory, where it can and this process may lock as much (RLIMIT_MEMLOCK). To be called
    // once at most; the memory stays where it is as long as the ring lives.
    void keep(std::byte* memory, std::size_t length);

    // Take in a request: to open, read, write, close, rename or unlink. What it points at stays valid until
    // it is answered. The kernel learns of it with the next wait().
    void push(const Request& request, std::uint64_t tag);

    // Be told when something is written to an eventfd, whose count goes to `count`.
    void push_wake_up(int event_fd, std::uint64_t* count, std::uint64_t tag);

    // Hand over what was pushed and wait until at least one request is answered.
    void wait();

    // The next answer that is there. False: none.
    bool pop(Answer* answer);

private:
    struct Rings;
    std::unique_ptr<Rings> rings_;
};

}  // namespace kvtier::disk
