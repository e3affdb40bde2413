// One object on its way between memory and a file, as a sequence of requests to the kernel.
//
// Pure: it says what to ask next and is told the answer, and neither blocks nor calls anything. Whoever
// carries it asks the kernel, through a ring or not (engine.hpp); tests answer in the kernel's place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace kvtier::disk {

// O_DIRECT moves whole pages between whole pages.
inline constexpr std::size_t kPageBytes = 4096;

// The most that one request moves: a kernel takes no more than 2 GiB less a page at once.
inline constexpr std::size_t kMostBytesAtOnce = std::size_t{1} << 30;

// Copied by one of the kernel's threads where it goes through the page cache: as many copy at once as transfers move.
inline constexpr std::size_t kPatientBytes = std::size_t{256} << 10;

// What became of a transfer: kOk, kMiss, or the errno that it failed with.
inline constexpr int kOk = 0;
inline constexpr int kMiss = -1;

struct Request {
    enum class Kind : std::uint8_t {
        nothing,      // the transfer is finished
        open,         // path, flags; answered with a descriptor
        make_folder,  // path: the folder that it lies in
        measure,      // descriptor; answered with the file's bytes
        read,         // descriptor, memory, length, offset; answered with how many bytes
        write,        // the same
        use_cache,    // descriptor: no O_DIRECT from here on
        touch,        // descriptor: the file was used now
        close,        // descriptor
        rename,       // path to other_path
        unlink,       // path
    };
    Kind kind = Kind::nothing;
    bool patient = false;  // the kernel has had no patience with this before: have it wait
    int descriptor = -1;
    int flags = 0;
    const char* path = nullptr;
    const char* other_path = nullptr;
    std::byte* memory = nullptr;
    std::size_t length = 0;
    std::uint64_t offset = 0;
};

// Paths and memory stay where they are from the first request to the last answer; it is not moved meanwhile.
class Transfer {
public:
    // Fill `memory` with the file `path`. One that is not there, or is of another length, is a miss.
    static Transfer reading(std::string path, std::byte* memory, std::size_t length, bool direct);

    // Write `memory` to the file `temporary`, then give it the name `path`: all of it or nothing. The folder
    // is made where it is missing. `memory` is only read.
    static Transfer writing(std::string path, std::string temporary, std::byte* memory, std::size_t length,
                            bool direct);

    // What to ask next. `nothing` once it is finished.
    Request request() const;

    // The answer to request(): what the kernel says, or -errno.
    void answer(std::int64_t result);

    // End one that nobody has begun: it has failed, with ECANCELED.
    void drop();

    bool finished() const { return stage_ == Request::Kind::nothing; }
    int outcome() const { return outcome_; }

    // Whose it is; of no concern here.
    std::uint64_t batch = 0;

private:
    using Kind = Request::Kind;

    Transfer(std::string path, std::string temporary, std::byte* memory, std::size_t length, bool direct);

    bool writes() const { return !temporary_.empty(); }
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
    int descriptor_ = -1;
    int outcome_ = kOk;
    Kind stage_ = Kind::open;
    bool direct_;
    bool patient_ = false;
};

}  // namespace kvtier::disk
