#include "kvtier/lossy.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "kvtier/cpu.hpp"
#include "tiles.hpp"

// Format, little-endian:
//
//   u32  form, u32 number of sections
//   for each section: u32 type, pages, bytes of a page, rows, values of a row, width
//   for each section of bytes: these
//   for each tile of the other sections: u8 order; scales, offsets and codes, or the tile as it is
//
// A page has blocks of `rows` rows. The rows of the same block of all pages follow each other, and are divided
// into tiles of max_rows rows and `width` columns.

namespace kvtier::codec {

namespace {

using Source = std::span<const std::uint8_t>;
using Target = std::span<std::uint8_t>;

constexpr std::size_t head_bytes = 8;

struct Section {
    Type type;
    std::uint32_t pages, page_bytes, rows, row, width;

    std::uint64_t length() const { return std::uint64_t{pages} * page_bytes; }
    std::size_t blocks() const { return page_bytes / bytes_of(type) / row / rows; }

    void check() const {
        const std::size_t values = page_bytes / bytes_of(type);
        const bool valid = type == Type::bytes ||
                           (type <= Type::float32 && width >= min_width && width <= max_width && row >= width &&
                            rows > 0 && row % width == 0 && page_bytes % bytes_of(type) == 0 && values % row == 0 &&
                            values / row % rows == 0);
        if (!valid || length() == 0) throw std::invalid_argument("a section has a shape that it cannot have");
    }
};

// Takes parts of bytes, one after the other.
class Reader {
public:
    explicit Reader(Source bytes) : left_(bytes) {}

    bool empty() const { return left_.empty(); }
    Source take(std::size_t count) {
        if (count > left_.size()) throw std::invalid_argument("the encoded payload ends too early");
        const Source taken = left_.first(count);
        left_ = left_.subspan(count);
        return taken;
    }
    Section section() {
        Section found;
        static_assert(sizeof found == 24);
        std::memcpy(&found, take(sizeof found).data(), sizeof found);
        found.check();
        return found;
    }

private:
    Source left_;
};

template <typename Each>
void each_tile(const Section& section, std::uint8_t* pages, Each each) {
    const std::size_t size = bytes_of(section.type), row_bytes = section.row * size;
    const std::size_t all = std::size_t{section.pages} * section.rows;
    Tile tile;
    tile.width = section.width;
    for (std::size_t block = 0; block < section.blocks(); ++block) {
        std::uint8_t* const start = pages + block * section.rows * row_bytes;
        for (std::size_t column = 0; column < row_bytes; column += section.width * size) {
            std::size_t page = 0, row = 0;
            for (std::size_t first = 0; first < all; first += tile.count) {
                tile.count = std::min(max_rows, all - first);
                for (std::size_t number = 0; number < tile.count; ++number) {
                    tile.rows[number] = start + page * section.page_bytes + row * row_bytes + column;
                    if (++row == section.rows) row = 0, ++page;
                }
                each(tile);
            }
        }
    }
}

}  // namespace

std::vector<const TileKernels*> tile_kernels() {
    std::vector<const TileKernels*> found;
#if defined(__x86_64__)
    if (cpu::features().avx512) found.push_back(&avx512_tiles);
    if (cpu::features().avx2) found.push_back(&avx2_tiles);
#endif
    found.push_back(&portable_tiles);
    return found;
}

std::size_t lossy_bound(Source table, std::size_t length) {
    std::size_t bound = head_bytes + table.size() + length, left = length;
    for (Reader in(table); !in.empty();) {
        const Section section = in.section();
        if (section.length() > left) throw std::invalid_argument("the table describes more bytes");
        left -= section.length();
        if (section.type == Type::bytes) continue;
        // No tile needs more bytes than its values, and the one for its order.
        const std::size_t rows = std::size_t{section.pages} * section.rows;
        bound += section.blocks() * (section.row / section.width) * ((rows + max_rows - 1) / max_rows);
    }
    if (left != 0) throw std::invalid_argument("the table describes fewer bytes");
    return bound;
}

std::size_t lossy_encode(Form form, Source table, Source source, Target target, const TileKernels& kernels) {
    if (target.size() < lossy_bound(table, source.size())) throw std::invalid_argument("the target is too short");
    const std::uint32_t head[] = {static_cast<std::uint32_t>(form),
                                  static_cast<std::uint32_t>(table.size() / sizeof(Section))};
    static_assert(sizeof head == head_bytes);
    std::uint8_t* out = target.data();
    const auto write = [&out](const void* from, std::size_t count) {
        std::memcpy(out, from, count);
        out += count;
    };
    write(head, sizeof head);
    if (!table.empty()) write(table.data(), table.size());
    for (Reader in(table); !in.empty();) {
        const Section section = in.section();
        const Source pages = source.first(section.length());
        source = source.subspan(section.length());
        if (section.type == Type::bytes) {
            write(pages.data(), pages.size());
            continue;
        }
        // The kernels only read from it.
        each_tile(section, const_cast<std::uint8_t*>(pages.data()), [&](const Tile& tile) {
            std::uint8_t* const order = out++;
            const Order found = kernels.encode(form, section.type, tile, out);
            *order = static_cast<std::uint8_t>(found);
            if (found != Order::as_it_is) {
                out += tile.head_bytes(form, section.type, found) + tile.code_bytes(form);
                return;
            }
            for (std::size_t row = 0; row < tile.count; ++row) {
                write(tile.rows[row], tile.width * bytes_of(section.type));
            }
        });
    }
    return static_cast<std::size_t>(out - target.data());
}

void lossy_decode(Source source, Target target, const TileKernels& kernels) {
    Reader in(source);
    std::uint32_t head[2];
    std::memcpy(head, in.take(sizeof head).data(), sizeof head);
    const Form form{head[0]};
    if (form < Form::fp8 || form > Form::int4) throw std::invalid_argument("the values have another form");
    for (Reader table(in.take(std::size_t{head[1]} * sizeof(Section))); !table.empty();) {
        const Section section = table.section();
        if (section.length() > target.size()) throw std::invalid_argument("the payload has fewer bytes");
        const Target pages = target.first(section.length());
        target = target.subspan(section.length());
        if (section.type == Type::bytes) {
            std::memcpy(pages.data(), in.take(pages.size()).data(), pages.size());
            continue;
        }
        each_tile(section, pages.data(), [&](const Tile& tile) {
            const Order order{in.take(1)[0]};
            if (order > Order::column) throw std::invalid_argument("a tile has an order that there is not");
            if (order != Order::as_it_is) {
                const std::size_t head_length = tile.head_bytes(form, section.type, order);
                const Source taken = in.take(head_length + tile.code_bytes(form));
                if (kernels.decode(form, section.type, tile, order, taken.data())) return;
                throw std::invalid_argument("a scale or offset is no number");
            }
            for (std::size_t row = 0; row < tile.count; ++row) {
                const Source values = in.take(tile.width * bytes_of(section.type));
                std::memcpy(tile.rows[row], values.data(), values.size());
            }
        });
    }
    if (!target.empty() || !in.empty()) throw std::invalid_argument("the payload has more bytes");
}

}  // namespace kvtier::codec
