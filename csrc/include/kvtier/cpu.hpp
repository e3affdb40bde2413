// What this machine's processor can do. Not by __builtin_cpu_supports, whose answer comes from the compiler's run-time
// library: that of zig, with which wheels are built, says no to everything.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace kvtier {

// Up to which instruction set to use what this machine has. All give the same bytes.
enum class Vectors { none, avx2, avx512 };

}  // namespace kvtier

namespace kvtier::cpu {

struct Features {
    bool avx2 = false;
    bool avx512 = false;  // Foundation, and the operations on bytes and words.
    bool avx512_bytes = false;  // Permutations, shifts and compression of bytes: VBMI and VBMI2.
};

inline Features detect() {
    Features found;
#if defined(__x86_64__)
    unsigned int a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & bit_OSXSAVE) == 0) return found;
    // XCR0: which registers the operating system saves.
    std::uint32_t saved = 0, upper = 0;
    __asm__("xgetbv" : "=a"(saved), "=d"(upper) : "c"(0));
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
    found.avx2 = (saved & 0x06) == 0x06 && (b & bit_AVX2) != 0;
    found.avx512 = found.avx2 && (saved & 0xe6) == 0xe6 && (b & (1u << 16)) != 0 && (b & (1u << 30)) != 0;
    found.avx512_bytes = found.avx512 && (c & (1u << 1)) != 0 && (c & (1u << 6)) != 0;
#endif
    return found;
}

inline const Features& features() {
    static const Features found = detect();
    return found;
}

}  // namespace kvtier::cpu
