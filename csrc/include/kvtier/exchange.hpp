// A conversation over one connected, blocking stream socket, executed in a single call.
#pragma once

#include <chrono>
#include <cstddef>
#include <span>
#include <vector>

#include "kvtier/hashes.hpp"

namespace kvtier::sockets {

enum class Kind {
    send,     // send all spans in order
    expect,   // receive bytes that must equal those of the only span
    receive,  // fill all spans in order
};

struct Span {
    std::byte* data;
    std::size_t length;
};

struct Operation {
    Kind kind;
    std::vector<Span> spans;
};

// Progress of a conversation, which is complete if `operations` is their total number.
struct Progress {
    std::size_t operations = 0;  // completed operations
    std::size_t bytes = 0;       // bytes transferred by the next one
    int error = 0;               // an errno; 0 also if an `expect` received other bytes
};

// Execute the operations in order, until `deadline` at most (error ETIMEDOUT). Blocks. Thread-safe for different
// sockets. If the peer has closed the connection or another thread has shut it down, the error is ESHUTDOWN when
// receiving, EPIPE when sending. Throws only std::bad_alloc.
//
// With `waits` false nothing blocks: the error is EAGAIN if the socket is not ready.
//
// An `expect` receives into `unread`, which must be as long as the longest `expect`. On a mismatch `unread` holds the
// `bytes` that were received; nothing beyond the expected length is read.
//
// What is sent and received is given to `hashes`, if any.
Progress exchange(int socket, std::span<const Operation> operations, std::span<std::byte> unread,
                  std::chrono::steady_clock::time_point deadline, bool waits = true, Hashes* hashes = nullptr);

}  // namespace kvtier::sockets
