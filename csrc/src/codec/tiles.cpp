#include "tiles.hpp"

#include <bit>
#include <cfloat>
#include <cstring>

// Vectors of 16 values, as compilers provide them for any processor. Compiled without contraction of products and sums,
// so that all processors write the same bytes.

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

namespace kvtier::codec {

namespace {

static_assert(std::endian::native == std::endian::little, "reads little-endian values without conversion");

constexpr std::size_t lanes = 16;
using Floats = float __attribute__((vector_size(64)));
using Words = std::uint32_t __attribute__((vector_size(64)));
using Integers = std::int32_t __attribute__((vector_size(64)));
using Halves = std::uint16_t __attribute__((vector_size(32)));
using Bytes = std::uint8_t __attribute__((vector_size(16)));

constexpr std::uint32_t infinite = 0x7F800000, not_sign = 0x7FFFFFFF;
// Smaller steps than that have no reciprocal: all values of the group become its offset.
constexpr float min_scale = 0x1p-100F;
// With fewer rows, scales would take more room than a column gains.
constexpr std::size_t min_rows_by_column = 16;

// Values of a tile as float32, and its groups.
struct alignas(64) Scratch {
    float values[max_rows][max_width];
};
struct alignas(64) Groups {
    float low[max_width], high[max_width], scale[max_width], inverse[max_width];
};

constexpr float highest_of(Type type) {
    return type == Type::float16 ? 65504.0F : type == Type::bfloat16 ? 0x1.FEp127F : FLT_MAX;
}
constexpr float levels_of(Form form) {
    return form == Form::fp8 ? 448.0F : form == Form::int8 ? 255.0F : 15.0F;
}

}  // namespace

#define KVTIER_SET portable
#define KVTIER_TARGET
#include "tiles.inc"
#undef KVTIER_SET
#undef KVTIER_TARGET
const TileKernels portable_tiles{"portable", portable::encode, portable::decode};

#if defined(__x86_64__)
#define KVTIER_SET avx2
#define KVTIER_TARGET __attribute__((target("avx2")))
#include "tiles.inc"
#undef KVTIER_SET
#undef KVTIER_TARGET
const TileKernels avx2_tiles{"avx2", avx2::encode, avx2::decode};

#define KVTIER_SET avx512
#define KVTIER_TARGET __attribute__((target("avx512f,avx512bw")))
#include "tiles.inc"
#undef KVTIER_SET
#undef KVTIER_TARGET
const TileKernels avx512_tiles{"avx512", avx512::encode, avx512::decode};
#endif

}  // namespace kvtier::codec
