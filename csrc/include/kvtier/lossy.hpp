// Codecs with loss for the values of KV: 8 or 4 bits for each, with a scale for each group of values.
//
// The values of a tile of at most 64 rows are divided into groups by row or by column, whichever has the smaller error:
// keys differ between channels, values between tokens (KIVI, arXiv 2402.02750), and which of them is a row depends on
// the kernel that reads them. A tile with values that are no numbers, or infinite, is stored as it is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kvtier/cpu.hpp"

namespace kvtier::codec {

// By the codes in headers of chunks. int8 and int4 have a scale and an offset for each group, fp8 (e4m3) a scale.
enum class Form : std::uint32_t { fp8 = 2, int8 = 3, int4 = 4 };

// How many bytes encoding `length` bytes may need. `table` describes them, see lossy.cpp. Throws std::invalid_argument
// unless it describes as many bytes.
std::size_t lossy_bound(std::span<const std::uint8_t> table, std::size_t length);

// Encode `source` into `target`, which has lossy_bound bytes. Return how many were written. Throws like lossy_bound.
std::size_t lossy_encode(Form form, std::span<const std::uint8_t> table, std::span<const std::uint8_t> source,
                         std::span<std::uint8_t> target, Vectors limit = Vectors::avx512);

// Decode `source` into `target`. Throws std::invalid_argument, having written a part of `target`, unless it was encoded
// from as many bytes. Neither reads nor writes anything else, for any input.
void lossy_decode(std::span<const std::uint8_t> source, std::span<std::uint8_t> target,
                  Vectors limit = Vectors::avx512);

}  // namespace kvtier::codec
