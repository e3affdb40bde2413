// Streaming copies. Intel 64 and IA-32 Optimization Reference Manual, "Non-temporal stores"; the same holds
// for AMD (Software Optimization Guide for Zen 4, "Write combining").

#include <cstring>

#include "kvtier/copy.hpp"
#include "kvtier/cpu.hpp"
#include "kvtier/intrinsics.hpp"

namespace kvtier {

namespace {

#if defined(__x86_64__)

constexpr std::size_t vector_bytes = sizeof(__m256i);
constexpr std::size_t step_bytes = 4 * vector_bytes;

// No software prefetch: it cost 30 % on the one machine where it was measured. No 64-byte vectors either: there, the
// difference was within noise.
__attribute__((target("avx2"))) void stream(std::byte* to, const std::byte* from, std::size_t steps) {
    for (; steps > 0; --steps, to += step_bytes, from += step_bytes) {
        const auto* in = reinterpret_cast<const __m256i*>(from);
        auto* out = reinterpret_cast<__m256i*>(to);
        const __m256i a = _mm256_loadu_si256(in);
        const __m256i b = _mm256_loadu_si256(in + 1);
        const __m256i c = _mm256_loadu_si256(in + 2);
        const __m256i d = _mm256_loadu_si256(in + 3);
        _mm256_stream_si256(out, a);
        _mm256_stream_si256(out + 1, b);
        _mm256_stream_si256(out + 2, c);
        _mm256_stream_si256(out + 3, d);
    }
    // Non-temporal stores are weakly ordered: make them visible before the copy counts as done.
    _mm_sfence();
}

#endif

}  // namespace

void copy_run(std::byte* to, const std::byte* from, std::size_t length, bool streaming) {
#if defined(__x86_64__)
    if (streaming && length >= 2 * step_bytes && cpu::features().avx2) {
        const std::size_t head = -reinterpret_cast<std::uintptr_t>(to) % vector_bytes;
        const std::size_t steps = (length - head) / step_bytes;
        const std::size_t body = steps * step_bytes;
        std::memcpy(to, from, head);
        stream(to + head, from + head, steps);
        std::memcpy(to + head + body, from + head + body, length - head - body);
        return;
    }
#else
    static_cast<void>(streaming);
#endif
    if (length > 0) std::memcpy(to, from, length);
}

}  // namespace kvtier
