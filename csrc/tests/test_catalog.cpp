#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <stdexcept>
#include <vector>

#include "check.hpp"
#include "kvtier/chunk_table.hpp"

using namespace kvtier::catalog;

namespace {

using Numbers = std::vector<std::uint32_t>;

// A key of which each part depends on the number.
std::array<std::uint8_t, key_bytes> make_key(std::uint64_t number) {
    std::array<std::uint8_t, key_bytes> key;
    std::mt19937_64 random(number);
    for (std::size_t at = 0; at < key.size(); at += 8) {
        const std::uint64_t word = random();
        std::memcpy(key.data() + at, &word, 8);
    }
    return key;
}

// A table with `rows` rows in two tiers, and its columns.
struct Fixture {
    ChunkTable table;
    std::vector<std::uint8_t> keys, ready, pending;
    std::vector<Row> parents;
    std::vector<std::uint64_t> lengths;
    std::vector<std::uint32_t> spaces, generations;
    std::array<std::vector<Count>, 2> children;

    explicit Fixture(std::size_t rows)
        : keys(rows * key_bytes), ready(rows), pending(rows), parents(rows), lengths(rows), spaces(rows),
          generations(rows), children{std::vector<Count>(rows), std::vector<Count>(rows)} {}

    Columns columns() { return {keys, parents, ready, pending}; }

    void fill(const Numbers& numbers, const Numbers& rows, Row parent) {
        std::vector<std::array<std::uint8_t, key_bytes>> made;
        for (const std::uint32_t number : numbers) made.push_back(make_key(number));
        std::vector<Key> all;
        for (const auto& key : made) all.push_back(key.data());
        table.fill(all, rows, std::vector<std::uint64_t>(rows.size(), 10), parent, columns(),
                   {lengths, spaces, generations, 3, 4});
    }
    std::uint64_t enter(const Numbers& rows, std::size_t tier) {
        return ChunkTable::enter(rows, static_cast<std::uint8_t>(1 << tier), ready, columns(), lengths, {},
                                 children[tier]);
    }
    std::optional<std::uint64_t> leave(const std::vector<Row>& rows, std::size_t tier) {
        std::size_t failed = 0;
        return ChunkTable::leave(rows, static_cast<std::uint8_t>(1 << tier), columns(), lengths, failed);
    }
    std::vector<Row> release(const Numbers& rows, std::size_t tier) {
        const std::array<std::span<Count>, 2> counts{children[0], children[1]};
        return table.release(rows, tier, columns(), counts);
    }
    Row find(std::uint32_t number) { return table.index().find(make_key(number).data(), keys); }
};

// The victims of tier 0 in an order.
std::vector<Row> victims(const Fixture& chunks, const std::vector<Row>& order, Wanted wanted = {1 << 20, -1, -1},
                         const IsRow& is_leased = {}) {
    std::size_t at = 0;
    return select([&] { return at < order.size() ? order[at++] : no_row; },
                  {chunks.parents, chunks.lengths, chunks.children[0], chunks.ready, 1}, {}, is_leased, wanted);
}

}  // namespace

