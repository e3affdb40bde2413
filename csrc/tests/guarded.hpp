#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <new>
#include <span>
#include <vector>

#include "check.hpp"

namespace kvtier::test {

using Bytes = std::vector<std::uint8_t>;

// Memory that ends where nothing may be read or written.
class Guarded {
public:
    explicit Guarded(std::size_t length) : length_(length), mapped_((length / 4096 + 2) * 4096) {
        void* found = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (found == MAP_FAILED) throw std::bad_alloc();
        memory_ = static_cast<std::uint8_t*>(found);
        if (mprotect(memory_ + mapped_ - 4096, 4096, PROT_NONE) != 0) throw std::bad_alloc();
    }
    explicit Guarded(const Bytes& bytes) : Guarded(bytes.size()) {
        if (!bytes.empty()) std::memcpy(all().data(), bytes.data(), bytes.size());
    }
    ~Guarded() { munmap(memory_, mapped_); }
    Guarded(const Guarded&) = delete;
    Guarded& operator=(const Guarded&) = delete;

    std::span<std::uint8_t> all() const { return {memory_ + mapped_ - 4096 - length_, length_}; }

private:
    std::size_t length_, mapped_;
    std::uint8_t* memory_;
};

// What `write` makes of `source` in at most `bound` bytes, given both as guarded memory. It returns the length.
template <typename Write>
Bytes written(const Bytes& source, std::size_t bound, Write write) {
    const Guarded from(source), to(bound);
    const std::size_t length = write(from.all(), to.all());
    CHECK(length <= bound);
    const auto found = to.all().first(length);
    return {found.begin(), found.end()};
}

}  // namespace kvtier::test
