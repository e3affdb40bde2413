// The memory that the simulated devices can access.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace cuda_stand_in {

// `device` is the engine's, `bounce` what kvtier allocates on a device, `allocated` pinned memory of the host.
enum class Kind { device, bounce, registered, allocated };

// Bytes that an operation accesses, at their address on the host.
struct Access {
    const std::byte* begin;
    std::size_t length;
    bool writes;

    bool overlaps(const Access& other) const {
        return begin < other.begin + other.length && other.begin < begin + length;
    }
};

// One allocation or registration.
struct Range {
    std::byte* begin;
    std::size_t length;
    Kind kind;
    bool portable = false;           // accessible from every device, not just from `device`
    int device = 0;                  // which has allocated or registered it
    std::byte* on_device = nullptr;  // where kernels see it

    bool holds(const std::byte* at, std::size_t bytes) const {
        return at >= begin && bytes <= length && static_cast<std::size_t>(at - begin) <= length - bytes;
    }
};

class Memory {
public:
    Memory() = default;
    ~Memory();
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    // Add a range. Registered memory gets a second address for kernels if possible, as on systems where a device
    // cannot use host addresses, so that mistaking one for the other is noticed. False if it overlaps another range.
    bool add(Range range);
    std::optional<Range> remove(const void* begin);
    const Range* at(const void* begin) const;
    std::size_t count(Kind kind) const;

    // What an access on `device` touches, at its address on the host, or why it is invalid. `kernel`: the address is
    // one for kernels, otherwise one for the copy engines.
    std::string resolve(Access& access, int device, bool kernel) const;

    // Keep removed memory mapped: an operation that should have been done by now may still access it.
    void bury(const Range& range) { buried_.push_back(range); }
    static void release(const Range& range);

private:
    std::map<const std::byte*, Range> ranges_;
    std::vector<Range> buried_;
};

}  // namespace cuda_stand_in
