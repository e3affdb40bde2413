// Transfer of one object between memory and a file, as a state machine of requests to the kernel.
//
// Pure: it returns the next request and accepts its result, without blocking or system calls. The engine
// (engine.hpp) executes the requests, through io_uring or directly; tests simulate the kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "kvtier/arriving.hpp"

namespace kvtier::disk {

// O_DIRECT needs page-aligned memory, offset and length.
inline constexpr std::size_t kPageBytes = 4096;

// Largest read or write request. The kernel's limit is 2 GiB minus a page.
inline constexpr std::size_t kMaxRequestBytes = std::size_t{1} << 30;

// Buffered requests of at least this size run on kernel workers, so that transfers copy in parallel.
inline constexpr std::size_t kOffloadBytes = std::size_t{256} << 10;

// Objects are read in parts, each of which is verified before it leaves the CPU's caches. A disk needs larger ones to
// be busy, as there may be few transfers: with 2 MiB, one was 5 % slower.
inline constexpr std::size_t kDirectReadBytes = std::size_t{8} << 20;
inline constexpr std::size_t kReadBytes = std::size_t{2} << 20;

// Outcome of a transfer: kOk, kVerified, kMiss, or an errno.
inline constexpr int kOk = 0;
inline constexpr int kMiss = -1;
inline constexpr int kVerified = -2;

struct Request {
    enum class Kind : std::uint8_t {
        nothing,      // the transfer is finished
        open,         // path, flags; result: a descriptor
        make_folder,  // path: the file's folder
        measure,      // descriptor; result: the file's size
        read,         // descriptor, memory, length, offset; result: bytes read
        write,        // the same; result: bytes written
        use_cache,    // descriptor: clear O_DIRECT
        touch,        // descriptor: set the time stamps to now
        close,        // descriptor
        rename,       // path to other_path
        unlink,       // path
    };
    Kind kind = Kind::nothing;
    bool offload = false;  // run it on a kernel worker, because it blocks or copies much (IOSQE_ASYNC)
    int descriptor = -1;
    int flags = 0;
    const char* path = nullptr;
    const char* other_path = nullptr;
    std::byte* memory = nullptr;
    std::size_t length = 0;
    std::uint64_t offset = 0;
};

// Requests refer to the paths and memory, so do not move a transfer between its first request and its last result.
class Transfer {
public:
    // Fill `memory` with the file `path`. A missing file, or one of another length, is a miss. The outcome is kVerified
    // if it is a chunk object whose payload has the checksum that is in its header.
    static Transfer reading(std::string path, std::byte* memory, std::size_t length, bool direct);

    // Write `memory` to the file `temporary`, then rename that to `path`, so that the write is atomic. Creates the
    // folder if necessary. `memory` is only read.
    static Transfer writing(std::string path, std::string temporary, std::byte* memory, std::size_t length,
                            bool direct);

    // The next request; `nothing` when finished.
    Request request() const;

    // Accept the result of request(): that of the system call, or -errno.
    void answer(std::int64_t result);

    // Finish a transfer that has not started, with the outcome ECANCELED.
    void drop();

    bool writes() const { return !temporary_.empty(); }
    bool finished() const { return stage_ == Request::Kind::nothing; }
    int outcome() const { return outcome_ == kOk && arriving_ && arriving_->verified() ? kVerified : outcome_; }

    // Verify the parts that have been read since the last call. Takes 20 to 100 us for each.
    void verify() {
        if (arriving_) arriving_->arrived(moved_);
    }

    // Used by the engine only.
    std::uint64_t batch = 0;
    bool moving = false;

private:
    using Kind = Request::Kind;

    Transfer(std::string path, std::string temporary, std::byte* memory, std::size_t length, bool direct);

    void opened(int descriptor);
    void not_opened(int error);
    void moved(std::size_t bytes);
    void closed(int error);
    void fail(int outcome);
    void go_on();
    void go_to(Kind stage) { stage_ = stage; }

    std::string path_;
    std::string temporary_;
    std::string folder_;
    std::byte* memory_;
    std::size_t length_;
    std::size_t moved_ = 0;
    std::optional<ArrivingObject> arriving_;
    int descriptor_ = -1;
    int outcome_ = kOk;
    Kind stage_ = Kind::open;
    bool direct_;
    bool offload_ = false;
};

}  // namespace kvtier::disk
