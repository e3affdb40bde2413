#include <cstdint>
#include <random>
#include <stdexcept>
#include <vector>

#include "check.hpp"
#include "kvtier/lru_ring.hpp"
#include "kvtier/rings.hpp"
#include "kvtier/visits.hpp"

using kvtier::eviction::LruRing;

namespace {

// The arrays of a ring with `rows` rows.
struct Ring {
    std::vector<LruRing::Place> warmer, colder;

    explicit Ring(std::size_t rows) : warmer(rows + 1, -1), colder(rows + 1, -1) { warmer[0] = colder[0] = 0; }

    LruRing it() { return {warmer, colder}; }

    // Rows from coldest to warmest.
    std::vector<std::uint32_t> order() const {
        std::vector<std::uint32_t> rows;
        for (LruRing::Place place = warmer[0]; place != 0; place = warmer[static_cast<std::size_t>(place)]) {
            rows.push_back(static_cast<std::uint32_t>(place - 1));
        }
        return rows;
    }
};

using Rows = std::vector<std::uint32_t>;

}  // namespace

TEST(each_row_of_a_chain_is_colder_than_the_one_before) {
    Ring ring(8);
    ring.it().link_chain(Rows{3, 1, 4}, -1);
    CHECK(ring.order() == Rows{4, 1, 3});
    ring.it().link_chain(Rows{5, 6}, 1);
    CHECK(ring.order() == Rows{4, 6, 5, 1, 3});
    ring.it().link_chain(Rows{0}, 7);
    CHECK(ring.order() == Rows{4, 6, 5, 1, 3, 0});
}

TEST(touched_rows_become_the_warmest_root_last) {
    Ring ring(8);
    ring.it().link_chain(Rows{0, 1, 2}, -1);
    ring.it().link_chain(Rows{3, 4}, -1);
    ring.it().touch(Rows{0, 1, 7, 2, 100});
    CHECK(ring.order() == Rows{4, 3, 2, 1, 0});
}

TEST(unlinked_rows_leave_the_ring) {
    Ring ring(8);
    ring.it().link_chain(Rows{0, 1, 2, 3}, -1);
    ring.it().unlink(Rows{1, 3, 1, 6, 100});
    CHECK(ring.order() == Rows{2, 0});
    ring.it().unlink(Rows{0, 2});
    CHECK(ring.order().empty());
}

TEST(batch_operations_equal_single_ones) {
    std::mt19937 random(1);
    Ring all(300), single(300);
    std::vector<bool> linked(300, false);
    for (int turn = 0; turn < 2000; ++turn) {
        Rows rows;
        const bool link = random() % 3 == 0;
        for (std::size_t count = random() % 20; count > 0; --count) {
            const auto row = static_cast<std::uint32_t>(random() % 300);
            if (link && linked[row]) continue;
            linked[row] = linked[row] || link;
            rows.push_back(row);
        }
        if (link) {
            const std::int64_t parent = static_cast<std::int64_t>(random() % 301) - 1;
            bool among = false;
            for (const std::uint32_t row : rows) among = among || row == parent;
            const std::int64_t first = among ? -1 : parent;
            all.it().link_chain(rows, first);
            for (std::size_t at = 0; at < rows.size(); ++at) {
                single.it().link_chain(Rows{rows[at]}, at == 0 ? first : rows[at - 1]);
            }
        } else if (random() % 2 == 0) {
            all.it().touch(rows);
            for (std::size_t at = rows.size(); at > 0; --at) single.it().touch(Rows{rows[at - 1]});
        } else {
            all.it().unlink(rows);
            for (const std::uint32_t row : rows) {
                single.it().unlink(Rows{row});
                linked[row] = false;
            }
        }
        CHECK(all.warmer == single.warmer && all.colder == single.colder);
    }
}

TEST(a_corrupt_ring_throws) {
    Ring ring(4);
    ring.it().link_chain(Rows{0, 1}, -1);
    ring.warmer[1] = 99;
    CHECK_THROWS(std::out_of_range, (ring.it().touch(Rows{0}), 0));
    CHECK_THROWS(std::out_of_range, (ring.it().link_chain(Rows{4}, -1), 0));
    ring.warmer.push_back(-1);
    CHECK_THROWS(std::invalid_argument, ring.it());
}

