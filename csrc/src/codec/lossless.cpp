#include "kvtier/lossless.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <utility>
#include <vector>

#include "kvtier/intrinsics.hpp"
#include "reader.hpp"

// Format, little-endian: segments, until the length of the payload is reached. Of each:
//
//   u32  its length in bytes; with the highest bit set, it follows as it is
//   for each plane: u8 bits of a code; 0 if the plane is stored as it is, 8 if it is dense
//   for each plane with codes: u32 number of escapes, u8[2^bits - 1] symbols
//   for each plane: its bytes; or the codes of a multiple of `group` symbols, and the escapes; or what ans.inc describes
//   the bytes behind the last whole word

namespace kvtier::codec {

namespace {

static_assert(std::endian::native == std::endian::little, "reads little-endian values without conversion");

using Source = std::span<const std::uint8_t>;
using Target = std::span<std::uint8_t>;

// Words or symbols that are processed at a time. Planes have room for a multiple of it.
constexpr std::size_t group = 64;
// Symbols with a code of their own, at most. With codes of n bits, the last of 2^n codes is for all other symbols.
constexpr unsigned max_bits = 7, dense = 8;
constexpr std::size_t planes_count = 4;

// Of dense planes: the sum of frequencies, as a power of two; the state below which a word is read; and their number.
constexpr unsigned scale_bits = 12;
constexpr std::uint32_t scale = 1u << scale_bits, min_state = 1u << 16;
constexpr std::size_t lanes = 32;

// The inner loops, for each kind of processor.
//
// Words of four bytes are divided into planes: plane i has byte i of each word after a rotation by one bit to the left.
// That puts the exponent of a float32, and those of two bfloat16, into bytes of their own; and of smaller types, whose
// exponents have fewer bits, exponent and mantissa.
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
    // Decode `count` symbols of a dense plane, a multiple of `lanes`, or fewer if words go beyond `end`. Return where the
    // next word is. Reads up to `group` bytes behind `end`. A slot, for each remainder of a state: the symbol, its
    // frequency less one, and which of its own remainders it is, in 8, 12 and 12 bits.
    const std::uint8_t* (*step)(const std::uint32_t* slots, std::uint32_t* states, const std::uint8_t* word,
                                const std::uint8_t* end, std::size_t count, std::uint8_t* plane);
};

#include "planes_portable.inc"
#if defined(__x86_64__)
#include "planes_avx2.inc"
#include "planes_avx512.inc"
#endif

// A page of K or V of a usual model. Each segment has tables of its own; its planes fit into the L2 cache of a core.
constexpr std::size_t segment_bytes = std::size_t{32} << 10;
// Dense planes have longer tables, so their segments may be longer.
constexpr std::size_t max_segment_bytes = 4 * segment_bytes;
constexpr std::size_t max_symbols = max_segment_bytes / 4 + group;
constexpr std::uint32_t plain = std::uint32_t{1} << 31;
// A table is made of each eighth group of its plane.
constexpr std::size_t sampled = 8;

constexpr std::size_t rounded(std::size_t count) {
    return (count + group - 1) / group * group;
}

// A plane that did not gain is not looked at in as many segments.
constexpr unsigned skipped = 3;

// Memory for the planes of one segment.
struct Planes {
    alignas(64) std::array<std::array<std::uint8_t, max_symbols>, planes_count> bytes;
    std::uint8_t* at[planes_count] = {bytes[0].data(), bytes[1].data(), bytes[2].data(), bytes[3].data()};
    std::array<unsigned, planes_count> skip{};
};

// The codes of a plane: that of a symbol is its place.
struct Table {
    unsigned bits = 0;  // 0 if the plane does not gain.
    std::array<std::uint8_t, 128> symbols{};

