#include <cstdint>
#include <random>
#include <stdexcept>
#include <vector>

#include "check.hpp"
#include "kvtier/simulation.hpp"

using namespace kvtier::simulation;

namespace {

using Ids = std::vector<std::uint64_t>;
using Numbers = std::vector<Number>;

struct Trace {
    Ids ids, ends;
    Numbers chunks{};
    Numbered result{};

    void number() {
        chunks.resize(ids.size());
        result = number_chunks(ids, ends, 4, chunks);
        chunks.resize(result.kept);
    }
};

}  // namespace

TEST(small_ids_are_numbers) {
    Trace trace{{4, 5, 4, 6, 5, 6}, {5, 5, 6}};
    trace.number();
    CHECK(trace.chunks == Numbers({4, 5, 6, 6}));
    CHECK(trace.ends == Ids({3, 3, 4}));
    CHECK(trace.result.numbers == 7 && trace.result.unique == 3);
}

TEST(large_ids_are_numbered_by_their_first_use) {
    Trace trace{{UINT64_MAX, 1ull << 40, 0, UINT64_MAX, 0, 7}, {4, 6}};
    trace.number();
    CHECK(trace.chunks == Numbers({0, 1, 2, 2, 3}));
    CHECK(trace.ends == Ids({3, 5}));
    CHECK(trace.result.numbers == 4 && trace.result.unique == 4);
}

TEST(repeated_chunks_do_not_count_for_the_limit) {
    Trace trace{{15, 3, 3, 3}, {4}};  // 16 numbers are as many as 4 chunks permit, and 2 do not.
    trace.number();
    CHECK(trace.chunks == Numbers({0, 1}));
    CHECK(trace.result.numbers == 2 && trace.result.unique == 2);
}

TEST(many_large_ids_have_different_numbers) {
    Trace trace;
    for (std::uint64_t id = 0; id < 5000; ++id) trace.ids.push_back(id << 40);
    trace.ids.insert(trace.ids.end(), trace.ids.begin(), trace.ids.begin() + 5000);
    trace.ends = {5000, 10000};
    trace.number();
    CHECK(trace.result.kept == 10000 && trace.result.numbers == 5000);
    for (Number number = 0; number < 5000; ++number) {
        CHECK(trace.chunks[number] == number && trace.chunks[5000 + number] == number);
    }
}

TEST(columns_that_do_not_fit_together_are_refused) {
    for (Ids ends : {Ids{}, Ids{1}, Ids{3}, Ids{2, 1, 2}}) {
        Trace trace{{1, 2}, ends};
        CHECK_THROWS(std::invalid_argument, (trace.number(), 0));
    }
    Trace trace{{1, 2}, {2}};
    Numbers few(1);
    CHECK_THROWS(std::invalid_argument, number_chunks(trace.ids, trace.ends, 4, few));
}

TEST(the_optimum_keeps_what_is_used_first) {
    const Ids ends{2, 3, 5};
    const Numbers order{0, 1, 2}, chunks{1, 2, 3, 2, 3};
    Numbers uses(5);
    next_uses({ends, order}, chunks, 4, uses);
    CHECK(uses == Numbers({3, 2, 2, 3, 3}));
    int advanced = 0;
    const auto advance = [&advanced] { ++advanced; };
    CHECK(belady_hits({ends, order}, uses, 0, 0, {}) == 0);
    CHECK(belady_hits({ends, order}, uses, 1, 2, advance) == 1);
    CHECK(belady_hits({ends, order}, uses, 2, 1, advance) == 2);
    CHECK(advanced == 1 + 3);
}

TEST(what_is_inconsistent_throws) {
    const Ids ends{1, 2}, unordered{2, 1}, beyond{1, 3};
    const Numbers order{0, 1}, other{0, 2}, chunks{0, 1};
    Numbers uses(2), few(1);
    CHECK_THROWS(std::out_of_range, (next_uses({ends, order}, chunks, 1, uses), 0));
    CHECK_THROWS(std::out_of_range, (next_uses({ends, other}, chunks, 2, uses), 0));
    CHECK_THROWS(std::out_of_range, (next_uses({unordered, order}, chunks, 2, uses), 0));
    CHECK_THROWS(std::out_of_range, (next_uses({beyond, order}, chunks, 2, uses), 0));
    CHECK_THROWS(std::invalid_argument, (next_uses({ends, order}, chunks, 2, few), 0));
    CHECK_THROWS(std::out_of_range, belady_hits({ends, order}, Numbers{0, 2}, 1, 0, {}));
    CHECK_THROWS(std::out_of_range, belady_hits({ends, order}, Numbers{1, 3}, 1, 0, {}));
    CHECK_THROWS(std::out_of_range, belady_hits({ends, order}, few, 1, 0, {}));
}

int main() {
    return kvtier::test::run();
}
