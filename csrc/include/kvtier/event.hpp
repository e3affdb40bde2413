// An eventfd(2), to wake another thread or an event loop.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace kvtier {

class Event {
public:
    // Throws std::system_error if no descriptor is available.
    Event() : descriptor_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
        if (descriptor_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    }
    ~Event() { ::close(descriptor_); }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;

    int descriptor() const { return descriptor_; }
    // It fails only if the counter is at its maximum, and then the event is signalled anyway.
    void signal() const { static_cast<void>(::eventfd_write(descriptor_, 1)); }
    void clear() const {
        eventfd_t count = 0;
        static_cast<void>(::eventfd_read(descriptor_, &count));
    }

private:
    const int descriptor_;
};

}  // namespace kvtier
