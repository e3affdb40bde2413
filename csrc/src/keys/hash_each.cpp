#include <algorithm>
#include <cstring>
#include <vector>

#include "blake3_schedule.hpp"
#include "kvtier/blake3.hpp"
#include "kvtier/cpu.hpp"
#include "kvtier/intrinsics.hpp"

namespace kvtier::keys {

namespace {

#define KVTIER_SET portable
#define KVTIER_LANES 4
#define KVTIER_TARGET
#include "leaves.inc"

#if defined(__x86_64__)
#define KVTIER_SET avx2
#define KVTIER_LANES 8
#define KVTIER_TARGET __attribute__((target("avx2")))
#include "leaves.inc"

#define KVTIER_SET avx512
#define KVTIER_LANES 16
#define KVTIER_TARGET __attribute__((target("avx512f,avx2")))
#include "leaves.inc"
#endif

std::vector<LeafHasher> find_leaf_hashers() {
    std::vector<LeafHasher> found;
#if defined(__x86_64__)
    if (cpu::features().avx512) found.push_back({16, avx512::hash_leaves});
    if (cpu::features().avx2) found.push_back({8, avx2::hash_leaves});
#endif
    found.push_back({4, portable::hash_leaves});
    return found;
}

// Hash up to as many inputs as there are lanes.
void hash_some(const std::uint8_t* first, std::size_t length, std::span<Hash> hashes, const LeafHasher& leaves) {
    const std::size_t last_leaf = (length - 1) / leaf_bytes;
    std::array<ChainingValue, max_lanes> values;
    std::vector<Tree> trees(last_leaf > 0 ? hashes.size() : 0);
    for (std::size_t leaf = 0; leaf <= last_leaf; ++leaf) {
        const std::size_t start = leaf * leaf_bytes;
        Leaves row{{}, std::min(leaf_bytes, length - start), leaf, last_leaf == 0 ? is_root : no_flag};
        for (std::size_t lane = 0; lane < leaves.lanes; ++lane) {
            // Fill unused lanes with the last input.
            row.inputs[lane] = first + std::min(lane, hashes.size() - 1) * length + start;
        }
        leaves.hash(row, values.data());
        if (leaf == last_leaf) break;
        for (std::size_t lane = 0; lane < hashes.size(); ++lane) trees[lane].add(values[lane]);
    }
    for (std::size_t lane = 0; lane < hashes.size(); ++lane) {
        hashes[lane] = last_leaf > 0 ? trees[lane].finish(values[lane]) : std::bit_cast<Hash>(values[lane]);
    }
}

}  // namespace

std::span<const LeafHasher> leaf_hashers() {
    static const std::vector<LeafHasher> found = find_leaf_hashers();
    return found;
}

void hash_each(Bytes input, std::size_t length, std::span<Hash> hashes, const LeafHasher& leaves) {
    const std::uint8_t* first = input.data();
    while (!hashes.empty()) {
        const std::size_t count = std::min(hashes.size(), leaves.lanes);
        hash_some(first, length, hashes.first(count), leaves);
        first += count * length;
        hashes = hashes.subspan(count);
    }
}

}  // namespace kvtier::keys
