#include "kvtier/lossy.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cfloat>
#include <cstring>
#include <stdexcept>

#include "reader.hpp"

// Format, little-endian:
//
//   u32  form, u32 number of sections
//   for each section: u32 type, pages, bytes of a page, rows, values of a row, width
//   for each section of bytes: these
//   for each tile of the other sections: u8 order; scales (bfloat16), offsets and codes, or the tile as it is
//
// A page has blocks of `rows` rows. The rows of the same block of all pages follow each other, and are divided into
// tiles of max_rows rows and `width` columns. Of int4, two rows of codes share their bytes.

namespace kvtier::codec {

namespace {

static_assert(std::endian::native == std::endian::little, "reads little-endian values without conversion");

using Source = std::span<const std::uint8_t>;

constexpr std::size_t max_rows = 64, min_width = 16, max_width = 128;
// With fewer rows, scales would take more room than columns gain.
constexpr std::size_t min_rows_by_column = 16;
// Smaller scales have no reciprocal: all values of the group become its offset.
constexpr float min_scale = 0x1p-100F;

enum class Type : std::uint32_t { bytes, bfloat16, float16, float32 };
enum class Order : std::uint8_t { as_it_is, row, column };

constexpr std::size_t bytes_of(Type type) {
    return type == Type::float32 ? 4 : type == Type::bytes ? 1 : 2;
}
constexpr float highest_of(Type type) {
    return type == Type::float16 ? 65504.0F : type == Type::bfloat16 ? 0x1.FEp127F : FLT_MAX;
}
constexpr float levels_of(Form form) {
    return form == Form::fp8 ? 448.0F : form == Form::int8 ? 255.0F : 15.0F;
}

// Rows of values that are anywhere in memory.
struct Tile {
    std::array<std::uint8_t*, max_rows> rows;
    std::size_t count, width;

    std::size_t groups(Order order) const { return order == Order::row ? count : width; }
    std::size_t head_bytes(Form form, Type type, Order order) const {
        return groups(order) * (2 + (form == Form::fp8 ? 0 : bytes_of(type)));
    }
    std::size_t code_bytes(Form form) const { return (form == Form::int4 ? (count + 1) / 2 : count) * width; }
};

struct alignas(64) Groups {
    float low[max_width], high[max_width], scale[max_width], inverse[max_width];
};

}  // namespace

struct TileKernels {
    // By form and type. Writes groups and codes, and returns their order; nothing if the tile is to be stored as it is.
    Order (*encode[3][3])(const Tile& tile, std::uint8_t* out);
    // The inverse. Returns whether all scales and offsets are numbers that `encode` may have written.
    bool (*decode[3][3])(const Tile& tile, Order order, const std::uint8_t* in);
};

namespace {

#define KVTIER_SET portable
#define KVTIER_LANES 4
#define KVTIER_TARGET
#include "tiles.inc"

#if defined(__x86_64__)
#define KVTIER_SET avx2
#define KVTIER_LANES 8
#define KVTIER_TARGET __attribute__((target("avx2")))
#include "tiles.inc"

#define KVTIER_SET avx512
#define KVTIER_LANES 16
#define KVTIER_TARGET __attribute__((target("avx512f,avx512bw")))
#include "tiles.inc"
#endif

struct Section {
    Type type;
    std::uint32_t pages, page_bytes, rows, row, width;

