#include "kvtier/lossy.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.hpp"
#include "guarded.hpp"

using kvtier::codec::Form;
using kvtier::Vectors;
using kvtier::test::Bytes;
using kvtier::test::written;

namespace {

constexpr Vectors limits[] = {Vectors::none, Vectors::avx2, Vectors::avx512};

std::mt19937 random_bits(1);

struct Payload {
    std::string name;
    std::vector<std::uint32_t> table;
    Bytes bytes;

    std::span<const std::uint8_t> described() const {
        return {reinterpret_cast<const std::uint8_t*>(table.data()), 4 * table.size()};
    }
};

std::uint32_t special() {
    const std::uint32_t found[] = {0, 1, 0x80000000, 0x00400000, 0x7F7FFFFF, 0xFF7F0000, 0x477FE000, 0x38800000, 0x33800000};
    return found[random_bits() % std::size(found)];
}

std::uint16_t half(float value) {  // Of normal values only.
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t exponent = bits >> 23 & 0xFF;
    if (exponent < 113) return static_cast<std::uint16_t>(random_bits() & 0x83FF);
    return static_cast<std::uint16_t>((bits >> 16 & 0x8000) | (exponent - 112) << 10 | (bits >> 13 & 0x3FF));
}

// `kind`: 0 normal values, 1 with channels of different scale and special ones, 2 equal ones, 3 anything.
Bytes values(std::uint32_t type, std::size_t length, int kind) {
    std::normal_distribution<float> distribution(0, 1);
    const std::size_t size = type == 3 ? 4 : 2;
    Bytes bytes(length);
    for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random_bits());
    for (std::size_t at = 0; at + size <= length && kind < 3; at += size) {
        float value = kind == 2 ? 1.5F : distribution(random_bits);
        if (kind == 1) value = value * std::ldexp(1.0F, static_cast<int>(at / size % 64 / 8)) + 3.0F;
        auto word = std::bit_cast<std::uint32_t>(value);
        if (kind == 1 && random_bits() % 4096 == 0) word = special();
        const auto upper = static_cast<std::uint16_t>(word >> 16), halved = half(value);
        std::memcpy(&bytes[at], type == 3 ? static_cast<void*>(&word) : type == 1 ? (void*)&upper : (void*)&halved, size);
    }
    return bytes;
}

std::vector<Payload> payloads() {
    struct Shape {
        std::uint32_t pages, blocks, rows, row, width;
    };
    const Shape shapes[] = {{1, 1, 1, 16, 16},    {3, 2, 16, 128, 64}, {16, 1, 16, 512, 128}, {5, 2, 13, 80, 80},
                            {1, 4, 64, 32, 32},   {2, 1, 65, 100, 20}, {9, 3, 7, 96, 48},     {130, 1, 1, 17, 17},
                            {16, 1, 16, 576, 96}, {4, 8, 32, 64, 32}};
    std::vector<Payload> found;
    for (const std::uint32_t type : {1u, 2u, 3u}) {
        for (const Shape& shape : shapes) {
            for (const int kind : {0, 1, 2, 3}) {
                const std::uint32_t page = shape.blocks * shape.rows * shape.row * (type == 3 ? 4 : 2);
                Payload payload{"type " + std::to_string(type) + " rows of " + std::to_string(shape.row) + " kind " +
                                    std::to_string(kind),
                                {type, shape.pages, page, shape.rows, shape.row, shape.width},
                                values(type, std::size_t{page} * shape.pages, kind)};
                if (kind == 1) {  // Bytes, and the same again.
                    payload.table.insert(payload.table.end(), {0, 1, 7, 0, 0, 0, type, shape.pages, page, shape.rows,
                                                               shape.row, shape.width});
                    const Bytes once = payload.bytes;
                    payload.bytes.insert(payload.bytes.end(), 7, 0xA5);
                    payload.bytes.insert(payload.bytes.end(), once.begin(), once.end());
                }
                found.push_back(payload);
            }
        }
    }
    found.push_back({"nothing", {}, {}});
    return found;
}

Bytes encoded(Form form, const Payload& payload, Vectors limit = Vectors::avx512) {
    const std::size_t bound = kvtier::codec::lossy_bound(payload.described(), payload.bytes.size());
    return written(payload.bytes, bound, [&](auto source, auto target) {
        return kvtier::codec::lossy_encode(form, payload.described(), source, target, limit);
    });
}

Bytes decoded(const Bytes& stored, std::size_t length, Vectors limit = Vectors::avx512) {
    return written(stored, length, [&](auto source, auto target) {
        kvtier::codec::lossy_decode(source, target, limit);
        return length;
    });
}

const Form forms[] = {Form::fp8, Form::int8, Form::int4};

}  // namespace

