// Shared memory in large pages of 2 MiB, which nobody has to set aside.
//
// A memfd gets its memory page by page, from wherever the system has some left: on a machine that has been up for a
// while, pages that lie side by side in a file lie far apart in memory. A disk then moves less with each request
// (three quarters to a third as fast where it was measured), and every copy looks up an address each 4 KiB. Since
// Linux 6.1 a program may ask for a large page in their place, whatever the system's settings are for those who do
// not ask: madvise(2), MADV_COLLAPSE.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <thread>

namespace kvtier {

inline constexpr std::size_t large_page_bytes = std::size_t{2} << 20;

// Map the first `length` bytes of a file over whatever is mapped at `address`, to be read and written. Throws
// std::system_error.
void map_over(std::byte* address, int file, std::size_t length);

// Puts large pages into a memfd, a little ahead of who uses it, in a thread of its own that begins with the first
// call of reach(). What lies in it stays, and may be used meanwhile. Does nothing where the system cannot.
class LargePages {
public:
    // So much is taken beyond what is used: no less than what a disk engine pins at once, after which pages stay.
    static constexpr std::size_t ahead = std::size_t{256} << 20;

    // Of the first `length` bytes of `file`, which this keeps open for itself. Throws std::system_error.
    LargePages(int file, std::size_t length);
    ~LargePages();
    LargePages(const LargePages&) = delete;
    LargePages& operator=(const LargePages&) = delete;

    // All before `stop` is used, or about to be. Does not block.
    void reach(std::size_t stop);

    // Block until all that is used, or about to be, has been seen to.
    void wait();

    // How many bytes have been put into large pages.
    std::size_t taken() const;

    // End the thread, and close the file. Waits for the page at hand, some milliseconds at worst. Harmless when
    // repeated, but by one thread after the other.
    void close();

private:
    void run();
    void note(int error);

    int file_;
    const std::size_t length_;
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::size_t wanted_ = 0;  // up to here
    std::size_t seen_ = 0;    // up to here, whatever came of it
    std::size_t taken_ = 0;
    int tries_ = 0;  // at the page at hand
    bool closing_ = false;
    bool ended_ = false;
    std::thread thread_;
};

}  // namespace kvtier
