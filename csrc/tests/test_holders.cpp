#include <malloc.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <new>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.hpp"
#include "kvtier/key_numbers.hpp"

using namespace kvtier::holders;

namespace {

constexpr std::size_t any = SIZE_MAX;

std::size_t allocated = 0;  // Bytes, as the allocator counts them.

using Bytes = std::vector<std::uint8_t>;

// Keys that differ in their last bytes only.
Bytes keys_of(std::size_t first, std::size_t count) {
    Bytes joined(count * key_bytes);
    for (std::size_t at = 0; at < count; ++at) {
        const std::uint64_t number = first + at;
        std::memcpy(joined.data() + (at + 1) * key_bytes - sizeof(number), &number, sizeof(number));
    }
    return joined;
}

std::vector<Number> found(const KeyNumbers& table, const Bytes& joined) {
    std::vector<Number> numbers(joined.size() / key_bytes);
    table.find(Keys(joined), numbers);
    return numbers;
}

std::vector<Moved> set(KeyNumbers& table, const Bytes& joined, Number number) {
    std::size_t dropped = 0;
    return table.change(Keys(joined), [number](Number) { return number; }, any, dropped);
}

}  // namespace

// Not inlined, or GCC takes `malloc` and `delete` for a mismatch.
[[gnu::noinline]] void* operator new(std::size_t size) {
    void* memory = std::malloc(size);
    if (memory == nullptr) throw std::bad_alloc();
    allocated += malloc_usable_size(memory);
    return memory;
}

[[gnu::noinline]] void operator delete(void* memory) noexcept {
    allocated -= malloc_usable_size(memory);
    std::free(memory);
}

void operator delete(void* memory, std::size_t) noexcept { operator delete(memory); }

// A sanitizer's do not call those.
void* operator new[](std::size_t size) { return operator new(size); }
void operator delete[](void* memory) noexcept { operator delete(memory); }
void operator delete[](void* memory, std::size_t) noexcept { operator delete(memory); }

