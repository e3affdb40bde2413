// Timeouts: SO_RCVTIMEO and SO_SNDTIMEO, see socket(7). The kernel applies them to all waits of one call together.

#include "kvtier/exchange.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>

namespace kvtier::sockets {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t max_spans_per_call = 1024;  // IOV_MAX on Linux

// Bytes that are moved in one call if they are hashed: they are still in the L2 cache then.
constexpr std::size_t hashed_per_call = 1 << 19;

// A blocked send checks at this interval whether the peer has closed the connection.
constexpr auto check_interval = std::chrono::milliseconds(100);

// Set the timeout of the next blocking call so that it ends at `deadline`. False if that has passed.
bool set_timeout(int socket, int option, Clock::time_point deadline) {
    const auto left = std::chrono::duration_cast<std::chrono::microseconds>(deadline - Clock::now()).count();
    if (left <= 0) return false;
    timeval time{};
    time.tv_sec = left / 1'000'000;
    time.tv_usec = left % 1'000'000;
    // `left` is positive here: a timeout of 0 would mean none.
    setsockopt(socket, SOL_SOCKET, option, &time, sizeof time);
    return true;
}

// Position in the spans of one operation.
class Cursor {
public:
    explicit Cursor(const std::vector<Span>& spans) : spans_(spans) { skip_empty(); }

    bool empty() const { return at_ == spans_.size(); }

    // The remaining spans, at most as many as one call accepts, and up to `limit` bytes.
    msghdr message(std::size_t limit) {
        std::size_t count = 0;
        std::size_t skipped = done_;
        for (std::size_t at = at_; at < spans_.size() && count < vectors_.size() && limit > 0; ++at, skipped = 0) {
            const std::size_t length = std::min(spans_[at].length - skipped, limit);
            vectors_[count++] = {spans_[at].data + skipped, length};
            limit -= length;
        }
        msghdr message{};
        message.msg_iov = vectors_.data();
        message.msg_iovlen = count;
        return message;
    }

    void advance(std::size_t moved) {
        while (moved > 0) {
            const std::size_t step = std::min(moved, spans_[at_].length - done_);
            moved -= step;
            done_ += step;
            skip_empty();
        }
    }

private:
    void skip_empty() {
        while (at_ < spans_.size() && done_ == spans_[at_].length) {
            ++at_;
            done_ = 0;
        }
    }

    const std::vector<Span>& spans_;
    std::size_t at_ = 0;
    std::size_t done_ = 0;  // bytes of the span at `at_`
    std::array<iovec, max_spans_per_call> vectors_;
};

// Result of a system call: the number of bytes, or an errno.
struct Moved {
    std::size_t bytes = 0;
    int error = 0;
};

// How long calls may wait: until the deadline, or not at all.
struct Timeout {
    Clock::time_point deadline;
    bool waits;
};

Moved to_moved(ssize_t result) {
    if (result > 0) return {static_cast<std::size_t>(result), 0};
    return {0, result == 0 ? ESHUTDOWN : errno};
}

bool should_retry(const Moved& moved, const Timeout& timeout) {
    return moved.error == EINTR || (moved.error == EAGAIN && timeout.waits);
}

Moved receive(int socket, msghdr& message, int flags, const Timeout& timeout) {
    while (!timeout.waits || set_timeout(socket, SO_RCVTIMEO, timeout.deadline)) {
        const Moved moved = to_moved(recvmsg(socket, &message, timeout.waits ? flags : MSG_DONTWAIT));
        if (!should_retry(moved, timeout)) return moved;
    }
    return {0, ETIMEDOUT};
}

// Whether the peer has closed the connection without reading everything. A blocked send does not notice that while
// the peer's window is closed, and would wait in vain.
bool peer_closed(int socket) {
    pollfd polled{socket, POLLOUT | POLLRDHUP, 0};
    return poll(&polled, 1, 0) > 0 && (polled.revents & POLLOUT) == 0;
}

// The first call does not block: small messages are sent at once, without setting a timeout.
Moved send(int socket, const msghdr& message, const Timeout& timeout) {
    int flags = MSG_NOSIGNAL | MSG_DONTWAIT;
    for (;;) {
        const Moved moved = to_moved(sendmsg(socket, &message, flags));
        if (!should_retry(moved, timeout)) return moved;
        if (peer_closed(socket)) return {0, EPIPE};
        const auto next_check = std::min(timeout.deadline, Clock::now() + check_interval);
        if (!set_timeout(socket, SO_SNDTIMEO, next_check)) return {0, ETIMEDOUT};
        flags = MSG_NOSIGNAL;
    }
}

// Give the first `bytes` of a message to `hashes`.
void hash(Hashes* hashes, const msghdr& message, std::size_t bytes) {
    for (std::size_t at = 0; hashes != nullptr && bytes > 0 && at < message.msg_iovlen; ++at) {
        const iovec& vector = message.msg_iov[at];
        const std::size_t length = std::min(vector.iov_len, bytes);
        hashes->move(static_cast<const std::byte*>(vector.iov_base), length);
        bytes -= length;
    }
}

// Send or receive all spans; `done` counts the bytes. Returns an errno, or 0.
int move_all(int socket, const Operation& operation, const Timeout& timeout, Hashes* hashes, std::size_t& done) {
    const bool sends = operation.kind == Kind::send;
    const std::size_t limit = hashes != nullptr ? hashed_per_call : SIZE_MAX;
    Cursor rest(operation.spans);
    while (!rest.empty()) {
        msghdr message = rest.message(limit);
        // Before they are sent: the kernel then copies them from the cache.
        if (sends) hash(hashes, message, limit);
        const Moved moved =
            sends ? send(socket, message, timeout) : receive(socket, message, MSG_WAITALL, timeout);
        if (moved.error != 0) return moved.error;
        if (!sends) hash(hashes, message, moved.bytes);
        rest.advance(moved.bytes);
        done += moved.bytes;
    }
    return 0;
}

// Receive bytes and compare them with `wanted`; `done` counts the bytes. Returns an errno, or 0; sets `equal`.
int expect(int socket, Span wanted, std::span<std::byte> unread, const Timeout& timeout,
           std::size_t& done, bool& equal) {
    equal = wanted.length <= unread.size();
    while (equal && done < wanted.length) {
        iovec room{unread.data() + done, wanted.length - done};
        msghdr message{};
        message.msg_iov = &room;
        message.msg_iovlen = 1;
        const Moved moved = receive(socket, message, 0, timeout);
        if (moved.error != 0) return moved.error;
        equal = std::memcmp(unread.data() + done, wanted.data + done, moved.bytes) == 0;
        done += moved.bytes;
    }
    return 0;
}

}  // namespace

Progress exchange(int socket, std::span<const Operation> operations, std::span<std::byte> unread,
                  Clock::time_point deadline, bool waits, Hashes* hashes) {
    const Timeout timeout{deadline, waits};
    Progress progress;
    for (const Operation& operation : operations) {
        progress.bytes = 0;
        bool equal = true;
        progress.error =
            operation.kind == Kind::expect
                ? expect(socket, operation.spans.front(), unread, timeout, progress.bytes, equal)
                : move_all(socket, operation, timeout, hashes, progress.bytes);
        if (progress.error != 0 || !equal) return progress;
        ++progress.operations;
    }
    progress.bytes = 0;
    return progress;
}

}  // namespace kvtier::sockets