TEST(instruction_sets_agree) {
    for (const Payload& payload : payloads()) {
        for (const Form form : forms) {
            const Bytes expected = encoded(form, payload, Vectors::none);
            const Bytes result = decoded(expected, payload.bytes.size(), Vectors::none);
            for (const Vectors limit : limits) {
                const bool same = encoded(form, payload, limit) == expected;
                if (!same || decoded(expected, payload.bytes.size(), limit) != result) {
                    kvtier::test::fail(payload.name.c_str(), static_cast<int>(form), same ? "decoded differently" : "encoded differently");
                }
            }
        }
    }
}

TEST(values_of_float32_are_near) {
    for (const Payload& payload : payloads()) {
        if (payload.table.empty() || payload.table[0] != 3 || payload.table.size() > 6 || payload.name.back() == '3') continue;
        for (const Form form : forms) {
            const Bytes result = decoded(encoded(form, payload), payload.bytes.size());
            std::vector<float> before(payload.bytes.size() / 4), after(before.size());
            std::memcpy(before.data(), payload.bytes.data(), payload.bytes.size());
            std::memcpy(after.data(), result.data(), result.size());
            const auto [low, high] = std::minmax_element(before.begin(), before.end());
            const float step = (*high - *low) / (form == Form::int4 ? 15 : 255);
            for (std::size_t at = 0; at < before.size(); ++at) {
                const float error = std::abs(after[at] - before[at]);
                const float most = form == Form::fp8 ? std::abs(before[at]) / 15 + 1e-4F : step * 0.51F;
                if (!(error <= most)) return kvtier::test::fail(payload.name.c_str(), static_cast<int>(form), "is not near");
            }
        }
    }
}

TEST(fewer_bits) {
    const Payload payload{"", {1, 16, 16 * 2048 * 2, 16, 2048, 128}, values(1, 16 * 16 * 2048 * 2, 0)};
    const auto ratio = [&](Form form) {
        return static_cast<double>(payload.bytes.size()) / static_cast<double>(encoded(form, payload).size());
    };
    CHECK(ratio(Form::fp8) > 1.9);
    CHECK(ratio(Form::int8) > 1.85);
    CHECK(ratio(Form::int4) > 3.5);
}

TEST(what_is_no_number_survives) {
    for (const std::uint32_t wrong : {0x7F80u, 0xFF80u, 0x7FC0u, 0xFFFFu}) {
        Payload payload{"", {1, 1, 64 * 64 * 2, 64, 64, 32}, values(1, 64 * 64 * 2, 0)};
        std::memcpy(&payload.bytes[1000], &wrong, 2);
        const Bytes result = decoded(encoded(Form::int4, payload), payload.bytes.size());
        CHECK(std::memcmp(&result[1000], &wrong, 2) == 0);
    }
}

TEST(other_shapes_are_refused) {
    const std::uint32_t valid[] = {1, 2, 4096, 16, 128, 64};
    const std::pair<std::size_t, std::uint32_t> wrong[] = {
        {0, 4}, {0, ~0u}, {1, 0}, {1, 3}, {2, 0}, {2, 4095}, {3, 0}, {3, 15}, {3, ~0u}, {4, 0}, {4, 127}, {4, ~0u}, {5, 0}, {5, 8}, {5, 256}};
    for (const auto& [at, value] : wrong) {
        std::vector<std::uint32_t> table(std::begin(valid), std::end(valid));
        table[at] = value;
        const Payload payload{"", table, Bytes(8192)};
        CHECK_THROWS(std::invalid_argument, encoded(Form::int8, payload));
    }
}

// Set KVTIER_FUZZED to the number of inputs.
TEST(damaged_bytes_do_no_harm) {
    const char* chosen = std::getenv("KVTIER_FUZZED");
    const int inputs = chosen != nullptr ? std::atoi(chosen) : 20'000;
    std::vector<std::pair<std::size_t, Bytes>> stored;
    for (const Payload& payload : payloads()) {
        if (payload.bytes.size() > 40'000) continue;
        for (const Form form : forms) stored.emplace_back(payload.bytes.size(), encoded(form, payload));
    }
    for (int input = 0; input < inputs; ++input) {
        const auto& [length, original] = stored[random_bits() % stored.size()];
        Bytes damaged = original;
        // The table is where lengths are, so most of the damage is done there.
        for (std::uint32_t flips = random_bits() % 4; flips > 0; --flips) {
            const std::size_t within = random_bits() % 2 ? std::min<std::size_t>(damaged.size(), 33) : damaged.size();
            damaged[random_bits() % within] = static_cast<std::uint8_t>(random_bits() % 3 ? random_bits() % 4 : random_bits());
        }
        if (random_bits() % 8 == 0) damaged.resize(random_bits() % (damaged.size() + 1));
        for (const Vectors limit : limits) {
            try {
                CHECK(decoded(damaged, length, limit).size() == length);
            } catch (const std::invalid_argument&) {
                // As good.
            }
        }
    }
}

int main() {
    return kvtier::test::run();
}
