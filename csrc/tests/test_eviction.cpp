#include <cstdint>
#include <random>
#include <stdexcept>
#include <vector>

#include "check.hpp"
#include "kvtier/lru_ring.hpp"

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

int main() {
    return kvtier::test::run();
}
