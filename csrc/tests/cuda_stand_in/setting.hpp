// What the tests copy between: an engine with its stream, and an arena.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "kvtier/cuda.hpp"
#include "stand_in.hpp"

namespace cuda_stand_in {

constexpr std::size_t page_bytes = 1000;  // not a multiple of a vector
constexpr std::size_t pages = 12;
constexpr std::size_t buffer_bytes = 1500;  // so that a few pages use each buffer several times

inline std::string joined(const std::vector<std::string>& lines) {
    std::string text;
    for (const std::string& line : lines) text += line + "\n";
    return text;
}

// Shared memory, like an arena.
class Mapped {
public:
    explicit Mapped(std::size_t length)
        : bytes_(static_cast<std::byte*>(mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                                              -1, 0)),
                 length) {}
    ~Mapped() {
        finish();  // Report a late access, rather than crash.
        munmap(bytes_.data(), bytes_.size());
    }
    Mapped(const Mapped&) = delete;
    Mapped& operator=(const Mapped&) = delete;

    std::span<std::byte> bytes() const { return bytes_; }

private:
    std::span<std::byte> bytes_;
};

// An engine with one layer, all of whose pages have the same content, and a stream. It reuses its memory at its end
// without asking CUDA, as allocators of engines do.
class Engine {
public:
    explicit Engine(std::size_t bytes = page_bytes, std::size_t count = pages)
        : page_bytes_(bytes), memory_(bytes * count) {
        add_device(memory_);
        // The stand-in is told to fail calls of kvtier only, so this does not fail.
        cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, 0);
    }
    ~Engine() {
        free_device(memory_.data());
        cudaStreamDestroy(stream_);
        finish();  // Report a late access, rather than crash.
    }
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    cudaStream_t stream() const { return stream_; }
    std::span<std::byte> memory() { return memory_; }

    // Have a kernel write this value to all pages.
    void fill(int value) {
        launch(stream_, memory_, true, [this, value] { std::memset(memory_.data(), value, memory_.size()); });
    }

    kvtier::KvMemory kv() {
        return {{{{memory_.data(), page_bytes_, memory_.size() / page_bytes_, page_bytes_}}}, -1};
    }

    // Whether pages from `first` on have this value, as the host sees it now.
    bool holds(int value, std::size_t first, std::size_t count) {
        const std::span<const std::byte> part =
            std::span(memory_).subspan(first * page_bytes_, count * page_bytes_);
        on_host(part, false);
        return std::ranges::all_of(part, [&](std::byte byte) { return byte == static_cast<std::byte>(value); });
    }

private:
    std::size_t page_bytes_;
    std::vector<std::byte> memory_;
    cudaStream_t stream_ = nullptr;
};

inline bool holds(std::span<const std::byte> bytes, int value) {
    on_host(bytes, false);
    return std::ranges::all_of(bytes, [&](std::byte byte) { return byte == static_cast<std::byte>(value); });
}

}  // namespace cuda_stand_in
