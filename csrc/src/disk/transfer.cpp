#include "kvtier/disk/transfer.hpp"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <span>
#include <utility>

namespace kvtier::disk {

Transfer Transfer::reading(std::string path, std::byte* memory, std::size_t length, bool direct) {
    Transfer transfer(std::move(path), {}, memory, length, direct);
    transfer.arriving_.emplace(std::span(memory, length));
    return transfer;
}

Transfer Transfer::writing(std::string path, std::string temporary, std::byte* memory, std::size_t length,
                           bool direct) {
    return Transfer(std::move(path), std::move(temporary), memory, length, direct);
}

Transfer::Transfer(std::string path, std::string temporary, std::byte* memory, std::size_t length,
                   bool direct)
    : path_(std::move(path)),
      temporary_(std::move(temporary)),
      memory_(memory),
      length_(length),
      direct_(direct && length % kPageBytes == 0 &&
              reinterpret_cast<std::uintptr_t>(memory) % kPageBytes == 0) {}

Request Transfer::request() const {
    Request next;
    next.kind = stage_;
    next.offload = offload_;
    next.descriptor = descriptor_;
    switch (stage_) {
        case Kind::open:
            next.path = writes() ? temporary_.c_str() : path_.c_str();
            next.flags = O_CLOEXEC | (direct_ ? O_DIRECT : 0) |
                         (writes() ? O_WRONLY | O_CREAT | O_EXCL : O_RDONLY);
            break;
        case Kind::make_folder:
            next.path = folder_.c_str();
            break;
        case Kind::read:
        case Kind::write:
            next.memory = memory_ + moved_;
            next.length = std::min(length_ - moved_, writes()    ? kMaxRequestBytes
                                                       : direct_ ? kDirectReadBytes
                                                                 : kReadBytes);
            next.offset = moved_;
            // Buffered I/O copies in the submitting thread: leave large copies to a kernel worker.
            next.offload = offload_ || (!direct_ && next.length >= kOffloadBytes);
            break;
        case Kind::rename:
            next.path = temporary_.c_str();
            next.other_path = path_.c_str();
            break;
        case Kind::unlink:
            next.path = temporary_.c_str();
            break;
        default:
            break;
    }
    return next;
}

void Transfer::answer(std::int64_t result) {
    // Any request can be interrupted, or would have to block: repeat it. A descriptor is closed even then.
    if ((result == -EINTR || result == -EAGAIN) && stage_ != Kind::close) {
        offload_ = true;
        return;
    }
    offload_ = false;
    const int error = result < 0 ? static_cast<int>(-result) : kOk;
    switch (stage_) {
        case Kind::open:
            return error ? not_opened(error) : opened(static_cast<int>(result));
        case Kind::make_folder:
            return error && error != EEXIST ? fail(error) : go_to(Kind::open);
        case Kind::measure:
            if (error) return fail(error);
            return static_cast<std::uint64_t>(result) == length_ ? go_on() : fail(kMiss);
        case Kind::read:
        case Kind::write:
            return error ? fail(error) : moved(static_cast<std::size_t>(result));
        case Kind::use_cache:
            if (error) return fail(error);
            direct_ = false;
            return go_on();
        case Kind::touch:  // Failing to update the time stamp is not an error.
            return go_to(Kind::close);
        case Kind::close:
            return closed(error == EINTR ? kOk : error);
        case Kind::rename:
            return error ? fail(error) : go_to(Kind::nothing);
        default:  // The temporary file of a failed write is removed, or the next scan finds it.
            return go_to(Kind::nothing);
    }
}

void Transfer::drop() {
    outcome_ = ECANCELED;
    go_to(Kind::nothing);
}

void Transfer::opened(int descriptor) {
    descriptor_ = descriptor;
    writes() ? go_on() : go_to(Kind::measure);
}

void Transfer::not_opened(int error) {
    if (error != ENOENT) return fail(error);
    if (!writes()) return fail(kMiss);
    if (!folder_.empty()) return fail(error);
    folder_ = temporary_.substr(0, temporary_.rfind('/'));
    go_to(Kind::make_folder);
}

void Transfer::moved(std::size_t bytes) {
    if (bytes == 0) return fail(writes() ? EIO : kMiss);
    moved_ += bytes;
    go_on();
}

// Request the remaining bytes, or finish.
void Transfer::go_on() {
    if (moved_ == length_) return go_to(writes() ? Kind::close : Kind::touch);
    // A short transfer (disk almost full, signal) ended within a page: continue without O_DIRECT.
    if (direct_ && moved_ % kPageBytes != 0) return go_to(Kind::use_cache);
    go_to(writes() ? Kind::write : Kind::read);
}

void Transfer::closed(int error) {
    descriptor_ = -1;
    if (!writes()) return go_to(Kind::nothing);
    // Some file systems report a full disk only on close.
    if (outcome_ == kOk) outcome_ = error;
    go_to(outcome_ == kOk ? Kind::rename : Kind::unlink);
}

void Transfer::fail(int outcome) {
    outcome_ = outcome;
    if (descriptor_ >= 0) return go_to(Kind::close);
    go_to(stage_ == Kind::rename ? Kind::unlink : Kind::nothing);
}

}  // namespace kvtier::disk
