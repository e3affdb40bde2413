#include <cstdint>
#include <stdexcept>
#include <vector>

#include "check.hpp"
#include "kvtier/slices.hpp"

using kvtier::memory::Number;
using kvtier::memory::release;
using kvtier::memory::share;

using Numbers = std::vector<Number>;
using Rows = std::vector<std::uint32_t>;

TEST(slices_are_shared_up_to_the_first_row_without_one) {
    const Numbers places{3, 0, 1, 2};
    Numbers handles{1, 1, 1};
    CHECK(share(places, handles, Rows{0, 3, 1, 2}) == (Numbers{2, 1}));
    CHECK(handles == (Numbers{1, 2, 2}));
    CHECK(share(places, handles, Rows{2, 4, 0}) == Numbers{0});
    CHECK(share(places, handles, Rows{}).empty());
}

TEST(a_row_with_a_slice_without_handle_changes_nothing) {
    const Numbers places{1, 4, -2, 3};
    Numbers handles{1, 1, 0};
    CHECK_THROWS(std::out_of_range, share(places, handles, Rows{0, 1}));
    CHECK_THROWS(std::out_of_range, share(places, handles, Rows{0, 2}));
    CHECK_THROWS(std::out_of_range, share(places, handles, Rows{0, 3}));
    CHECK(handles == (Numbers{1, 1, 0}));
}

TEST(slices_without_a_handle_are_free) {
    Numbers handles{2, 1, 3};
    CHECK(release(handles, Rows{1, 0, 2, 0}) == (Numbers{1, 0}));
    CHECK(handles == (Numbers{0, 0, 2}));
}

TEST(a_slice_that_cannot_be_released_changes_nothing) {
    Numbers handles{2, 0};
    CHECK_THROWS(std::out_of_range, release(handles, Rows{0, 1}));
    CHECK_THROWS(std::out_of_range, release(handles, Rows{0, 0, 0}));
    CHECK_THROWS(std::out_of_range, release(handles, Rows{0, 2}));
    CHECK(handles == (Numbers{2, 0}));
}

int main() {
    return kvtier::test::run();
}