TEST(used_rows_become_the_warmest_of_another_ring) {
    // Two rings and the rows 0 to 3, of which 0 and 1 are in ring 0, 2 in ring 1, and 3 in none.
    std::vector<LruRing::Place> warmer{2, 4, 3, 0, 1, 0}, colder{3, 4, 0, 2, 1, 0};
    std::vector<std::uint8_t> ring_of{0, 0, 1, kvtier::eviction::Rings::nowhere};
    std::vector<std::int64_t> counts{2, 1};
    kvtier::eviction::Rings rings(warmer, colder, ring_of, counts);
    rings.use(Rows{1, 0, 3, 100, 1}, 1);
    CHECK(counts == (std::vector<std::int64_t>{0, 3}));
    CHECK(ring_of == (std::vector<std::uint8_t>{1, 1, 1, 255}));
    CHECK(warmer[1] == 4 && warmer[4] == 2 && warmer[2] == 3 && warmer[3] == 1);
    CHECK_THROWS(std::out_of_range, (rings.use(Rows{0}, 2), 0));
    warmer[2] = 99;
    CHECK_THROWS(std::out_of_range, (rings.use(Rows{0}, 0), 0));
    ring_of.pop_back();
    CHECK_THROWS(std::invalid_argument, kvtier::eviction::Rings(warmer, colder, ring_of, counts));
}

TEST(runs_are_chains_of_rows_with_a_visit) {
    const std::vector<std::int32_t> of_row{0, 0, -1, 1, 1}, parents{-1, 0, 1, 2, 3};
    const auto found = kvtier::eviction::runs(of_row, parents, Rows{0, 1, 2, 3, 4, 9});
    CHECK(found == (std::vector<std::vector<std::int32_t>>{{0, 1}, {3, 4}}));
}

TEST(taken_rows_leave_their_visits) {
    std::vector<std::int32_t> of_row{0, 0, 1, -1}, counts{2, 1, 0};
    CHECK(kvtier::eviction::take(of_row, counts, 2, Rows{0, 2}) == std::vector<std::int32_t>{1});
    CHECK(counts == (std::vector<std::int32_t>{1, 0, 2}));
    CHECK_THROWS(std::out_of_range, kvtier::eviction::take(of_row, counts, 2, Rows{3}));
    CHECK_THROWS(std::out_of_range, kvtier::eviction::take(of_row, counts, 2, Rows{4}));
    CHECK_THROWS(std::out_of_range, kvtier::eviction::take(of_row, counts, 3, Rows{0}));
}

TEST(old_visits_move_to_the_ring_of_their_age) {
    // Three rings, of ages from 0, 10 and 20 seconds, and three visits in the first one.
    std::vector<std::int32_t> newer{3, 1, 2, 4, 5, 0}, older{5, 1, 2, 0, 3, 4}, ring_of{0, 0, 0}, sizes{3, 0, 0};
    const std::vector<double> since{0, 15, 28}, starts{0, 10, 20};
    kvtier::eviction::VisitRings rings(newer, older, ring_of, sizes, since);
    CHECK(rings.move_on(0, 0, starts, 30, 1) == (std::vector<std::int64_t>{0, 0, 1}));
    CHECK(rings.move_on(0, 0, starts, 30, 9) == (std::vector<std::int64_t>{0, 1, 0}));
    CHECK(sizes == (std::vector<std::int32_t>{1, 1, 1}));
    CHECK(ring_of == (std::vector<std::int32_t>{2, 1, 0}));
    CHECK(newer[0] == 5 && newer[1] == 4 && newer[2] == 3 && older[2] == 3);
    CHECK_THROWS(std::out_of_range, rings.move_on(1, 0, starts, 30, 1));
    newer[0] = 99;
    CHECK_THROWS(std::out_of_range, rings.move_on(0, 0, starts, 99, 1));
    sizes.push_back(0);
    CHECK_THROWS(std::invalid_argument, kvtier::eviction::VisitRings(newer, older, ring_of, sizes, since));
}

int main() {
    return kvtier::test::run();
}
