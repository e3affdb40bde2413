// A lossless codec for the values of tensors: bfloat16, float16, float32 and float8, of unknown type.
//
// Exponents take few values, signs and mantissas all. So bytes are divided into four planes, and a plane of few symbols
// is stored with 1 to 7 bits for each: the last code is an escape, whose symbol follows. Planes that gain nothing are
// stored as they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kvtier/cpu.hpp"

namespace kvtier::codec {

// How many bytes encoding `length` bytes may need.
std::size_t max_encoded(std::size_t length);

// Encode `source` into `target`, which has max_encoded bytes. Return how many were written.
std::size_t encode(std::span<const std::uint8_t> source, std::span<std::uint8_t> target,
                   Vectors limit = Vectors::avx512);

// The same in fewer bytes: with codes of as many bits as a symbol has information, which take longer to encode and decode.
std::size_t encode_dense(std::span<const std::uint8_t> source, std::span<std::uint8_t> target,
                         Vectors limit = Vectors::avx512);

// Decode `source`, which either has written, into `target`. Throws std::invalid_argument, having written a part of `target`, unless it was encoded
// from as many bytes. Neither reads nor writes anything else, for any input.
void decode(std::span<const std::uint8_t> source, std::span<std::uint8_t> target, Vectors limit = Vectors::avx512);

}  // namespace kvtier::codec