TEST(index_equals_a_map) {
    constexpr std::size_t rows = 5000;
    std::vector<std::uint8_t> column(rows * key_bytes);
    KeyRows index;
    std::map<std::uint64_t, Row> model;
    std::vector<std::uint64_t> held(rows, 0);  // The number in each row; 0: none.
    std::mt19937_64 random(1);
    for (int turn = 0; turn < 60000; ++turn) {
        const auto row = static_cast<Row>(random() % rows);
        std::uint64_t& in_row = held[static_cast<std::size_t>(row)];
        const std::uint64_t number = 1 + random() % 6000;
        if (in_row != 0) {
            CHECK(index.erase(row, column));
            CHECK(!index.erase(row, column));
            model.erase(in_row);
            in_row = 0;
        } else {
            const auto key = make_key(number);
            std::copy(key.begin(), key.end(), column.begin() + row * static_cast<std::ptrdiff_t>(key_bytes));
            const bool absent = model.find(number) == model.end();
            CHECK(index.insert(row, column) == absent);
            if (absent) model[number] = row, in_row = number;
        }
    }
    std::vector<std::array<std::uint8_t, key_bytes>> made;
    for (std::uint64_t number = 1; number <= 6000; ++number) made.push_back(make_key(number));
    std::vector<Key> keys;
    for (const auto& key : made) keys.push_back(key.data());
    keys[17] = nullptr;
    model.erase(18);
    std::vector<Row> found(keys.size());
    index.find_all(keys, found, column);
    for (std::size_t at = 0; at < keys.size(); ++at) {
        const auto known = model.find(at + 1);
        CHECK(found[at] == (known == model.end() ? no_row : known->second));
        CHECK(index.find(keys[at], column) == found[at]);
    }
}

TEST(rows_beyond_the_column_throw) {
    KeyRows index;
    std::vector<std::uint8_t> column(4 * key_bytes);
    CHECK(index.find(column.data(), column) == no_row);
    CHECK(index.insert(3, column));
    CHECK_THROWS(std::out_of_range, index.insert(4, column));
    CHECK_THROWS(std::out_of_range, index.erase(-1, column));
    CHECK_THROWS(std::out_of_range, index.find(column.data(), KeyColumn(column).first(3 * key_bytes)));
    Fixture chunks(4);
    CHECK_THROWS(std::out_of_range, (chunks.fill({1}, {4}, no_row), 0));
    CHECK_THROWS(std::out_of_range, chunks.enter({4}, 0));
    CHECK_THROWS(std::out_of_range, chunks.leave({4}, 0));
    CHECK_THROWS(std::out_of_range, chunks.release({4}, 0));
    chunks.fill({1}, {0}, 9);
    CHECK_THROWS(std::out_of_range, chunks.enter({0}, 0));
    CHECK(chunks.ready[0] == 0);
    CHECK_THROWS(std::out_of_range, victims(chunks, {4}));
}

TEST(fill_is_all_or_nothing) {
    Fixture chunks(8);
    chunks.fill({1, 2}, {5, 3}, no_row);
    CHECK(chunks.find(1) == 5 && chunks.find(2) == 3);
    CHECK(chunks.parents[5] == no_row && chunks.parents[3] == 5);
    CHECK(chunks.lengths[3] == 10 && chunks.spaces[3] == 3 && chunks.generations[3] == 4);
    CHECK_THROWS(std::invalid_argument, (chunks.fill({7, 8, 7}, {0, 1, 2}, 3), 0));
    CHECK_THROWS(std::invalid_argument, (chunks.fill({7, 1}, {0, 1}, 3), 0));
    CHECK(chunks.find(7) == no_row && chunks.find(8) == no_row && chunks.find(1) == 5);
    chunks.fill({7, 8}, {0, 1}, 3);
    CHECK(chunks.find(7) == 0 && chunks.find(8) == 1);
}

TEST(leave_is_all_or_nothing) {
    Fixture chunks(4);
    chunks.fill({1, 2, 3}, {0, 1, 2}, no_row);
    CHECK(chunks.enter({0, 1}, 0) == 20);
    chunks.pending[1] = 1;
    chunks.ready[1] = 0;
    for (const std::vector<Row>& wrong : {std::vector<Row>{0, 1, 2}, {0, 1, 0}, {0, 1, no_row}}) {
        CHECK(!chunks.leave(wrong, 0));
        CHECK(chunks.ready[0] == 1 && chunks.ready[1] == 0 && chunks.pending[0] == 0 && chunks.pending[1] == 1);
    }
    CHECK(chunks.leave({1, 0}, 0) == 20);
    CHECK((chunks.ready[0] | chunks.pending[1]) == 0);
}

