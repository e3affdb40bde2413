#include "kvtier/disk/ring.hpp"

#include <cerrno>
#include <system_error>

#ifdef KVTIER_HAS_IO_URING

#include <fcntl.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <vector>

namespace kvtier::disk {
namespace {

// Missing in older headers; 0 enables nothing.
#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER 0
#endif
#ifndef IORING_SETUP_DEFER_TASKRUN
#define IORING_SETUP_DEFER_TASKRUN 0
#endif

constexpr std::array kNeeded = {IORING_OP_OPENAT, IORING_OP_READ,     IORING_OP_WRITE,
                                IORING_OP_CLOSE,  IORING_OP_RENAMEAT, IORING_OP_UNLINKAT};
constexpr mode_t kFileMode = 0600;

// Large enough that few chunks cross a part boundary; the kernel allows 16,384 parts.
constexpr std::size_t kBufferBytes = std::size_t{256} << 20;
constexpr std::size_t kProbeBytes = std::size_t{2} << 20;

[[noreturn]] void raise(int error, const char* action) {
    throw std::system_error(error, std::generic_category(), action);
}

long uring_register(int ring, unsigned opcode, void* argument, std::size_t count) {
    return ::syscall(__NR_io_uring_register, ring, opcode, argument, static_cast<unsigned>(count));
}

class Descriptor {
public:
    explicit Descriptor(int value) : value_(value) {}
    ~Descriptor() {
        if (value_ >= 0) ::close(value_);
    }
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    int get() const { return value_; }

private:
    int value_;
};

// A mapping of memory that is shared with the kernel.
class Shared {
public:
    Shared(int ring, std::size_t length, std::uint64_t offset) : length_(length) {
        start_ = ::mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring,
                        static_cast<off_t>(offset));
        if (start_ == MAP_FAILED) raise(errno, "mmap of io_uring");
    }
    ~Shared() { ::munmap(start_, length_); }
    Shared(const Shared&) = delete;
    Shared& operator=(const Shared&) = delete;

    template <typename T>
    T* at(std::size_t offset) const {
        return reinterpret_cast<T*>(static_cast<std::byte*>(start_) + offset);
    }

private:
    void* start_;
    std::size_t length_;
};

int set_up(unsigned entries, io_uring_params* params) {
    // Since Linux 6.1, completions are processed only in wait(), so that they do not interrupt the thread.
    for (const unsigned flags : {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN, 0U}) {
        *params = {};
        params->flags = flags | IORING_SETUP_CLAMP;
        const long ring = ::syscall(__NR_io_uring_setup, entries, params);
        if (ring >= 0) return static_cast<int>(ring);
        if (errno != EINVAL) break;
    }
    raise(errno, "io_uring_setup");
}

void require_operations(int ring) {
    constexpr std::size_t kMaxOps = 256;
    alignas(io_uring_probe) std::array<std::byte, sizeof(io_uring_probe) + kMaxOps * sizeof(io_uring_probe_op)>
        memory{};
    auto* probe = reinterpret_cast<io_uring_probe*>(memory.data());
    if (uring_register(ring, IORING_REGISTER_PROBE, probe, kMaxOps) < 0) {
        raise(errno == EINVAL ? EOPNOTSUPP : errno, "io_uring_register");
    }
    for (const int operation : kNeeded) {
        if (operation > probe->last_op || !(probe->ops[operation].flags & IO_URING_OP_SUPPORTED)) {
            raise(EOPNOTSUPP, "io_uring operation");
        }
    }
}

}  // namespace

// Registered buffers: the kernel pins memory once per part, not for each request.
//
// A part is pinned as soon as all of it is resident. Pinning faults in missing pages, and requests would wait for
// that: up to a second for 256 MiB on a busy machine.
class Buffers {
public:
    void offer(int ring, std::byte* memory, std::size_t length) {
        memory_ = memory;
        length_ = length;
        parts_.assign((length + kBufferBytes - 1) / kBufferBytes, {});
        io_uring_rsrc_register table{};
        table.nr = static_cast<unsigned>(parts_.size());
        table.flags = IORING_RSRC_REGISTER_SPARSE;
        if (uring_register(ring, IORING_REGISTER_BUFFERS2, &table, sizeof(table)) < 0) length_ = 0;
    }

