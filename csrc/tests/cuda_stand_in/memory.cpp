#include "memory.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>

namespace cuda_stand_in {

namespace {

// A second mapping of the same memory; the first one if the memory is private, which cannot be mapped twice.
std::byte* mapped_again(std::byte* memory, std::size_t length) {
    if (reinterpret_cast<std::uintptr_t>(memory) % 4096) return memory;
    void* second = mremap(memory, 0, length, MREMAP_MAYMOVE);
    return second == MAP_FAILED ? memory : static_cast<std::byte*>(second);
}

}  // namespace

Memory::~Memory() {
    for (const Range& range : buried_) release(range);
}

bool Memory::add(Range range) {
    for (const auto& [begin, other] : ranges_) {
        if (begin < range.begin + range.length && range.begin < begin + other.length) return false;
    }
    range.on_device = range.kind == Kind::registered ? mapped_again(range.begin, range.length) : range.begin;
    ranges_.emplace(range.begin, range);
    return true;
}

std::optional<Range> Memory::remove(const void* begin) {
    const auto node = ranges_.extract(static_cast<const std::byte*>(begin));
    return node ? std::optional(node.mapped()) : std::nullopt;
}

const Range* Memory::at(const void* begin) const {
    const auto found = ranges_.find(static_cast<const std::byte*>(begin));
    return found == ranges_.end() ? nullptr : &found->second;
}

std::size_t Memory::count(Kind kind) const {
    return static_cast<std::size_t>(
        std::ranges::count_if(ranges_, [kind](const auto& entry) { return entry.second.kind == kind; }));
}

std::string Memory::resolve(Access& access, int device, bool kernel) const {
    for (const auto& [begin, range] : ranges_) {
        Range seen = range;
        if (kernel) seen.begin = range.on_device;
        if (!seen.holds(access.begin, access.length)) continue;
        if (range.kind == Kind::registered && !range.portable && range.device != device) {
            return "memory that is registered for another device only";
        }
        access.begin = range.begin + (access.begin - seen.begin);
        return "";
    }
    return "memory that is neither on the device nor pinned";
}

void Memory::release(const Range& range) {
    if (range.kind == Kind::allocated || range.kind == Kind::bounce) std::free(range.begin);
    if (range.kind == Kind::registered && range.on_device != range.begin) munmap(range.on_device, range.length);
}

}  // namespace cuda_stand_in
