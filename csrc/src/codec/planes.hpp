// The inner loops of the lossless codec, one set for each kind of processor.
//
// Words of four bytes are divided into planes: plane i has byte i of each word after a rotation by one bit to the left.
// That puts the exponent of a float32, and those of two bfloat16, into bytes of their own; and of smaller types, whose
// exponents have fewer bits, exponent and mantissa.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtier::codec {

// Words or symbols that are processed at a time. Planes have room for a multiple of it.
inline constexpr std::size_t group = 64;
// Symbols with a code of their own, at most. With codes of n bits, the last of 2^n codes is for all other symbols.
inline constexpr unsigned max_bits = 7;
inline constexpr std::size_t planes_count = 4;

struct Kernels {
    // Divide words into planes, from word `at` to `count`. Reads nothing behind them.
    void (*split)(const std::uint8_t* words, std::size_t at, std::size_t count, std::uint8_t* const* planes);
    // The inverse of split.
    void (*merge)(const std::uint8_t* const* planes, std::size_t at, std::size_t count, std::uint8_t* words);
    // Write the code of each symbol with `bits` bits, and the symbols without one to `escapes`; return how many these
    // are. `count` is a multiple of `group`. May write `group` bytes behind codes and escapes.
    std::size_t (*pack)(const std::uint8_t* plane, std::size_t count, unsigned bits, const std::uint8_t* codes_of,
                        std::uint8_t* codes, std::uint8_t* escapes);
    // The inverse of pack, which reads no byte behind codes and escapes. Return how many escapes were used, or -1 if
    // there are too few.
    std::ptrdiff_t (*unpack)(const std::uint8_t* codes, std::size_t count, unsigned bits, const std::uint8_t* symbols,
                             std::span<const std::uint8_t> escapes, std::uint8_t* plane);
};

extern const Kernels portable_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;  // VBMI and VBMI2: from Ice Lake and Zen 4 on.
#endif

}  // namespace kvtier::codec