    // The index of the pinned part that contains the whole range; -1 if none does.
    int holding(int ring, const std::byte* memory, std::size_t length) {
        if (length_ == 0 || length == 0 || memory < memory_ || memory + length > memory_ + length_) return -1;
        const auto first = static_cast<std::size_t>(memory - memory_);
        const std::size_t part = first / kBufferBytes;
        if ((first + length - 1) / kBufferBytes != part) return -1;
        if (!parts_[part].pinned) {
            if (!resident(part)) return -1;
            if (!pin(ring, part)) {
                length_ = 0;  // Usually RLIMIT_MEMLOCK: stop using registered buffers.
                return -1;
            }
        }
        return static_cast<int>(part);
    }

private:
    struct Part {
        std::size_t resident = 0;  // bytes from its start that are known to be resident
        bool pinned = false;
    };

    std::size_t bytes_of(std::size_t part) const {
        return std::min(kBufferBytes, length_ - part * kBufferBytes);
    }

    // Whether a part is resident, judged by the last page of each 2 MiB. Resumes where the last call stopped, so it
    // costs one system call while the next page is missing.
    bool resident(std::size_t part) {
        std::size_t& seen = parts_[part].resident;
        const std::size_t length = bytes_of(part);
        while (seen < length) {
            const std::size_t next = std::min(seen + kProbeBytes, length);
            const auto last = reinterpret_cast<std::uintptr_t>(memory_ + part * kBufferBytes + next - 1);
            unsigned char present = 0;
            void* page = reinterpret_cast<void*>(last - last % kPageBytes);
            if (::mincore(page, kPageBytes, &present) != 0) return false;
            if ((present & 1) == 0) return false;
            seen = next;
        }
        return true;
    }

    bool pin(int ring, std::size_t part) {
        iovec memory{memory_ + part * kBufferBytes, bytes_of(part)};
        io_uring_rsrc_update2 update{};
        update.offset = static_cast<unsigned>(part);
        update.data = reinterpret_cast<std::uintptr_t>(&memory);
        update.nr = 1;
        parts_[part].pinned = uring_register(ring, IORING_REGISTER_BUFFERS_UPDATE, &update, sizeof(update)) == 1;
        return parts_[part].pinned;
    }

    std::byte* memory_ = nullptr;
    std::size_t length_ = 0;
    std::vector<Part> parts_;
};

struct Ring::Rings {
    explicit Rings(unsigned max_requests)
        : descriptor(set_up(std::bit_ceil(max_requests), &params)),
          queues(descriptor.get(), length_of_queues(), IORING_OFF_SQ_RING),
          entries(descriptor.get(), params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES) {
        if (!(params.features & IORING_FEAT_SINGLE_MMAP)) raise(EOPNOTSUPP, "io_uring_setup");
        require_operations(descriptor.get());
        set_max_workers(max_requests);
    }

    // Requests that would block run on kernel workers: allow one per request in flight.
    void set_max_workers(unsigned count) const {
        std::array<unsigned, 2> workers = {count, 0};
        uring_register(descriptor.get(), IORING_REGISTER_IOWQ_MAX_WORKERS, workers.data(), workers.size());
    }

