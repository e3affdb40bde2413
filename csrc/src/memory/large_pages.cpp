#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <system_error>

#include "kvtier/memory.hpp"
#include "kvtier/signals.hpp"

#ifndef MADV_COLLAPSE  // newer than some headers
#define MADV_COLLAPSE 25
#endif

namespace kvtier {
namespace {

constexpr std::size_t page_bytes = 4096;

// A page that is being written to is tried again.
constexpr int most_tries = 10;
constexpr auto pause = std::chrono::milliseconds(1);

std::size_t whole_pages(std::size_t length) {
    return length / large_page_bytes * large_page_bytes;
}

int duplicate(int file) {
    const int copy = ::fcntl(file, F_DUPFD_CLOEXEC, 0);
    if (copy < 0) throw std::system_error(errno, std::generic_category(), "dup");
    return copy;
}

// A piece of a file as large as a large page, mapped where a large page may be, for as long as this lives.
class Window {
public:
    Window(int file, std::size_t offset) {
        reserved_ = ::mmap(nullptr, 2 * large_page_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (reserved_ == MAP_FAILED) return;
        const auto start = reinterpret_cast<std::uintptr_t>(reserved_);
        const auto aligned = (start + large_page_bytes - 1) / large_page_bytes * large_page_bytes;
        piece_ = ::mmap(reinterpret_cast<void*>(aligned), large_page_bytes, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_FIXED, file, static_cast<off_t>(offset));
    }
    ~Window() {
        if (reserved_ != MAP_FAILED) ::munmap(reserved_, 2 * large_page_bytes);
    }
    Window(const Window&) = delete;
    Window& operator=(const Window&) = delete;

    // 0, or an error number.
    int collapse() const {
        if (piece_ == MAP_FAILED) return ENOMEM;
        return ::madvise(piece_, large_page_bytes, MADV_COLLAPSE) == 0 ? 0 : errno;
    }

private:
    void* reserved_ = MAP_FAILED;
    void* piece_ = MAP_FAILED;
};

// 0, or an error number.
int take(int file, std::size_t offset) {
    // Nothing at all cannot be collapsed; a page that is there stays as it is.
    if (::fallocate(file, 0, static_cast<off_t>(offset), page_bytes) != 0) return errno;
    return Window(file, offset).collapse();
}

}  // namespace

void map_over(std::byte* address, int file, std::size_t length) {
    const void* mapped = ::mmap(address, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0);
    if (mapped == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
}

LargePages::LargePages(int file, std::size_t length)
    : file_(duplicate(file)), length_(whole_pages(length)) {}

LargePages::~LargePages() {
    close();
}

void LargePages::reach(std::size_t stop) {
    const std::lock_guard lock(mutex_);
    const std::size_t wanted = stop < length_ - std::min(ahead, length_) ? whole_pages(stop + ahead) : length_;
    if (wanted <= wanted_ || closing_) return;
    wanted_ = wanted;
    if (!thread_.joinable()) {
        const WithoutSignals masked;
        thread_ = std::thread([this] { run(); });
    }
    changed_.notify_all();
}

void LargePages::wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return ended_ || seen_ >= wanted_; });
}

std::size_t LargePages::taken() const {
    const std::lock_guard lock(mutex_);
    return taken_;
}

void LargePages::close() {
    {
        const std::lock_guard lock(mutex_);
        closing_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
    if (file_ >= 0) ::close(file_);
    file_ = -1;
}

void LargePages::run() {
    ::pthread_setname_np(::pthread_self(), "kvtier-memory");
    std::unique_lock lock(mutex_);
    while (!ended_) {
        changed_.wait(lock, [&] { return closing_ || seen_ < wanted_; });
        if (!closing_) {
            lock.unlock();
            const int error = take(file_, seen_);
            lock.lock();
            note(error);
            if (tries_ > 0) changed_.wait_for(lock, pause, [&] { return closing_; });
        }
        ended_ = ended_ || closing_;
        changed_.notify_all();
    }
}

void LargePages::note(int error) {
    // Somebody is at work in it.
    if (error == EAGAIN && ++tries_ < most_tries) return;
    tries_ = 0;
    seen_ += large_page_bytes;
    if (error == 0) taken_ += large_page_bytes;
    if (error == EINVAL) ended_ = true;    // The system gives none to a memfd.
    if (error == ENOMEM || error == EBUSY) seen_ = wanted_;  // None at present, and each costs a long search.
}

}  // namespace kvtier