    std::size_t size() const { return (std::size_t{1} << bits) - 1; }
};

using Counts = std::array<std::uint32_t, 256>;

// Count the symbols of each `step`th group, with what follows the plane in its last group.
Counts count_symbols(const std::uint8_t* plane, std::size_t count, std::size_t step) {
    // Increments of one counter wait for each other, so neighbors have different ones.
    std::uint16_t counts[4][256] = {};
    for (std::size_t start = 0; start < count; start += step * group) {
        for (std::size_t at = start; at < start + group; at += 8) {
            std::uint64_t symbols;
            std::memcpy(&symbols, plane + at, sizeof symbols);
#pragma GCC unroll 8
            for (unsigned number = 0; number < 8; ++number) ++counts[number % 4][symbols >> (8 * number) & 0xFF];
        }
    }
    Counts sums;
    for (std::size_t symbol = 0; symbol < 256; ++symbol) {
        sums[symbol] = counts[0][symbol] + counts[1][symbol] + counts[2][symbol] + counts[3][symbol];
    }
    return sums;
}

// Find the number of bits with which codes and escapes need the fewest.
Table choose(const Counts& counts) {
    std::array<std::uint32_t, 256> found;  // The symbols in the lower eight bits.
    std::size_t kinds = 0, total = 0;
    std::uint32_t most = 0;
    for (std::size_t symbol = 0; symbol < 256; ++symbol) {
        if (counts[symbol] == 0) continue;
        found[kinds++] = counts[symbol] << 8 | static_cast<std::uint32_t>(symbol);
        total += counts[symbol];
        most = std::max(most, counts[symbol]);
    }
    Table table;
    // Mantissas: 127 symbols would cover hardly more than half of them.
    if (kinds > 192 && most * 32 < total) return table;
    std::sort(found.begin(), found.begin() + static_cast<std::ptrdiff_t>(kinds), std::greater<>());
    // Not for less than 3 %.
    std::size_t least = 8 * total - 8 * total / 32, covered = 0, next = 0;
    for (unsigned bits = 1; bits <= max_bits; ++bits) {
        for (; next < std::min<std::size_t>(kinds, (1u << bits) - 1); ++next) covered += found[next] >> 8;
        const std::size_t cost = bits * total + 8 * (total - covered);
        if (cost >= least) continue;
        least = cost;
        table.bits = bits;
    }
    for (std::size_t code = 0; code < std::min(kinds, table.size()); ++code) {
        table.symbols[code] = static_cast<std::uint8_t>(found[code]);
    }
    return table;
}

class Writer {
public:
    explicit Writer(std::uint8_t* at) : at_(at) {}

