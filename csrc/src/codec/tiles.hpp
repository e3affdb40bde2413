// The inner loops of the codecs with loss, one set for each kind of processor.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "kvtier/lossy.hpp"

namespace kvtier::codec {

inline constexpr std::size_t max_rows = 64;
inline constexpr std::size_t min_width = 16, max_width = 128;

enum class Type : std::uint32_t { bytes, bfloat16, float16, float32 };

inline std::size_t bytes_of(Type type) {
    return type == Type::float32 ? 4 : type == Type::bytes ? 1 : 2;
}

// What the values of a group have in common.
enum class Order : std::uint8_t { as_it_is, row, column };

// Rows of values that are anywhere in memory: 1 to max_rows of min_width to max_width values.
struct Tile {
    std::array<std::uint8_t*, max_rows> rows;
    std::size_t count, width;

    std::size_t groups(Order order) const { return order == Order::row ? count : width; }
    // How many bytes its groups have in encoded form; scales are bfloat16, offsets as the values.
    std::size_t head_bytes(Form form, Type type, Order order) const {
        return groups(order) * (2 + (form == Form::fp8 ? 0 : bytes_of(type)));
    }
    // How many bytes its codes have: of int4, two rows share one.
    std::size_t code_bytes(Form form) const { return (form == Form::int4 ? (count + 1) / 2 : count) * width; }
};

struct TileKernels {
    const char* name;
    // Write groups and codes, and return their order; writes nothing if the tile is to be stored as it is.
    Order (*encode)(Form form, Type type, const Tile& tile, std::uint8_t* out);
    // The inverse. Return whether all scales and offsets are numbers that encode may have written.
    bool (*decode)(Form form, Type type, const Tile& tile, Order order, const std::uint8_t* in);
};

extern const TileKernels portable_tiles;
#if defined(__x86_64__)
extern const TileKernels avx2_tiles;
extern const TileKernels avx512_tiles;
#endif

}  // namespace kvtier::codec