TEST(parent_keeps_its_row_while_it_has_children) {
    Fixture chunks(4);
    chunks.fill({1, 2, 3}, {0, 1, 2}, no_row);
    chunks.enter({0, 1, 2}, 1);
    CHECK(chunks.leave({0, 1}, 1));
    CHECK(chunks.release({0, 1}, 1) == std::vector<Row>{0});
    CHECK(chunks.table.parents_only == 1);
    CHECK(chunks.find(1) == no_row && chunks.find(2) == 1 && chunks.parents[1] == no_row);
    CHECK(chunks.leave({2}, 1));
    CHECK((chunks.release({2}, 1) == std::vector<Row>{2, 1}));
    CHECK(chunks.table.parents_only == 0 && chunks.find(2) == no_row);
}

TEST(prefix_ends_before_the_first_chunk_that_is_not_ready) {
    Fixture chunks(64);
    Numbers numbers, rows;
    for (std::uint32_t at = 0; at < 40; ++at) {
        numbers.push_back(at + 1);
        rows.push_back(at < 20 ? at : 59 - at);  // 20 consecutive rows, then 20 that are not.
    }
    chunks.fill(numbers, rows, no_row);
    chunks.enter(rows, 0);
    std::vector<std::array<std::uint8_t, key_bytes>> made;
    for (const std::uint32_t number : numbers) made.push_back(make_key(number));
    std::vector<Key> keys;
    for (const auto& key : made) keys.push_back(key.data());
    const auto held = [&](std::uint8_t among) {
        std::vector<Row> found;
        chunks.table.prefix(keys, among, chunks.columns(), found);
        CHECK(std::equal(found.begin(), found.end(), rows.begin()));
        return found.size();
    };
    CHECK(held(3) == 40);
    CHECK(held(2) == 0);
    for (const std::size_t end : {33u, 21u, 20u, 19u, 1u, 0u}) {
        chunks.ready[rows[end]] = 2;
        CHECK(held(1) == end);
    }
    keys[5] = nullptr;
    CHECK(held(3) == 5);
}

TEST(victims_leave_before_their_parents) {
    Fixture chunks(8);
    chunks.fill({1, 2, 3}, {0, 1, 2}, no_row);
    chunks.fill({4}, {3}, 0);
    chunks.enter({0, 1, 2, 3}, 0);
    CHECK((victims(chunks, {0, 1, 2, 3}) == std::vector<Row>{2, 1, 3, 0}));
    CHECK((victims(chunks, {3, 2, 1, 0}, {20, -1, -1}) == std::vector<Row>{3, 2}));
    CHECK((victims(chunks, {3, 2, 1, 0}, {1 << 20, 3, -1}) == std::vector<Row>{3, 2, 1}));
    CHECK((victims(chunks, {0, 1, 3, 2}, {1 << 20, -1, 2}).empty()));
    const auto leased = [](Row row) { return row == 2; };
    CHECK((victims(chunks, {0, 1, 2, 3}, {1 << 20, -1, -1}, leased) == std::vector<Row>{1, 3, 0}));
    chunks.ready[3] = 0;  // Must stay, but keeps nobody else.
    CHECK((victims(chunks, {0, 1, 2, 3}) == std::vector<Row>{2, 1, 0}));
    chunks.parents[0] = 2, chunks.children[0] = {2, 1, 1, 0, 0, 0, 0, 0};  // Circular.
    CHECK((victims(chunks, {2, 0, 1}) == std::vector<Row>{1}));
}

TEST(many_chunks_wait_for_one_leaf) {
    constexpr std::uint32_t count = 2000;
    Fixture chunks(count);
    Numbers all;
    std::vector<Row> order;
    for (std::uint32_t at = 0; at < count; ++at) all.push_back(at), order.push_back(static_cast<Row>(at));
    chunks.fill(all, all, no_row);
    chunks.enter(all, 0);
    std::vector<Row> expected(order.rbegin(), order.rend());
    CHECK(victims(chunks, order) == expected);
}

int main() {
    return kvtier::test::run();
}