    std::uint8_t* at() const { return at_; }
    void byte(unsigned value) { *at_++ = static_cast<std::uint8_t>(value); }
    void word(std::size_t value) {
        const auto little = static_cast<std::uint32_t>(value);
        std::memcpy(skip(sizeof little), &little, sizeof little);
    }
    void bytes(const std::uint8_t* from, std::size_t count) { std::memcpy(skip(count), from, count); }
    // Leave room, and return where.
    std::uint8_t* skip(std::size_t count) { return std::exchange(at_, at_ + count); }

private:
    std::uint8_t* at_;
};

#include "ans.inc"

// Write the codes of a plane; return how many escapes follow them.
std::size_t write_codes(std::uint8_t* plane, std::size_t count, const Table& table, Writer& out, const Kernels& kernels) {
    std::array<std::uint8_t, 256> codes;
    codes.fill(static_cast<std::uint8_t>(table.size()));
    // The rest of a table is filled with symbol 0, which may also have a code before.
    for (std::size_t code = table.size(); code-- > 0;) codes[table.symbols[code]] = static_cast<std::uint8_t>(code);
    std::memset(plane + count, table.symbols[0], rounded(count) - count);
    std::uint8_t* const packed = out.skip(rounded(count) / 8 * table.bits);
    // Codes are written 64 bytes at a time, so escapes are collected elsewhere.
    alignas(64) std::uint8_t escapes[max_symbols + group];
    const std::size_t used = kernels.pack(plane, rounded(count), table.bits, codes.data(), packed, escapes);
    out.bytes(escapes, used);
    return used;
}

// Return whether that made it shorter.
bool encode_segment(Source segment, Planes& planes, Writer& out, const Kernels& kernels) {
    const std::uint8_t* const begin = out.at();
    const std::size_t count = segment.size() / 4;
    kernels.split(segment.data(), 0, count, planes.at);
    std::array<Table, planes_count> tables;
    bool gains = false;
    for (std::size_t plane = 0; plane < planes_count; ++plane) {
        std::memset(planes.at[plane] + count, 0, rounded(count) - count);
        unsigned& skip = planes.skip[plane];
        if (skip > 0) {
            --skip;
            continue;
        }
        tables[plane] = choose(count_symbols(planes.at[plane], count, sampled));
        if (tables[plane].bits == 0) skip = skipped;
        gains |= tables[plane].bits > 0;
    }
    if (!gains) return false;
    out.word(segment.size());
    for (const Table& table : tables) out.byte(table.bits);
    std::array<std::uint8_t*, planes_count> escapes{};
    for (std::size_t plane = 0; plane < planes_count; ++plane) {
        if (tables[plane].bits == 0) continue;
        escapes[plane] = out.skip(sizeof(std::uint32_t));
        out.bytes(tables[plane].symbols.data(), tables[plane].size());
    }
    for (std::size_t plane = 0; plane < planes_count; ++plane) {
        if (tables[plane].bits == 0) {
            out.bytes(planes.at[plane], count);
        } else {
            Writer(escapes[plane]).word(write_codes(planes.at[plane], count, tables[plane], out, kernels));
        }
    }
    out.bytes(segment.data() + 4 * count, segment.size() - 4 * count);
    return static_cast<std::size_t>(out.at() - begin) < segment.size();
}

// Divide a segment into planes. Return their tables, without kinds for those that do not gain.
std::array<ans::Table, planes_count> dense_tables(Source segment, Planes& planes, const Kernels& kernels) {
    const std::size_t count = segment.size() / 4;
    kernels.split(segment.data(), 0, count, planes.at);
    std::array<ans::Table, planes_count> tables;
    for (std::size_t plane = 0; plane < planes_count && count > 0; ++plane) {
        std::memset(planes.at[plane] + count, planes.at[plane][0], rounded(count) - count);
        tables[plane] = ans::choose(count_symbols(planes.at[plane], count, 1));
        // Not for less than 3 %, as they take longer to decode.
        if (tables[plane].bytes + count / 32 > count) tables[plane] = {.bytes = count};
    }
    return tables;
}

// Like encode_segment, with dense planes.
bool encode_dense_segment(Source segment, Planes& planes, Writer& out, const Kernels& kernels) {
    const std::uint8_t* const begin = out.at();
    const std::size_t count = segment.size() / 4;
    const auto tables = dense_tables(segment, planes, kernels);
    out.word(segment.size());
    for (const ans::Table& table : tables) out.byte(table.kinds > 0 ? dense : 0);
    for (std::size_t plane = 0; plane < planes_count; ++plane) {
        if (tables[plane].kinds > 0) ans::encode(planes.at[plane], rounded(count), tables[plane], out);
        else out.bytes(planes.at[plane], count);
    }
    out.bytes(segment.data() + 4 * count, segment.size() - 4 * count);
    return static_cast<std::size_t>(out.at() - begin) < segment.size();
}

void decode_segment(Target segment, Planes& planes, Reader& in, const Kernels& kernels) {
    const std::size_t count = segment.size() / 4;
    const Source bits = in.take(planes_count);
    std::array<std::uint32_t, planes_count> escapes{};
    std::array<Table, planes_count> tables;
    for (std::size_t plane = 0; plane < planes_count; ++plane) {
        if (bits[plane] > dense) throw std::invalid_argument("a code has more bits than there are");
        if (bits[plane] == 0 || bits[plane] == dense) continue;
        tables[plane].bits = bits[plane];
        escapes[plane] = in.value<std::uint32_t>();
        std::ranges::copy(in.take(tables[plane].size()), tables[plane].symbols.begin());
    }
    std::array<const std::uint8_t*, planes_count> bytes{};
    for (std::size_t plane = 0; plane < planes_count; ++plane) {
        const Table& table = tables[plane];
        if (bits[plane] == dense) {
            ans::decode(in, rounded(count), planes.at[plane], kernels);
            bytes[plane] = planes.at[plane];
            continue;
        }
        if (table.bits == 0) {
            bytes[plane] = in.take(count).data();
            continue;
        }
        const Source codes = in.take(rounded(count) / 8 * table.bits), exact = in.take(escapes[plane]);
        const std::ptrdiff_t used = kernels.unpack(codes.data(), rounded(count), table.bits, table.symbols.data(), exact,
                                                   planes.at[plane]);
        if (used != static_cast<std::ptrdiff_t>(exact.size())) {
            throw std::invalid_argument("a plane has another number of escapes");
        }
        bytes[plane] = planes.at[plane];
    }
    kernels.merge(bytes.data(), 0, count, segment.data());
    std::memcpy(segment.data() + 4 * count, in.take(segment.size() - 4 * count).data(), segment.size() - 4 * count);
}

const Kernels& fastest([[maybe_unused]] Vectors limit) {
#if defined(__x86_64__)
    if (limit == Vectors::avx512 && cpu::features().avx512_bytes) return avx512::kernels;
    if (limit != Vectors::none && cpu::features().avx2) return avx2::kernels;
#endif
    return portable::kernels;
}

// Write segments of `length` bytes, as they are where `encode` does not make them shorter.
template <typename Encode>
void write_segments(Source source, std::size_t length, Encode encode, Planes& planes, Writer& out, const Kernels& kernels) {
    for (; !source.empty(); source = source.subspan(std::min(length, source.size()))) {
        const Source segment = source.first(std::min(length, source.size()));
        const Writer before = out;
        if (encode(segment, planes, out, kernels)) continue;
        out = before;
        out.word(segment.size() | plain);
        out.bytes(segment.data(), segment.size());
    }
}

}  // namespace