TEST(keys_have_the_number_that_they_were_given) {
    KeyNumbers table;
    const Bytes keys = keys_of(0, 100'000);
    const std::vector<Moved> moves = set(table, keys, 7);
    CHECK(moves.size() == 1 && moves[0].before == no_number && moves[0].after == 7 && moves[0].keys == 100'000);
    CHECK(table.size() == 100'000);
    CHECK(found(table, keys) == std::vector<Number>(100'000, 7));
    CHECK(found(table, keys_of(100'000, 1000)) == std::vector<Number>(1000, no_number));
    CHECK(set(table, keys, 7).empty());
}

TEST(random_changes_give_what_a_map_does) {
    std::mt19937_64 random(1);
    KeyNumbers table;
    std::map<std::size_t, Number> expected;
    for (int turn = 0; turn < 400; ++turn) {
        const std::size_t first = random() % 20'000, count = random() % 2000;
        const Number to = static_cast<Number>(random() % 3);
        std::size_t dropped = 0;
        // Some numbers stay as they are.
        const auto next = [to](Number before) { return before == 2 && to == 1 ? before : to; };
        std::map<std::pair<Number, Number>, std::uint64_t> moved;
        for (const Moved& each : table.change(Keys(keys_of(first, count)), next, any, dropped)) {
            moved[{each.before, each.after}] += each.keys;
        }
        std::map<std::pair<Number, Number>, std::uint64_t> expected_moves;
        for (std::size_t key = first; key < first + count; ++key) {
            const Number before = expected.contains(key) ? expected[key] : no_number;
            const Number after = next(before);
            if (before != after) ++expected_moves[{before, after}];
            if (after == no_number) expected.erase(key);
            else expected[key] = after;
        }
        CHECK(moved == expected_moves && dropped == 0);
        CHECK(table.size() == expected.size());
        if (turn % 20 == 0) {
            const std::vector<Number> numbers = found(table, keys_of(0, 22'000));
            for (std::size_t key = 0; key < numbers.size(); ++key) {
                CHECK(numbers[key] == (expected.contains(key) ? expected[key] : no_number));
            }
        }
        if (turn % 50 == 49) {
            const std::vector<Number> targets{0, 2, 0};
            for (std::size_t row = 0; row < KeyNumbers::rows; ++row) table.sweep(row, targets);
            std::erase_if(expected, [](const auto& each) { return each.second == 2; });
            for (auto& each : expected) each.second = 2;
            CHECK(table.size() == expected.size());
        }
    }
}

TEST(a_key_may_occur_twice_in_a_call) {
    KeyNumbers table;
    Bytes twice = keys_of(1, 1);
    twice.insert(twice.end(), twice.begin(), twice.end());
    std::size_t dropped = 0;
    const auto next = [](Number before) { return before + 1; };
    CHECK(table.change(Keys(twice), next, any, dropped).size() == 2);
    CHECK(table.size() == 1 && found(table, keys_of(1, 1)) == std::vector<Number>{2});
    set(table, twice, no_number);
    CHECK(table.size() == 0);
}

TEST(keys_beyond_the_limit_are_dropped) {
    KeyNumbers table;
    std::size_t dropped = 0;
    const auto next = [](Number before) { return before + 1; };
    table.change(Keys(keys_of(0, 300)), next, 200, dropped);
    CHECK(dropped == 100 && table.size() == 200);
    table.change(Keys(keys_of(0, 300)), next, 200, dropped);
    CHECK(dropped == 200 && found(table, keys_of(0, 200)) == std::vector<Number>(200, 2));
}

TEST(runs_end_at_the_first_unknown_key) {
    KeyNumbers table;
    set(table, keys_of(0, 300), 1);
    set(table, keys_of(300, 100), 2);
    set(table, keys_of(500, 100), 2);
    const std::vector<Run> runs = table.runs(Keys(keys_of(0, 600)));
    CHECK(runs.size() == 3 && runs[1].start == 300 && runs[1].number == 2);
    CHECK(runs[2].start == 400 && runs[2].number == no_number);
    CHECK(table.runs(Keys(keys_of(0, 0))).empty());
}

TEST(changes_that_throw_leave_a_valid_table) {
    KeyNumbers table;
    set(table, keys_of(0, 1000), 1);
    set(table, keys_of(1000, 1000), 2);
    std::size_t dropped = 0;
    const auto next = [](Number before) -> Number {
        if (before == 2) throw std::runtime_error("no");
        return no_number;
    };
    CHECK_THROWS(std::runtime_error, table.change(Keys(keys_of(0, 2000)), next, any, dropped));
    CHECK(table.size() == 1000 && found(table, keys_of(1000, 1000)) == std::vector<Number>(1000, 2));
}

TEST(churn_does_not_fill_the_table) {
    const std::size_t before = allocated;
    KeyNumbers table;
    for (std::size_t turn = 0; turn < 200; ++turn) {
        set(table, keys_of(turn * 5000, 5000), 1);
        if (turn > 0) set(table, keys_of((turn - 1) * 5000, 5000), no_number);
    }
    CHECK(table.size() == 5000);
    CHECK(found(table, keys_of(199 * 5000, 5000)) == std::vector<Number>(5000, 1));
    CHECK(allocated - before < 3'500'000);
}

TEST(numbers_beyond_the_targets_of_a_sweep_stay) {
    KeyNumbers table;
    set(table, keys_of(0, 1000), 1);
    set(table, keys_of(1000, 1000), 3);
    // As after sets were added in the middle of a sweep.
    const std::vector<Number> targets{0, 2, 2, no_number, 4};
    for (std::size_t row = 0; row < KeyNumbers::rows; ++row) {
        table.sweep(row, std::span<const Number>(targets).first(3));
    }
    CHECK(found(table, keys_of(0, 1000)) == std::vector<Number>(1000, 2));
    CHECK(found(table, keys_of(1000, 1000)) == std::vector<Number>(1000, 3));
}

TEST(next_is_called_once_for_each_number) {
    KeyNumbers table;
    for (std::size_t key = 0; key < 100; ++key) set(table, keys_of(key, 1), key % 2 == 0 ? 1 : 2);
    std::size_t dropped = 0, calls = 0;
    const auto next = [&calls](Number) { return ++calls, Number{3}; };
    CHECK(table.change(Keys(keys_of(0, 200)), next, any, dropped).size() == 3);
    CHECK(calls == 3);
}

// Rows of several blocks, which shrink again.
TEST(memory_is_freed_when_keys_leave) {
    const std::size_t before = allocated;
    KeyNumbers table;
    set(table, keys_of(0, 300'000), 1);
    const std::size_t full = allocated - before;
    CHECK(full < 300'000 * 60);
    set(table, keys_of(100'000, 200'000), no_number);
    CHECK(found(table, keys_of(0, 100'000)) == std::vector<Number>(100'000, 1));
    CHECK(allocated - before < full * 3 / 4);
    set(table, keys_of(0, 60'000), 2);
    for (std::size_t row = 0; row < KeyNumbers::rows; ++row) {
        table.sweep(row, std::vector<Number>{0, no_number, 2});
    }
    CHECK(table.size() == 60'000 && found(table, keys_of(0, 60'000)) == std::vector<Number>(60'000, 2));
    set(table, keys_of(0, 20'000), 1);
    for (std::size_t row = 0; row < KeyNumbers::rows; ++row) {
        table.sweep(row, std::vector<Number>{0, 1, no_number});
    }
    CHECK(table.size() == 20'000 && found(table, keys_of(0, 20'000)) == std::vector<Number>(20'000, 1));
    CHECK(allocated - before < full * 2 / 5);
}

TEST(invalid_arguments_throw) {
    KeyNumbers table;
    const Bytes keys = keys_of(0, 2);
    std::vector<Number> numbers(1);
    CHECK_THROWS(std::invalid_argument, Keys(std::span(keys).first(33)));
    CHECK_THROWS(std::invalid_argument, table.find(Keys(keys), numbers));
    CHECK_THROWS(std::out_of_range, table.sweep(KeyNumbers::rows, {}));
}

int main() { return kvtier::test::run(); }
