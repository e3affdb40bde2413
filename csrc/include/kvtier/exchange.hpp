// A conversation over one connected, blocking stream socket, carried out without a turn of its caller's.
#pragma once

#include <chrono>
#include <cstddef>
#include <span>
#include <vector>

namespace kvtier::sockets {

enum class Kind {
    send,     // all spans, one after the other
    expect,   // receive bytes that are equal to those of the only span
    receive,  // fill all spans, one after the other
};

struct Span {
    std::byte* data;
    std::size_t length;
};

struct Operation {
    Kind kind;
    std::vector<Span> spans;
};

// How far a conversation has come. It is over where `operations` is how many there were.
struct Progress {
    std::size_t operations = 0;  // that were carried out whole
    std::size_t bytes = 0;       // of the next one
    int error = 0;               // of errno(3); 0 also where something came that was not expected
};

// Carry out the operations in their order, until `deadline` at most (error ETIMEDOUT). Blocks; any thread,
// one at a time for each socket. Where the other side has closed it, or another thread has shut it down, the
// error is ESHUTDOWN on receiving, EPIPE on sending. Throws nothing but std::bad_alloc.
//
// With `waits` false nothing waits: where the socket takes or gives nothing, the error is EAGAIN.
//
// What an `expect` has received lies in `unread`, which must be as long as the longest of them: where it
// is not what was expected, `bytes` of it have come, and not one byte behind those that were wanted.
Progress exchange(int socket, std::span<const Operation> operations, std::span<std::byte> unread,
                  std::chrono::steady_clock::time_point deadline, bool waits = true);

}  // namespace kvtier::sockets