    std::size_t length_of_queues() const {
        return std::max<std::size_t>(params.sq_off.array + params.sq_entries * sizeof(unsigned),
                                     params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
    }

    io_uring_sqe* next_entry() {
        auto tail = std::atomic_ref(*queues.at<unsigned>(params.sq_off.tail));
        const unsigned place = tail.load(std::memory_order_relaxed);
        const unsigned index = place & (params.sq_entries - 1);
        auto* entry = entries.at<io_uring_sqe>(index * sizeof(io_uring_sqe));
        std::memset(entry, 0, sizeof(*entry));
        queues.at<unsigned>(params.sq_off.array)[index] = index;
        // The kernel reads the queue only in io_uring_enter, which this same thread calls.
        tail.store(place + 1, std::memory_order_release);
        ++pushed;
        return entry;
    }

    void move(io_uring_sqe* entry, const Request& request) {
        const bool reads = request.kind == Request::Kind::read;
        const int buffer = buffers.holding(descriptor.get(), request.memory, request.length);
        if (buffer < 0) {
            entry->opcode = reads ? IORING_OP_READ : IORING_OP_WRITE;
        } else {
            entry->opcode = reads ? IORING_OP_READ_FIXED : IORING_OP_WRITE_FIXED;
            entry->buf_index = static_cast<std::uint16_t>(buffer);
        }
        entry->addr = reinterpret_cast<std::uintptr_t>(request.memory);
        entry->len = static_cast<unsigned>(request.length);
        entry->off = request.offset;
    }

    io_uring_params params{};
    Descriptor descriptor;
    Shared queues;
    Shared entries;
    unsigned pushed = 0;
    Buffers buffers;
};

Ring::Ring(unsigned max_requests) : rings_(std::make_unique<Rings>(max_requests)) {}

Ring::~Ring() = default;

void Ring::keep(std::byte* memory, std::size_t length) {
    rings_->buffers.offer(rings_->descriptor.get(), memory, length);
}

void Ring::push(const Request& request, std::uint64_t tag) {
    io_uring_sqe* entry = rings_->next_entry();
    entry->user_data = tag;
    entry->fd = request.descriptor;
    entry->flags = request.offload ? IOSQE_ASYNC : 0;
    switch (request.kind) {
        case Request::Kind::open:
            entry->opcode = IORING_OP_OPENAT;
            entry->fd = AT_FDCWD;
            entry->addr = reinterpret_cast<std::uintptr_t>(request.path);
            entry->len = kFileMode;
            entry->open_flags = static_cast<unsigned>(request.flags);
            return;
        case Request::Kind::read:
        case Request::Kind::write:
            return rings_->move(entry, request);
        case Request::Kind::close:
            entry->opcode = IORING_OP_CLOSE;
            return;
        case Request::Kind::rename:
            entry->opcode = IORING_OP_RENAMEAT;
            entry->fd = AT_FDCWD;
            entry->addr = reinterpret_cast<std::uintptr_t>(request.path);
            entry->len = static_cast<unsigned>(AT_FDCWD);
            entry->addr2 = reinterpret_cast<std::uintptr_t>(request.other_path);
            return;
        case Request::Kind::unlink:
            entry->opcode = IORING_OP_UNLINKAT;
            entry->fd = AT_FDCWD;
            entry->addr = reinterpret_cast<std::uintptr_t>(request.path);
            return;
        default:  // An invalid operation, which the kernel rejects.
            entry->opcode = IORING_OP_LAST;
    }
}

void Ring::push_wake_up(int event_fd, std::uint64_t* count, std::uint64_t tag) {
    io_uring_sqe* entry = rings_->next_entry();
    entry->opcode = IORING_OP_READ;
    entry->fd = event_fd;
    entry->addr = reinterpret_cast<std::uintptr_t>(count);
    entry->len = sizeof(*count);
    entry->user_data = tag;
}

void Ring::enter(unsigned awaited) {
    Rings& rings = *rings_;
    while (true) {
        const long taken = ::syscall(__NR_io_uring_enter, rings.descriptor.get(), rings.pushed,
                                     awaited, IORING_ENTER_GETEVENTS, nullptr, 0);
        if (taken >= 0) {
            rings.pushed -= static_cast<unsigned>(taken);
            if (rings.pushed == 0) return;
        } else if (errno == EAGAIN || errno == EBUSY) {
            return;  // Temporarily out of resources: let the caller reap completions, then retry.
        } else if (errno != EINTR) {
            raise(errno, "io_uring_enter");
        }
    }
}

bool Ring::pop(Answer* answer) {
    const Rings& rings = *rings_;
    auto head = std::atomic_ref(*rings.queues.at<unsigned>(rings.params.cq_off.head));
    auto tail = std::atomic_ref(*rings.queues.at<unsigned>(rings.params.cq_off.tail));
    const unsigned place = head.load(std::memory_order_relaxed);
    if (place == tail.load(std::memory_order_acquire)) return false;
    const auto* entries = rings.queues.at<io_uring_cqe>(rings.params.cq_off.cqes);
    const io_uring_cqe& entry = entries[place & (rings.params.cq_entries - 1)];
    *answer = {entry.user_data, entry.res};
    head.store(place + 1, std::memory_order_release);
    return true;
}

}  // namespace kvtier::disk

#else

namespace kvtier::disk {

struct Ring::Rings {};

Ring::Ring(unsigned) {
    throw std::system_error(ENOSYS, std::generic_category(), "built without <linux/io_uring.h>");
}
Ring::~Ring() = default;
void Ring::keep(std::byte*, std::size_t) {}
void Ring::push(const Request&, std::uint64_t) {}
void Ring::push_wake_up(int, std::uint64_t*, std::uint64_t) {}
void Ring::enter(unsigned) {}
bool Ring::pop(Answer*) { return false; }

}  // namespace kvtier::disk

#endif