std::size_t max_encoded(std::size_t length) {
    // The last segment may have been written with more bytes than it had, before that is noticed.
    return length + (length / segment_bytes + 1) * sizeof(std::uint32_t) + 2 * segment_bytes;
}

std::size_t encode(Source source, Target target, Vectors limit) {
    if (target.size() < max_encoded(source.size())) throw std::invalid_argument("the target is too short");
    Planes planes;
    Writer out(target.data());
    write_segments(source, segment_bytes, encode_segment, planes, out, fastest(limit));
    return static_cast<std::size_t>(out.at() - target.data());
}

std::size_t encode_dense(Source source, Target target, Vectors limit) {
    if (target.size() < max_encoded(source.size())) throw std::invalid_argument("the target is too short");
    const Kernels& kernels = fastest(limit);
    Planes planes;
    Writer out(target.data());
    for (; !source.empty(); source = source.subspan(std::min(max_segment_bytes, source.size()))) {
        const Source part = source.first(std::min(max_segment_bytes, source.size()));
        // Long segments need fewer tables, short ones have fewer kinds of values.
        std::size_t best = 0, fewest = 0;
        for (std::size_t length = max_segment_bytes; length >= segment_bytes; length /= 2) {
            std::size_t bytes = 0;
            for (std::size_t at = 0; at < part.size(); at += length) {
                const Source segment = part.subspan(at, std::min(length, part.size() - at));
                for (const ans::Table& table : dense_tables(segment, planes, kernels)) bytes += table.bytes;
            }
            if (best == 0 || bytes < fewest) best = length, fewest = bytes;
        }
        write_segments(part, best, encode_dense_segment, planes, out, kernels);
    }
    return static_cast<std::size_t>(out.at() - target.data());
}

void decode(Source source, Target target, Vectors limit) {
    const Kernels& kernels = fastest(limit);
    Planes planes;
    Reader in(source);
    while (!target.empty()) {
        const std::uint32_t head = in.value<std::uint32_t>();
        const std::size_t length = head & ~plain;
        if (length == 0 || length > std::min(max_segment_bytes, target.size())) {
            throw std::invalid_argument("a segment has another length than it can have");
        }
        if (head & plain) {
            std::memcpy(target.data(), in.take(length).data(), length);
        } else {
            decode_segment(target.first(length), planes, in, kernels);
        }
        target = target.subspan(length);
    }
    if (!in.empty()) throw std::invalid_argument("bytes follow the encoded payload");
}

}  // namespace kvtier::codec