    std::uint64_t length() const { return std::uint64_t{pages} * page_bytes; }
    std::size_t blocks() const { return page_bytes / bytes_of(type) / row / rows; }
    std::size_t number() const { return static_cast<std::size_t>(type) - 1; }
};

std::size_t number_of(Form form) {
    if (form < Form::fp8 || form > Form::int4) throw std::invalid_argument("there is no such form");
    return static_cast<std::size_t>(form) - static_cast<std::size_t>(Form::fp8);
}

Section section_of(Reader& in, std::size_t left) {
    const auto found = in.value<Section>();
    const auto& [type, pages, page_bytes, rows, row, width] = found;
    const std::size_t values = page_bytes / bytes_of(type);
    const bool valid = type == Type::bytes ||
                       (type <= Type::float32 && width >= min_width && width <= max_width && row >= width && rows > 0 &&
                        page_bytes % bytes_of(type) == 0 && row % width == 0 && values % row == 0 &&
                        values / row % rows == 0);
    if (!valid || found.length() == 0) throw std::invalid_argument("a section has a shape that it cannot have");
    if (found.length() > left) throw std::invalid_argument("the payload has fewer bytes than its sections");
    return found;
}

template <typename Each>
void each_tile(const Section& section, std::uint8_t* pages, Each each) {
    const std::size_t size = bytes_of(section.type), row_bytes = section.row * size;
    const std::size_t all = std::size_t{section.pages} * section.rows;
    Tile tile;
    tile.width = section.width;
    for (std::size_t block = 0; block < section.blocks(); ++block, pages += section.rows * row_bytes) {
        for (std::size_t column = 0; column < row_bytes; column += section.width * size) {
            std::size_t page = 0, row = 0;
            for (std::size_t first = 0; first < all; first += tile.count) {
                tile.count = std::min(max_rows, all - first);
                for (std::size_t number = 0; number < tile.count; ++number) {
                    tile.rows[number] = pages + page * section.page_bytes + row * row_bytes + column;
                    if (++row == section.rows) row = 0, ++page;
                }
                each(tile);
            }
        }
    }
}

const TileKernels& fastest([[maybe_unused]] Vectors limit) {
#if defined(__x86_64__)
    if (limit == Vectors::avx512 && cpu::features().avx512) return avx512::kernels;
    if (limit != Vectors::none && cpu::features().avx2) return avx2::kernels;
#endif
    return portable::kernels;
}

}  // namespace

std::size_t lossy_bound(Source table, std::size_t length) {
    std::size_t bound = 2 * sizeof(std::uint32_t) + table.size() + length;
    for (Reader in(table); !in.empty();) {
        const Section section = section_of(in, length);
        length -= section.length();
        if (section.type == Type::bytes) continue;
        // No tile needs more bytes than its values, and the one for its order.
        const std::size_t rows = std::size_t{section.pages} * section.rows;
        bound += section.blocks() * (section.row / section.width) * ((rows + max_rows - 1) / max_rows);
    }
    if (length != 0) throw std::invalid_argument("the payload has more bytes than its sections");
    return bound;
}

std::size_t lossy_encode(Form form, Source table, Source source, std::span<std::uint8_t> target, Vectors limit) {
    if (target.size() < lossy_bound(table, source.size())) throw std::invalid_argument("the target is too short");
    const std::size_t number = number_of(form);
    std::uint8_t* out = target.data();
    const auto write = [&out](const void* from, std::size_t count) {
        if (count > 0) std::memcpy(out, from, count);
        out += count;
    };
    const std::array head{static_cast<std::uint32_t>(form), static_cast<std::uint32_t>(table.size() / sizeof(Section))};
    write(head.data(), sizeof head);
    write(table.data(), table.size());
    for (Reader in(table); !in.empty();) {
        const Section section = section_of(in, source.size());
        const Source pages = source.first(section.length());
        source = source.subspan(section.length());
        if (section.type == Type::bytes) {
            write(pages.data(), pages.size());
            continue;
        }
        const auto encode = fastest(limit).encode[number][section.number()];
        // It only reads from the pages.
        each_tile(section, const_cast<std::uint8_t*>(pages.data()), [&](const Tile& tile) {
            const Order order = encode(tile, out + 1);
            *out++ = static_cast<std::uint8_t>(order);
            if (order != Order::as_it_is) {
                out += tile.head_bytes(form, section.type, order) + tile.code_bytes(form);
                return;
            }
            for (std::size_t row = 0; row < tile.count; ++row) write(tile.rows[row], tile.width * bytes_of(section.type));
        });
    }
    return static_cast<std::size_t>(out - target.data());
}

void lossy_decode(Source source, std::span<std::uint8_t> target, Vectors limit) {
    Reader in(source);
    const auto form = in.value<Form>();
    const std::size_t number = number_of(form);
    const auto sections = in.value<std::uint32_t>();
    for (Reader table(in.take(sections * sizeof(Section))); !table.empty();) {
        const Section section = section_of(table, target.size());
        const auto pages = target.first(section.length());
        target = target.subspan(section.length());
        if (section.type == Type::bytes) {
            std::ranges::copy(in.take(pages.size()), pages.begin());
            continue;
        }
        const auto decode = fastest(limit).decode[number][section.number()];
        each_tile(section, pages.data(), [&](const Tile& tile) {
            const auto order = in.value<Order>();
            if (order == Order::row || order == Order::column) {
                const Source taken = in.take(tile.head_bytes(form, section.type, order) + tile.code_bytes(form));
                if (decode(tile, order, taken.data())) return;
            }
            if (order != Order::as_it_is) throw std::invalid_argument("a tile is not what was encoded");
            for (std::size_t row = 0; row < tile.count; ++row) {
                std::ranges::copy(in.take(tile.width * bytes_of(section.type)), tile.rows[row]);
            }
        });
    }
    if (!target.empty() || !in.empty()) throw std::invalid_argument("the payload has another length");
}

}  // namespace kvtier::codec
