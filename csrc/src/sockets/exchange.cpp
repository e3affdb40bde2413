// Time-outs: socket(7), SO_RCVTIMEO and SO_SNDTIMEO. The kernel counts them down over all the waits of one call.

#include "kvtier/exchange.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace kvtier::sockets {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t spans_a_call = 1024;  // IOV_MAX of Linux

// So long a call that sends waits before it is looked whether the other side is still there.
constexpr auto moment = std::chrono::milliseconds(100);

// Has the next call that waits, to receive or to send, last until `deadline` at most; false where it is over.
bool bound(int socket, int option, Clock::time_point deadline) {
    const auto left = std::chrono::duration_cast<std::chrono::microseconds>(deadline - Clock::now()).count();
    if (left <= 0) return false;
    timeval time{};
    time.tv_sec = left / 1'000'000;
    time.tv_usec = left % 1'000'000;
    // What is no time-out at all is one that was zero.
    setsockopt(socket, SOL_SOCKET, option, &time, sizeof time);
    return true;
}

// What is left of the spans of one operation.
class Rest {
public:
    explicit Rest(const std::vector<Span>& spans) : spans_(spans) { skip_empty(); }

    bool empty() const { return at_ == spans_.size(); }

    // The next spans, as one call takes them.
    msghdr message() {
        std::size_t count = 0;
        std::size_t skipped = done_;
        for (std::size_t at = at_; at < spans_.size() && count < vectors_.size(); ++at, skipped = 0) {
            vectors_[count++] = {spans_[at].data + skipped, spans_[at].length - skipped};
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
    std::size_t done_ = 0;  // of the span at `at_`
    std::array<iovec, spans_a_call> vectors_;
};

// What a call of the kernel came to: how many bytes, or why there were none.
struct Moved {
    std::size_t bytes = 0;
    int error = 0;
};

// How long calls may wait: until a moment, or not at all.
struct Patience {
    Clock::time_point deadline;
    bool waits;
};

Moved moved_by(ssize_t result) {
    if (result > 0) return {static_cast<std::size_t>(result), 0};
    return {0, result == 0 ? ESHUTDOWN : errno};
}

// Whether to try again once a call has come to this.
bool again(const Moved& moved, const Patience& patience) {
    return moved.error == EINTR || (moved.error == EAGAIN && patience.waits);
}

Moved receive(int socket, msghdr& message, int flags, const Patience& patience) {
    while (!patience.waits || bound(socket, SO_RCVTIMEO, patience.deadline)) {
        const Moved moved = moved_by(recvmsg(socket, &message, patience.waits ? flags : MSG_DONTWAIT));
        if (!again(moved, patience)) return moved;
    }
    return {0, ETIMEDOUT};
}

// Whether the other side has closed without taking in what it was sent. A call that sends does not see that while
// its window is shut, and would wait for nothing.
bool has_left(int socket) {
    pollfd one{socket, POLLOUT | POLLRDHUP, 0};
    return poll(&one, 1, 0) > 0 && (one.revents & POLLOUT) == 0;
}

// The first call does not wait: what is small goes at once, and needs no time-out.
Moved send(int socket, const msghdr& message, const Patience& patience) {
    int flags = MSG_NOSIGNAL | MSG_DONTWAIT;
    for (;;) {
        const Moved moved = moved_by(sendmsg(socket, &message, flags));
        if (!again(moved, patience)) return moved;
        if (has_left(socket)) return {0, EPIPE};
        if (!bound(socket, SO_SNDTIMEO, std::min(patience.deadline, Clock::now() + moment))) return {0, ETIMEDOUT};
        flags = MSG_NOSIGNAL;
    }
}

// Send or receive all spans; `done` counts the bytes. The error.
int move_all(int socket, const Operation& operation, const Patience& patience, std::size_t& done) {
    const bool sends = operation.kind == Kind::send;
    Rest rest(operation.spans);
    while (!rest.empty()) {
        msghdr message = rest.message();
        const Moved moved =
            sends ? send(socket, message, patience) : receive(socket, message, MSG_WAITALL, patience);
        if (moved.error != 0) return moved.error;
        rest.advance(moved.bytes);
        done += moved.bytes;
    }
    return 0;
}

// Receive what must be equal to `wanted`; `done` counts the bytes. The error, and whether they were equal.
int expect(int socket, Span wanted, std::span<std::byte> unread, const Patience& patience,
           std::size_t& done, bool& equal) {
    equal = wanted.length <= unread.size();
    while (equal && done < wanted.length) {
        iovec room{unread.data() + done, wanted.length - done};
        msghdr message{};
        message.msg_iov = &room;
        message.msg_iovlen = 1;
        const Moved moved = receive(socket, message, 0, patience);
        if (moved.error != 0) return moved.error;
        equal = std::memcmp(unread.data() + done, wanted.data + done, moved.bytes) == 0;
        done += moved.bytes;
    }
    return 0;
}

}  // namespace

Progress exchange(int socket, std::span<const Operation> operations, std::span<std::byte> unread,
                  Clock::time_point deadline, bool waits) {
    const Patience patience{deadline, waits};
    Progress progress;
    for (const Operation& operation : operations) {
        progress.bytes = 0;
        bool equal = true;
        progress.error =
            operation.kind == Kind::expect
                ? expect(socket, operation.spans.front(), unread, patience, progress.bytes, equal)
                : move_all(socket, operation, patience, progress.bytes);
        if (progress.error != 0 || !equal) return progress;
        ++progress.operations;
    }
    progress.bytes = 0;
    return progress;
}

}  // namespace kvtier::sockets
