#include "kvtier/build_info.hpp"

#include "check.hpp"

TEST(the_compiler_has_a_name) {
    CHECK(!kvtier::build_info().compiler.empty());
}

TEST(wider_vectors_imply_narrower_ones) {
    const kvtier::BuildInfo info = kvtier::build_info();
    CHECK(!info.avx512 || info.avx2);
}

int main() {
    return kvtier::test::run();
}
